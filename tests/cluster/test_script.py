"""Scripts made for torchrun, on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.cli import main

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

DUMP = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "folder": os.getcwd(), "stdin": sys.stdin.read()}))
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def run(text: str | None, *options: str, arguments: tuple[str, ...] = (), name: str = "script.py") -> int:
    if text is not None:
        Path(name).write_text(text)
    return main(["run", *options, name, *arguments])


def log(rank: int, attempt: int = 0, name: str = "stdout.log") -> bytes:
    (found,) = Path("runs").glob(f"*/attempt_{attempt}/{rank}/{name}")
    return found.read_bytes()


def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    assert run(DUMP, "--workers", "2", "--tee", "none", "--env", "OURS=a=b") == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3"]
    subprocess.run([*torchrun, "--log-dir", "theirs", "script.py"], check=True, capture_output=True, timeout=120)
    for rank in range(2):
        ours = json.loads(log(rank))["env"]
        theirs = json.loads(next(Path("theirs").glob(f"*/attempt_0/{rank}/stdout.log")).read_text())["env"]
        assert ours.pop("OURS") == "a=b"
        differ = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        differ -= {name for name in differ if name.startswith(("RAY", "_", "PYTEST"))}
        own = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
        assert differ <= own | NODES, differ
        assert own - {"TORCHELASTIC_ERROR_FILE"} <= ours.keys()


NODES = {
    "COLUMNS",
    "LINES",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}
"""Those of the node rather than of this process, on a cluster that was there before."""


def test_arguments_arrive_as_they_are(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    arguments = ("--lr", "-1", "a b", "", "ü\n", "--", "--workers", "'\"$x", "-m", "\udcff")
    assert run(DUMP, arguments=arguments, name="mein skript ü.py") == 0
    seen = json.loads(capfdbinary.readouterr().out)
    assert seen["argv"] == ["mein skript ü.py", *arguments]
    assert (seen["folder"], seen["stdin"]) == (str(tmp_path), "")


def test_output_is_kept_byte_for_byte_and_shown_by_rank(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = (
        "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 20_000 + os.environ['RANK'].encode()); os.write(2, b'e')"
    )
    assert run(text, "--workers", "2") == 0
    for rank in range(2):
        assert log(rank) == bytes(range(256)) * 20_000 + str(rank).encode() and log(rank, name="stderr.log") == b"e"
    assert capfdbinary.readouterr().out == log(0)


def test_lines_of_several_ranks_begin_with_the_rank(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = "import os; print('a'); print('b', end='' if os.environ['RANK'] == '2' else None)"
    assert run(text, "--workers", "3", "--tee", "0,2") == 0
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"[0] a", b"[0] b", b"[2] a", b"[2] b"]


FAILS = """
import os, sys, time, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the ünlucky one")
    time.sleep(600)

main()
"""


def test_the_first_failure_is_told_and_the_others_are_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(FAILS, "--workers", "2") == 1
    told = capfd.readouterr().err
    assert re.search(r"^raydist: failed: rank 1 on \S+: exit code 1; its logs: runs/script-\S+/attempt_0/1/$", told, re.M)
    assert "ValueError: the ünlucky one" in told
    assert "ünlucky" in json.loads(log(1, name="error.json"))["message"]["message"]


def test_a_restart_begins_again_with_all(capfd: pytest.CaptureFixture[str]) -> None:
    text = """
import os, signal
count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
print(count, most)
if count == "0" and os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(text, "--workers", "2", "--max-restarts", "2") == 0
    assert (log(1, 0), log(1, 1)) == (b"0 2\n", b"1 2\n")
    assert "rank 1 on " in (told := capfd.readouterr().err) and "killed by SIGKILL (exit code 137)" in told
    assert "restart 1 of 2" in told and "restart 2" not in told


def test_nothing_is_left_on_the_cluster() -> None:
    import ray
    from ray.util import placement_group_table

    assert run("raise SystemExit(7)", "--workers", "3", "--tee", "none") == 7
    groups: dict[str, dict[str, Any]] = placement_group_table()
    assert {group["state"] for group in groups.values()} <= {"REMOVED"}
    assert ray.cluster_resources()["CPU"] == 6


STAYS = """
import os, signal, subprocess, time
def note(number, frame):
    print("heard", number, flush=True)
    if os.environ["RANK"] == "0": raise SystemExit(0)
signal.signal(signal.SIGTERM, note)
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(f"pid{os.environ['RANK']}", "w").write(f"{os.getpid()} {other.pid}")
while True: time.sleep(0.1)
"""


