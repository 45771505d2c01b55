"""Jobs on a cluster that runs: Ray's job API, with addresses checked first and logs followed to the last line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raydist.doctor.address import AddressError, check_answers, parse_address
from raydist.errors import ConfigError, RaydistError
from raydist.runners.packing import Package, write_zip

PORT = 8265
_POLL_S = 1.0
_PATIENCE_S = 60.0
"""How long a cluster may not answer while a job is followed."""
_HTTP_S = (5.0, 120.0)
"""Seconds to connect, and to wait for an answer."""
_STOP_MARGIN_S = 30
_AGENT_S = 60.0
"""How long a cluster that has just started may need until it takes jobs."""
_OURS = re.compile(r"^exec (?:'[^']*'|\S+) -m raydist ")
_SHOWN = 80
"""Characters of a job's command in the table of jobs."""
_KNOWN_CODES = range(1, 256)


class Unreachable(AddressError):
    """The cluster does not answer any more."""


class _Client(JobSubmissionClient):
    """Ray's client, which waits without limit by itself."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        import requests

        try:
            return super()._do_request(method, endpoint, **{"timeout": _HTTP_S, **options})
        except (requests.ConnectionError, requests.Timeout) as error:
            raise Unreachable(
                f"{self._address} does not answer ({type(error).__name__})", "see whether the head node is up, and the network"
            ) from error


def connect(address: str | None) -> JobSubmissionClient:
    """A client of the dashboard at `address` (`http://HOST:8265`). ConfigError or AddressError when there is none."""
    from ray.exceptions import AuthenticationError

    where = parse_address(address if address not in (None, "auto") else f"127.0.0.1:{PORT}", PORT)
    if where.scheme == "ray":
        raise ConfigError(
            f"address {address!r} is a Ray Client's; jobs go to the dashboard, such as http://{where.host}:{PORT}"
        )
    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
    check_answers(where, usual=f"the dashboard's, {PORT} by default")
    try:
        with _without_addresses():
            return _Client(f"{where.scheme or 'http'}://{where}", headers=_token())
    except AuthenticationError as error:
        theirs = "another token than this machine's" if "Invalid" in str(error) else "a token, and this machine has none"
        raise AddressError(
            f"{where} refused: the cluster wants {theirs}",
            "copy the head node's ~/.ray/auth_token here, or set RAY_AUTH_TOKEN",
        ) from error
    except (Unreachable, RuntimeError, ValueError, KeyError, OSError) as error:
        raise AddressError(
            f"{where} refused: what listens there is no Ray dashboard ({' '.join(str(error).split())[:200]})",
            f"give the dashboard's address, port {PORT} by default (6379 is the head node's own)",
        ) from error


def _token() -> dict[str, str]:
    """This machine's token, also where RAY_AUTH_MODE is not set; Ray's client would then send none."""
    from ray import _raylet

    untyped: Any = _raylet
    return dict(untyped.AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True))


@contextlib.contextmanager
def _without_addresses() -> Iterator[None]:
    """Ray's client prefers these variables to the address that it is given."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def entrypoint(arguments: Sequence[str], python: str = "python") -> str:
    """The shell command of a job: every argument arrives as it is. The shell is replaced, so that signals reach raydist."""
    return " ".join(["exec", shlex.quote(python), "-m", "raydist", *map(shlex.quote, arguments)])


def submit(client: JobSubmissionClient, package: Package, command: str, grace: float = 30.0) -> str:
    """Send the package, start the job, and return its id. `grace`: seconds that a stop leaves it to save."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.zip"
        write_zip(package, archive)
        wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace) + _STOP_MARGIN_S)}  # 3 by default: too short to save
        deadline = time.monotonic() + _AGENT_S
        while True:
            try:
                return str(client.submit_job(entrypoint=command, runtime_env={"working_dir": str(archive), "env_vars": wait}))
            except (RuntimeError, ValueError) as error:
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise RaydistError(f"the cluster did not take the job: {error}") from error
            time.sleep(_POLL_S)


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], None]) -> JobDetails:
    """Write the job's log as it grows, to the last line, and return what the job became. Lost connections are made again."""
    seen = 0
    lost: float | None = None
    while True:
        seen = asyncio.run(_tail(client, job, seen, write))
        try:
            info = details(client, job)
            if info.status.is_terminal():
                write(logs(client, job)[seen:])
                return info
            lost = None
        except Unreachable as error:
            lost = lost or time.monotonic()
            if time.monotonic() - lost > _PATIENCE_S:
                raise AddressError(
                    f"{error.found} for {_PATIENCE_S:g} s", f"the job may go on; raydist logs {job} -f looks again"
                ) from error
        time.sleep(_POLL_S)


def _dropped() -> tuple[type[BaseException], ...]:
    import aiohttp

    return (RuntimeError, OSError, aiohttp.ClientError)


async def _tail(client: JobSubmissionClient, job: str, seen: int, write: Callable[[str], None]) -> int:
    """Write what comes after the first `seen` characters until the stream ends, early or not; how many there were."""
    count = 0
    try:
        async for text in client.tail_job_logs(job):
            count += len(text)
            if count > seen:
                write(text[-(count - seen) :])
                seen = count
    except _dropped():
        return seen
    return seen


def details(client: JobSubmissionClient, job: str) -> JobDetails:
    """The job's status. ConfigError when the cluster knows no such job."""
    try:
        return client.get_job_info(job)
    except RuntimeError as error:
        if "404" in str(error):
            raise ConfigError(f"no job {job!r} on this cluster; `raydist jobs` lists them") from error
        raise RaydistError(f"job {job}: {error}") from error


def logs(client: JobSubmissionClient, job: str) -> str:
    """All that the job has printed so far."""
    details(client, job)
    try:
        return str(client.get_job_logs(job))
    except RuntimeError:
        return ""  # it has no log yet


def stop(client: JobSubmissionClient, job: str, wait: bool = True) -> JobDetails:
    """Ask the job to stop, which saves a checkpoint first, and wait until it has."""
    info = details(client, job)
    if info.status.is_terminal():
        return info
    client.stop_job(job)
    while wait and not info.status.is_terminal():
        time.sleep(_POLL_S / 2)
        info = details(client, job)
    return info


def exit_code(info: JobDetails) -> int:
    """0 for a job that succeeded, its own exit code where it is known, else 1."""
    if info.status == JobStatus.SUCCEEDED:
        return 0
    code = info.driver_exit_code
    return code if info.status == JobStatus.FAILED and code is not None and code in _KNOWN_CODES else 1


def verdict(info: JobDetails, job: str) -> str:
    """One line on how a job ended; Ray's own words where no program ran."""
    code = info.driver_exit_code
    if info.status == JobStatus.FAILED and code is None:
        return f"job {job} FAILED before it ran: {info.message}"
    return f"job {job} {info.status}" + (f" with exit code {code}" if code else "")


def table(client: JobSubmissionClient) -> list[list[str]]:
    """A row for each job that was sent, newest first: id, status, start, how long, command."""
    sent = [info for info in client.list_jobs() if info.submission_id]
    return [_row(info) for info in sorted(sent, key=lambda info: info.start_time or 0, reverse=True)]


def _row(info: JobDetails) -> list[str]:
    began = (info.start_time or 0) / 1000
    ended = info.end_time / 1000 if info.end_time else time.time()
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    status = str(info.status.value) + (f" ({info.driver_exit_code})" if info.driver_exit_code else "")
    words = _OURS.sub("raydist ", " ".join(info.entrypoint.split()))
    shown = words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"
    return [str(info.submission_id), status, started, f"{max(0.0, ended - began):.0f} s", shown]
