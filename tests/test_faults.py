"""Faults happen at the named rank and step, as often as asked over all restarts, and nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import commit
from raydist.errors import CheckpointError
from raydist.faults import Fault, Faults, corrupt_newest, parse, poisoned
from raydist.state import TrainState, pack


def faults(tmp_path: Path, rank: int = 1, **fault: Any) -> Faults:
    found = parse(json.dumps([{"rank": 1, "step": 3, **fault}]), rank, tmp_path / ".faults")
    assert found is not None
    return found


def test_without_faults_there_is_nothing_to_call(tmp_path: Path) -> None:
    assert parse(None, 0, tmp_path) is None and parse("", 0, tmp_path) is None


def test_an_exception_at_its_rank_step_and_place_only(tmp_path: Path) -> None:
    for rank, where, step in [(0, "step", 3), (1, "step", 2), (1, "data", 3), (1, "evaluation", 3)]:
        faults(tmp_path, rank, kind="exception")(where, step)
    with pytest.raises(RuntimeError, match="injected exception on rank 1 at step 3"):
        faults(tmp_path, kind="exception")("step", 3)


@pytest.mark.parametrize("times", [1, 2])
def test_it_happens_so_often_over_all_restarts(tmp_path: Path, times: int) -> None:
    happened = 0
    for _ in range(4):  # a new object each time: a restarted process
        try:
            faults(tmp_path, kind="exception", times=times)("step", 3)
        except RuntimeError:
            happened += 1
    assert happened == times
    assert len(list((tmp_path / ".faults").iterdir())) == times


def test_what_is_no_fault_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kill, stop, .*not 'crash' at 'step'"):
        Fault("crash", 0, 1)
    with pytest.raises(ValueError, match="not 'kill' at 'lunch'"):
        Fault("kill", 0, 1, where="lunch")


@pytest.mark.parametrize(("kind", "code"), [("kill", -9), ("exit", 17)])
@pytest.mark.parametrize("after", [0.0, 0.05])
def test_a_process_ends_at_once_or_a_little_later(tmp_path: Path, kind: str, code: int, after: float) -> None:
    program = (
        "import json, sys, time, pathlib\nfrom raydist.faults import parse\n"
        f"fault = {{'kind': {kind!r}, 'rank': 0, 'step': 1, 'after': {after}}}\n"
        "parse(json.dumps([fault]), 0, pathlib.Path(sys.argv[1]))('step', 1)\n"
        "print('still here', flush=True)\ntime.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("still here" in done.stdout) == (kind == "kill" and after > 0)


def test_slow_takes_its_seconds_and_out_of_memory_is_torchs_own_error(tmp_path: Path) -> None:
    began = time.monotonic()
    faults(tmp_path, kind="slow", seconds=0.05)("step", 3)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(torch.OutOfMemoryError):
        faults(tmp_path / "other", kind="oom")("step", 3)


def test_nan_goes_into_the_data_and_spoils_one_row(tmp_path: Path) -> None:
    found = faults(tmp_path, kind="nan")
    found("step", 3)
    assert not found.poison
    found("data", 3)
    assert found.poison
    batch = {"x": torch.ones(3, 2), "y": torch.arange(3), "both": (torch.ones(3), ["a", "b", "c"])}
    spoiled = poisoned(batch)
    assert torch.isnan(spoiled["x"]).any(1).tolist() == [True, False, False] and not torch.isnan(batch["x"]).any()
    assert torch.equal(spoiled["y"], batch["y"]) and spoiled["both"][1] == ["a", "b", "c"]
    assert torch.isnan(spoiled["both"][0]).tolist() == [True, False, False]


@pytest.fixture
def writes(tmp_path: Path) -> Callable[[], Any]:
    """Commits a small checkpoint."""
    packed = pack(TrainState(model={"w": torch.ones(2)}))
    return lambda: "written" if commit.commit(str(tmp_path / "store"), packed, 1, {})["files"] else None


def test_a_full_disk_meets_the_next_write_only(tmp_path: Path, writes: Callable[[], Any]) -> None:
    faults(tmp_path, kind="disk_full")("step", 3)
    with pytest.raises(CheckpointError, match="No space left on device"):
        writes()
    assert writes() == "written"


def test_slow_storage_meets_the_next_write_only(tmp_path: Path, writes: Callable[[], Any]) -> None:
    faults(tmp_path, kind="slow_storage", seconds=0.2)("step", 3)
    began = time.monotonic()
    assert writes() == "written" and (first := time.monotonic() - began) >= 0.2
    began = time.monotonic()
    assert writes() == "written" and time.monotonic() - began < first


def test_corruption_is_one_bit_of_the_newest_weights(tmp_path: Path) -> None:
    for step in (8, 16):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(range(32)))
    path = corrupt_newest(tmp_path / "checkpoints")
    assert path.parent.name == "step-00000016"
    before, after = bytes(range(32)), path.read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    assert (tmp_path / "checkpoints" / "step-00000008" / "model.safetensors").read_bytes() == before
    faults(tmp_path, kind="corrupt")("step", 3)
    assert path.read_bytes() == before, "the fault flips the same bit again"