def pids(count: int) -> list[int]:
    """Of `count` ranks and what they started, once they are up."""
    deadline = time.monotonic() + 60
    found: list[int] = []
    while len(found) < 2 * count and time.monotonic() < deadline:
        found = [int(pid) for file in Path().glob("pid*") for pid in file.read_text().split()]
        time.sleep(0.05)
    return found


def gone(some: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in some) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in some)


def test_a_signal_goes_to_all_who_get_time_and_then_none(capfd: pytest.CaptureFixture[str]) -> None:
    found: list[int] = []

    def interrupt() -> None:
        found.extend(pids(2))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run(STAYS, "--workers", "2", "--tee", "all", "--grace", "1", "--max-restarts", "3") == 128 + signal.SIGTERM
    finally:
        thread.join()
    assert len(found) == 4 and gone(found, 0)
    out, told = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] heard 15", "[1] heard 15"]
    assert "SIGTERM goes to all workers; 1 s are left (once more: none)" in told
    assert told.endswith("raydist: stopped by SIGTERM; no worker runs any more\n")


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["a local cluster", "another cluster"])
@pytest.mark.parametrize(("number", "code"), [("SIGKILL", -9), ("SIGINT", 130)])
def test_the_drivers_end_leaves_nothing(number: str, code: int, where: str) -> None:
    import ray
    from ray.util import placement_group_table

    Path("script.py").write_text(STAYS)
    command = [sys.executable, "-m", "raydist", "run", "--workers", "2", "--grace", "1"]
    if where == "another cluster":
        command += ["--address", ray.get_runtime_context().gcs_address]
    before = set(placement_group_table())
    mark = {**os.environ, "RAYDIST_TEST_MARK": str(Path.cwd())}
    process = subprocess.Popen([*command, "script.py"], stdout=subprocess.DEVNULL, env=mark)
    found = pids(2)
    process.send_signal(getattr(signal, number))
    assert process.wait(60) == code
    assert len(found) == 4 and gone(found)
    assert gone(marked(), 60), "Ray's own processes"
    new = placement_group_table().keys() - before
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 6 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 6
    assert {placement_group_table()[name]["state"] for name in new} <= {"REMOVED"}


def marked() -> list[int]:
    """Processes of the driver that was started with this folder as its mark, and of its cluster."""
    mark = f"RAYDIST_TEST_MARK={Path.cwd()}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("victim", "words"),
    [("guard", "killed by SIGKILL (exit code 137)"), ("actor", "its process ended without a word")],
)
def test_a_killed_worker_is_a_failure_that_can_be_tried_again(
    victim: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
import glob, os, time
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    victim = os.getppid()
    if {victim!r} == "actor":
        pipes = {{os.readlink(f"/proc/self/fd/{{fd}}") for fd in (1, 2)}}
        for fd in glob.glob("/proc/[0-9]*/fd/*"):
            pid = int(fd.split("/")[2])
            try:
                if pid != os.getpid() and os.readlink(fd) in pipes: victim = pid
            except OSError: pass
    os.kill(victim, 9)
    time.sleep(600)
print("well")
"""
    assert run(text, "--workers", "2", "--max-restarts", "1") == 0
    assert words in (told := capfd.readouterr().err) and "restart 1 of 1" in told and "rank 1 on " in told
    assert log(1, attempt=1) == b"well\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], r"absent.py does not exist \(in /"),
        (["/"], r"/ is a folder"),
        (["--workers", "2", "--tee", "2", __file__], r"--tee 2: give all, none, or ranks from 0 to 1"),
        (["--tee", "x", __file__], r"--tee x: give all"),
        (["--gpus-per-worker", "half", __file__], r"--gpus-per-worker half: give auto or a whole number"),
        (["--env", "NO_SUCH", __file__], r"--env NO_SUCH: NO_SUCH is not set here"),
        (["--workers", "7", __file__], r"--workers 7 needs 7 CPU, and the cluster has 6 CPU on 1 node, room for 6"),
        (["--workers", "0", __file__], r"Invalid value for '--workers'"),
    ],
)
def test_a_wrong_command_starts_nothing(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert re.search(words, capfd.readouterr().err)
    assert os.listdir() == []


def test_the_tutorials_script_learns(capfd: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "jobs" / "scripts" / "ddp_tutorial.py"
    assert main(["run", "--workers", "2", str(script), "--epochs", "2"]) == 0
    shown = capfd.readouterr().out
    assert float(shown.rpartition("accuracy ")[2]) > 0.9


@pytest.mark.nightly
def test_accelerates_script_learns(capfd: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "jobs" / "scripts" / "accelerate_digits.py"
    assert main(["run", "--workers", "2", str(script), "--epochs", "2"]) == 0
    shown = capfd.readouterr().out
    assert "2 processes" in shown and float(re.findall(r"accuracy (\S+) of 360", shown)[0]) > 0.9
