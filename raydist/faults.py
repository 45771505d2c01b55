"""Faults on purpose, at a named rank and step, for tests and `make chaos`. Off unless RAYDIST_FAULTS is set.

RAYDIST_FAULTS is a JSON list of `{"kind": …, "rank": r, "step": k, "where": …, "times": n}`. `step` is the step about to be
trained (from 1). Each fires `times` times (1) over all restarts of a run: a marker file in the run's folder counts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

KINDS = ("kill", "stop", "exit", "exception", "hang", "slow", "collective", "oom", "nan")
PLACES = ("step", "data", "evaluation", "checkpoint")
VARIABLE = "RAYDIST_FAULTS"


class Place(Protocol):
    """Something that can be told where training is: `fault(where, step)`."""

    def __call__(self, where: str, step: int) -> None: ...


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, before which step, where, how often. `seconds` is for `hang` and `slow`."""

    kind: str
    rank: int
    step: int
    where: str = "step"
    times: int = 1
    seconds: float = 3600.0

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
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
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
