"""Jobs sent from a machine that is no part of the cluster, with this folder's files."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, Hosts, why_not

REASON = why_not()
pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
URL = "http://10.77.0.1:8265"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A head with a dashboard, and `out`, from where jobs are sent."""
    with Hosts(["a", "out"], tmp_path_factory.mktemp("hosts")) as made:
        own = ("--node-ip-address=10.77.0.1", "--num-cpus=3", "--object-store-memory=100000000", "--disable-usage-stats")
        shown = ("--dashboard-host=10.77.0.1", "--dashboard-port=8265")
        head = made["a"].popen(RAY, "start", "--head", "--port=6379", *own, *shown, **TOKEN)
        assert head.wait(90) == 0, head.communicate()[0]
        head.communicate()
        yield made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script whose name is no plain word, and data that git ignores."""
    (tmp_path / "data ü").mkdir()
    (tmp_path / "data ü/1.txt").write_text("eins")
    (tmp_path / ".gitignore").write_text("data*\n")
    (tmp_path / "mein skript ü.py").write_text(SCRIPT)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SCRIPT = """
import json, os, signal, sys, time
if "fail" in sys.argv: sys.exit(7)
if "stay" in sys.argv:
    print("up", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True) or sys.exit(3))
    time.sleep(600)
print(json.dumps([os.environ["RANK"], sys.argv, open("data ü/1.txt").read()]))
print("the last word", end="")
"""


def command(*arguments: str) -> list[str]:
    """In this folder: a host's commands begin in the root."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), sys.executable, "-m", "raydist", *arguments]


def raydist(host: Host, *arguments: str, **environment: str) -> tuple[int, str, str]:
    settings = {**TOKEN, "PYTHONPATH": str(ROOT), **environment}
    done = host.run(*command(*arguments), timeout=150, check=False, **settings)
    return done.returncode, done.stdout, done.stderr


def submit(host: Host, *arguments: str, **environment: str) -> tuple[int, str, str]:
    return raydist(host, "submit", "--address", URL, "--python", sys.executable, *arguments, **environment)


def test_a_script_is_run_with_its_files_and_arguments(hosts: Hosts, project: Path) -> None:
    arguments = ["data ü", "a b", "it's", '"$HOME"', "", "--no-wait", "--address", "back\\slash", "ü\n"]
    code, out, told = submit(hosts["out"], "run", "--workers", "2", "mein skript ü.py", *arguments)
    assert code == 0, told + out
    assert "data ü needs 1 file (4 B) that git ignores; added: data ü/1.txt" in told
    (line,) = [line for line in out.splitlines() if line.startswith("[")]
    assert json.loads(line) == ["0", ["mein skript ü.py", *arguments], "eins"]
    assert "the last word" in out and re.search(r"^raydist: job raysubmit_\w+ SUCCEEDED$", told, re.M)


def test_a_job_that_fails_gives_its_exit_code(hosts: Hosts, project: Path) -> None:
    code, out, told = submit(hosts["out"], "run", "mein skript ü.py", "fail")
    assert code == 7 and "rank 0 on a: exit code 7" in out and "FAILED with exit code 7" in told


