"""A measured command: moments and memory from a process that tells them itself, and what goes wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from raydist.benchmark.command import Measured, Stamps, measure
from raydist.benchmark.turns import take_turns
from raydist.errors import RaydistError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_steps_are_those_that_rank_0_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.stamps"
    monkeypatch.setenv("RANK", "1")
    Stamps(str(path))()
    assert not path.exists()
    monkeypatch.setenv("RANK", "0")
    stamp, before = Stamps(str(path)), time.monotonic()
    stamp()
    stamp()
    pid, *moments = path.read_text().splitlines()
    assert pid.startswith("pid ") and before <= float(moments[0]) <= float(moments[1]) <= time.monotonic()


def test_a_command_is_measured_from_its_start_to_its_exit(tmp_path: Path) -> None:
    stamps = tmp_path / "run.stamps"
    code = f"""
import os, time
block = bytearray(80 * 2**20)
block[::4096] = b"x" * len(block[::4096])
now = time.monotonic()
open({str(stamps)!r}, "w").write(f"pid {{os.getpid()}}\\n{{now}}\\n{{now + 1}}\\n{{now + 3}}\\n")
time.sleep(0.8)
"""
    found = measure(python(code), stamps, memory=True)
    assert found.began < found.steps[0] < found.ended and len(found.steps) == 3
    assert found.step_s(0) == pytest.approx(1.5, abs=0.01) and found.mean_step_s(0) == pytest.approx(1.5, abs=0.01)
    assert found.step_s(1) == pytest.approx(2.0, abs=0.01)
    assert 80 < found.worker_mb < 200 and 80 < found.all_mb < 200


def test_what_a_failing_command_said_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RaydistError, match=r"(?s)ended with 3:.*oh no"):
        measure(python("import sys; print('oh no'); sys.exit(3)"), tmp_path / "a.stamps")
    with pytest.raises(RaydistError, match=r"took no step:\nhello"):
        measure(python("print('hello')"), tmp_path / "b.stamps")
    with pytest.raises(RaydistError, match=r"was not done after 0\.2 s"):
        measure(python("import time; time.sleep(60)"), tmp_path / "c.stamps", timeout=0.2)


def test_too_few_steps_are_told() -> None:
    measured = Measured(0.0, [1.0, 2.0, 3.0], 4.0)
    assert (measured.start_s, measured.finish_s, measured.step_s(1)) == (1.0, 1.0, 1.0)
    with pytest.raises(RaydistError, match="3 steps are too few to measure one after a warm-up of 2"):
        measured.step_s(2)


def test_contenders_take_turns() -> None:
    order: list[str] = []
    found = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b", "a", "b", "a", "b"] and found == {"a": [None] * 3, "b": [None] * 3}
