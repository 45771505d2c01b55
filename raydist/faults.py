"""Faults on purpose, at a named rank and step, for tests and `make chaos`. Off unless RAYDIST_FAULTS is set.

RAYDIST_FAULTS is a JSON list of `{"kind": …, "rank": r, "step": k, "where": …, "times": n}`. `step` is the step about to be
trained (from 1), or the one just trained where it is `evaluation` or `checkpoint`. Each fires `times` times (1) over all
restarts of a run: a marker file in the run's folder counts, and its time is the time of the fault.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from raydist import commit

KINDS = (
    "kill", "stop", "exit", "exception", "hang", "slow", "collective", "oom", "nan", "disk_full", "slow_storage", "corrupt",
)  # fmt: skip
PLACES = ("step", "data", "evaluation", "checkpoint")
VARIABLE = "RAYDIST_FAULTS"


class Place(Protocol):
    """Something that can be told where training is: `fault(where, step)`."""

    def __call__(self, where: str, step: int) -> None: ...


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, before which step, where, how often.

    `seconds` is for `hang`, `slow` and `slow_storage`. `after` seconds is for `kill` and `stop`: the signal comes that much
    later, wherever training then is. `disk_full` and `slow_storage` meet the next checkpoint that is written.
    """

    kind: str
    rank: int
    step: int
    where: str = "step"
    times: int = 1
    seconds: float = 3600.0
    after: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.where not in PLACES:
            raise ValueError(
                f"a fault has kind {', '.join(KINDS)} and where {', '.join(PLACES)}; not {self.kind!r} at {self.where!r}"
            )


class Faults:
    """The faults of one rank. `marks` is a local folder where each firing leaves a file, so that restarts count on."""

    def __init__(self, faults: list[Fault], rank: int, marks: Path) -> None:
        self.faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank == rank]
        self.marks = marks
        self.poison = False
        """The coming batch is to be made NaN (kind `nan`)."""

    def __call__(self, where: str, step: int) -> None:
        """Let the faults due at this place and step happen."""
        for number, fault in self.faults:
            if fault.where == where and fault.step == step and self._claim(number, fault.times):
                self._happen(fault)

    def _claim(self, number: int, times: int) -> bool:
        self.marks.mkdir(parents=True, exist_ok=True)
        for count in range(times):
            try:
                (self.marks / f"{number}-{count}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def _happen(self, fault: Fault) -> None:
        if fault.kind in ("kill", "stop"):
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            if fault.after:
                _later(fault.after, lambda: os.kill(os.getpid(), number))
            else:
                os.kill(os.getpid(), number)
        elif fault.kind == "exit":
            os._exit(17)
        elif fault.kind == "exception":
            raise RuntimeError(f"injected exception on rank {fault.rank} at step {fault.step}")
        elif fault.kind in ("hang", "slow"):
            time.sleep(fault.seconds)
        elif fault.kind == "collective":
            torch.distributed.barrier()
        elif fault.kind == "oom":
            raise torch.OutOfMemoryError("injected: out of memory")
        elif fault.kind == "nan":
            self.poison = True
        elif fault.kind == "disk_full":
            _before_next_write(_no_space)
        elif fault.kind == "slow_storage":
            _before_next_write(lambda: time.sleep(fault.seconds))
        elif fault.kind == "corrupt":
            corrupt_newest(self.marks.parent / "checkpoints")


def _later(seconds: float, happen: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, happen)
    timer.daemon = True
    timer.start()


def _before_next_write(happen: Callable[[], None]) -> None:
    """Let something happen where the next checkpoint's files are written, in whichever thread does it."""
    module: Any = commit
    write_files = module.write_files

    def once(*arguments: Any) -> Any:
        module.write_files = write_files
        happen()
        return write_files(*arguments)

    module.write_files = once


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def corrupt_newest(checkpoints: Path) -> Path:
    """Flip one bit in the weights of the newest checkpoint, in place; returns the file."""
    path = max(checkpoints.glob("step-*")) / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return path


def poisoned(batch: Any) -> Any:
    """The batch with its first row's floats made NaN."""
    if isinstance(batch, torch.Tensor):
        if not batch.is_floating_point():
            return batch
        batch = batch.clone()
        batch[0] = float("nan")
        return batch
    if isinstance(batch, dict):
        return {key: poisoned(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(poisoned(value) for value in batch)
    return batch


def parse(text: str | None, rank: int, marks: Path) -> Faults | None:
    """This rank's faults, or None when there are none: then nothing is called in the loop."""
    if not text:
        return None
    entries = [{"where": "data", **entry} if entry["kind"] == "nan" else entry for entry in json.loads(text)]
    return Faults([Fault(**entry) for entry in entries], rank, marks)
