"""The guard of a script: signals, exit codes, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.runners import guard


class Guarded:
    """A script under a guard of its own."""

    def __init__(self, folder: Path, text: str, python: str = sys.executable) -> None:
        self.marks = folder
        script = folder / "script.py"
        script.write_text(text)
        control, self.control = os.pipe()
        self.status, status = os.pipe()
        self.out, out = os.pipe()
        inner = (control, status, out, os.dup(out))
        program = [sys.executable, "-I", "-S", guard.__file__, *map(str, inner)]
        subprocess.run(program, pass_fds=inner, check=True, stdin=subprocess.DEVNULL)
        for fd in inner:
            os.close(fd)
        spec = {"argv": [python, str(script)], "env": dict(os.environ), "cwd": str(folder)}
        os.write(self.control, json.dumps(spec).encode() + b"\n")

    def line(self) -> bytes:
        """What the script prints next."""
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(self.out, 1)
        return text

    def end(self) -> tuple[dict[str, Any], bytes]:
        """The guard's word and all output, when both pipes have ended."""
        words = [b"", b""]
        for at, fd in enumerate((self.status, self.out)):
            while data := os.read(fd, 65536):
                words[at] += data
            os.close(fd)
        if self.control >= 0:
            os.close(self.control)
        return json.loads(words[0] or "{}"), words[1]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print('well')", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
        ("import os; os.kill(os.getpid(), 11)", 128 + 11),
        ("def (", 1),
    ],
)
def test_the_exit_code_is_a_shells(tmp_path: Path, text: str, code: int) -> None:
    before = time.time()
    word, _ = Guarded(tmp_path, text).end()
    assert word["code"] == code and before <= word["time"] <= time.time()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    word, output = Guarded(tmp_path, "", python="/no/such/python").end()
    assert word["code"] == 127 and output.startswith(b"/no/such/python cannot be started in ")


FORKS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
others = [subprocess.Popen(["sleep", "600"], start_new_session=True)]
others.append(subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 600; done"]))
print(os.getpid(), *(other.pid for other in others), flush=True)
if sys.stdin.read() == "" and os.path.exists("stay"):
    while True:
        time.sleep(600)
"""


def test_what_a_script_starts_ends_with_it(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, FORKS)
    word, output = guarded.end()  # the pipe ends when the last of them is gone
    assert word["code"] == 0 and all(gone(int(pid)) for pid in output.split()[:3])


def test_the_end_of_the_actor_ends_all(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    guarded = Guarded(tmp_path, FORKS)
    pids = [int(pid) for pid in guarded.line().split()]
    os.write(guarded.control, b"15\n")
    assert guarded.line() == b"not now\n"  # it has the signal, and stays
    os.close(guarded.control)
    guarded.control = -1
    word, _ = guarded.end()
    assert word == {} and all(gone(pid) for pid in pids)


def test_a_signal_ends_a_script_that_does_not_mind(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    assert guarded.line() == b"up\n"
    os.write(guarded.control, b"2\n")
    word, output = guarded.end()
    assert word["code"] == 130 and b"KeyboardInterrupt" in output


def test_the_death_of_the_guard_ends_the_script(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)")
    pid, parent = (int(word) for word in guarded.line().split())
    os.kill(parent, 9)
    assert guarded.end()[0] == {} and gone(pid)