def test_a_job_file_trains_there(hosts: Hosts, project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.mktemp("shared")
    (project / "job.yaml").write_text(JOB)
    (project / "data.csv").write_text("x,y\n" + "".join(f"{x},{3 * x}\n" for x in range(1, 9)))
    code, out, told = submit(hosts["out"], "train", "job.yaml", f"storage={shared}")
    assert code == 0, told + out
    assert "data.train.path needs 1 file" in told and "added: data.csv" in told
    assert json.loads((shared / "sent" / "summary.json").read_text())["status"] == "finished"
    code, _, told = submit(hosts["out"], "train", "job.yaml", f"storage={shared}", "optimizer.lr=-1")
    assert code == 2 and "optimizer.lr" in told and "raysubmit" not in told
    code, _, told = submit(hosts["out"], "--exclude", "*", "train", "job.yaml", f"storage={shared}")
    assert code == 2 and "--exclude *: nothing is left" in told


JOB = """
name: sent
task:
  model: {target: torch.nn:Linear, args: {in_features: 1, out_features: 1}}
  loss: {target: torch.nn.functional:mse_loss}
  inputs: [[x]]
  targets: [y]
data: {train: {path: data.csv}}
batch: {global_size: 4}
train: {epochs: 1}
optimizer: {name: sgd, lr: 0.01}
scaling: {workers: 1}
storage: /mnt/shared
"""


def test_without_waiting_then_logs_and_stop(hosts: Hosts, project: Path) -> None:
    code, out, told = submit(hosts["out"], "--no-wait", "run", "mein skript ü.py", "stay")
    job = out.strip()
    assert code == 0 and re.fullmatch(r"raysubmit_\w+", job)
    assert f"`raydist logs {job} -f --address {URL}` follows it" in told
    assert wait_for_log(hosts["out"], job, "up")
    code, out, _ = raydist(hosts["out"], "jobs", "--address", URL)
    assert code == 0 and re.search(rf"^{job} +RUNNING  .* s +raydist run 'mein skript ü.py' stay$", out, re.M)
    follower = hosts["out"].popen(*command("logs", job, "-f", "--address", URL), **TOKEN, PYTHONPATH=str(ROOT))
    time.sleep(5)
    code, _, told = raydist(hosts["out"], "stop", job, "--address", URL)
    assert code == 0 and f"job {job} STOPPED" in told
    shown = follower.communicate(timeout=60)[0]
    assert follower.returncode == 1 and "heard" in shown and f"job {job} STOPPED" in shown
    code, _, told = raydist(hosts["out"], "logs", "raysubmit_no", "--address", URL)
    assert code == 2 and "no job 'raysubmit_no' on this cluster" in told


def test_ctrl_c_leaves_the_job_running(hosts: Hosts, project: Path) -> None:
    arguments = ["submit", "--address", URL, "--python", sys.executable, "run", "mein skript ü.py", "stay"]
    process = hosts["out"].popen(*command(*arguments), **TOKEN, PYTHONPATH=str(ROOT))
    assert process.stdout is not None
    shown = ""
    while "up\n" not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    inner = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(inner, signal.SIGINT)
    rest = process.communicate(timeout=30)[0]
    (job,) = set(re.findall(r"raysubmit_\w+", shown))
    assert process.returncode == 130
    assert rest == (
        f"raydist: job {job} goes on; `raydist logs {job} -f --address {URL}` follows it, "
        f"`raydist stop {job} --address {URL}` stops it\n"
    )
    assert raydist(hosts["out"], "stop", job, "--address", URL)[0] == 0


def wait_for_log(host: Host, job: str, word: str) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if word in raydist(host, "logs", job, "--address", URL)[1]:
            return True
        time.sleep(0.5)
    return False


def test_a_wrong_token_and_addresses(hosts: Hosts, project: Path) -> None:
    none = {"RAY_AUTH_TOKEN": "", "HOME": str(project)}
    for environment, words in (
        ({"RAY_AUTH_TOKEN": secrets.token_hex(32)}, "refused: the cluster wants another token than this machine's"),
        (none, "refused: the cluster wants a token, and this machine has none"),
    ):
        code, _, told = raydist(hosts["out"], "jobs", "--address", URL, **environment)
        assert code == 1 and words in told, told
    began = time.monotonic()
    code, _, told = raydist(hosts["out"], "jobs", "--address", "http://10.77.0.1:8266")
    assert code == 1 and "10.77.0.1:8266 refused: Connection refused: nothing listens there" in told
    hosts["a"].block("10.77.0.2", "8265")
    try:
        code, _, told = raydist(hosts["out"], "jobs", "--address", URL)
    finally:
        hosts["a"].unblock()
    assert code == 1 and "10.77.0.1:8265 timed out: no answer in 5 s" in told
    assert time.monotonic() - began < 30
