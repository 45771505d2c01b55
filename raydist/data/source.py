"""What the loop asks of data: for each step, this rank's share of one global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Position:
    """Where the next step reads: global batch `index` (from 0) of epoch `epoch` (from 0)."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class StepData:
    """One rank's share of global batch `index` of epoch `epoch`.

    `batch` holds at least one row: a rank without a share of a small global batch holds row 0 of it, and `rows` is 0.
    Rows beyond `rows` are borrowed and never counted.
    """

    epoch: int
    index: int
    last_in_epoch: bool
    global_rows: int
    rows: int
    batch: Any
    wait_s: float = 0.0
    """Seconds this rank waited for the batch."""


@dataclass(frozen=True)
class EvalData:
    """Rows of an evaluation pass that this rank scores: the first `rows` of `batch`; over all ranks each row comes once."""

    batch: Any
    rows: int


class TrainSource(Protocol):
    """Training data, read from any position on, for one rank. Every rank yields equally many steps."""

    rows_per_epoch: int | None
    """Rows of an epoch that are trained; None when a transform changes their number."""
    steps_per_epoch: int | None

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        """Steps from `start` on, over as many epochs as asked (None: without end)."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a checkpoint: plain JSON; equal for equal data."""
        ...

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        """Words that name rows `[start, stop)` of a global batch, for an error message."""
        ...

    def close(self) -> None: ...


class EvalSource(Protocol):
    """Evaluation data for one rank. Ranks may yield different numbers of batches, and none at all."""

    rows: int | None

    def batches(self) -> Iterator[EvalData]: ...

    def close(self) -> None: ...
