"""Ray's job API from outside: addresses that lead nowhere, tokens, logs to the last line, exit codes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from ray import _raylet
from ray.job_submission import JobDetails, JobStatus, JobType

from raydist.cli import main
from raydist.doctor.address import AddressError
from raydist.errors import ConfigError
from raydist.runners import jobs


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def answering(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """A server that gives (status, JSON) by path; 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path.rstrip("/"), (404, "no such thing"))
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.1", r"address '10.0.0.1' is malformed: write HOST:PORT, such as 10.0.0.1:8265"),
        ("fd00::1:8265", r"is malformed: an IPv6 address goes in brackets; write \[fd00::1\]:8265"),
        ("http://[fd00::1]", r"is malformed"),
        ("ftp://h:8265", r"is malformed: ftp:// is none of "),
        ("http://h:99999", r"is malformed: the port is '99999'"),
        ("ray://10.0.0.1:10001", r"is a Ray Client's; jobs go to the dashboard, such as http://10.0.0.1:8265"),
    ],
)
def test_an_address_that_is_none(address: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        jobs.connect(address)
    assert main(["jobs", "--address", address]) == 2
    assert capsys.readouterr().err.startswith("raydist: wrong job or command: address ")


@pytest.mark.parametrize("shape", ["http://127.0.0.1:{}", "127.0.0.1:{}", "http://[::1]:{}"])
def test_nobody_listens(shape: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = shape.format(free.getsockname()[1])
        with pytest.raises(AddressError, match=r"refused: .*is that its port \(the dashboard's, 8265 by default\)\?"):
            jobs.connect(address)


def test_something_else_listens_there() -> None:
    with answering({"": (200, "hello")}) as address, pytest.raises(AddressError, match="refused: what listens there is no Ray"):
        jobs.connect(address)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("Unauthorized: Missing authentication token", "a token, and this machine has none"),
        ("Forbidden: Invalid authentication token", "another token than this machine's"),
    ],
)
def test_a_cluster_that_wants_a_token(theirs: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(get_token_for_http_header=lambda ignore_auth_mode=False: {})
    monkeypatch.setattr(_raylet, "AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader))
    status = 401 if "Missing" in theirs else 403
    with (
        answering({"/api/version": (status, theirs)}) as address,
        pytest.raises(AddressError, match=f"refused: the cluster wants {words}: copy the head node's"),
    ):
        jobs.connect(address)


def info(status: str, code: int | None = None, message: str = "") -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        entrypoint="x",
        status=JobStatus(status),
        driver_exit_code=code,
        message=message,
        submission_id="j",
    )


@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        ("SUCCEEDED", 0, 0, "job j SUCCEEDED"),
        ("FAILED", 3, 3, "job j FAILED with exit code 3"),
        ("FAILED", 139, 139, "job j FAILED with exit code 139"),
        ("FAILED", -9, 1, "job j FAILED with exit code -9"),
        ("FAILED", None, 1, "job j FAILED before it ran: no room"),
        ("STOPPED", None, 1, "job j STOPPED"),
    ],
)
def test_only_a_success_is_0(status: str, code: int | None, expected: int, words: str) -> None:
    found = info(status, code, "no room")
    assert (jobs.exit_code(found), jobs.verdict(found, "j")) == (expected, words)


class Client:
    """A job whose log stream breaks off before each of its lines, and whose end is told before the last line is."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.seen = lines, 0

    async def tail_job_logs(self, job: str) -> Any:
        for line in self.lines[: self.seen]:
            yield line
        raise RuntimeError("the connection is lost")

    def get_job_info(self, job: str) -> JobDetails:
        self.seen += 1
        return info("SUCCEEDED" if self.seen == len(self.lines) else "RUNNING")

    def get_job_logs(self, job: str) -> str:
        return "".join(self.lines)


def test_a_log_is_followed_to_its_last_line_over_lost_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)
    written: list[str] = []
    client: Any = Client(["a\n", "bü\n", "c"])
    assert jobs.follow(client, "j", written.append).status == JobStatus.SUCCEEDED
    assert "".join(written) == "a\nbü\nc"


def test_a_job_that_nobody_knows() -> None:
    def missing(job: str) -> Any:
        raise RuntimeError("Request failed with status code 404: Job x does not exist")

    client: Any = SimpleNamespace(get_job_info=missing)
    with pytest.raises(ConfigError, match="no job 'x' on this cluster; `raydist jobs` lists them"):
        jobs.details(client, "x")


def test_the_table_has_the_newest_first() -> None:
    def row(name: str, entrypoint: str, start: int, end: int | None) -> JobDetails:
        return info("RUNNING").model_copy(
            update={"submission_id": name, "entrypoint": entrypoint, "start_time": start, "end_time": end}
        )

    found = [
        row("old", jobs.entrypoint(["train", "a b.yaml"], "/x y/python"), 1000, 61_000),
        row("new", "python other.py " + "x" * 100, 2000, 2500),
        info("RUNNING").model_copy(update={"submission_id": None}),
    ]
    client: Any = SimpleNamespace(list_jobs=lambda: found)
    rows = jobs.table(client)
    assert [(row[0], row[3]) for row in rows] == [("new", "0 s"), ("old", "60 s")]
    assert rows[1][4] == "raydist train 'a b.yaml'"
    assert len(rows[0][4]) == 80 and rows[0][4].endswith("x…")


def test_the_shell_passes_arguments_on() -> None:
    line = jobs.entrypoint(["run", "mein skript.py", "it's", '"$x"', "a\nb", ""], "python3")
    assert line == "exec python3 -m raydist run 'mein skript.py' 'it'\"'\"'s' '\"$x\"' 'a\nb' ''"
