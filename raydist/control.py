"""What passes between the loop and whoever runs it: results out, wishes and signs of life in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raydist.faults import Faults
from raydist.heartbeat import Progress

if TYPE_CHECKING:
    from raydist.profiling import Profiler
    from raydist.state import TrainState

Status = Literal["running", "finished", "early_stop", "interrupted"]


@dataclass(frozen=True)
class StepResult:
    """What the loop hands out at a boundary. Boundaries depend on the step number alone (or on a flag all ranks agreed on), so
    every rank gets the same ones.

    `metrics` is the line for metrics.jsonl, the same on every rank but for this rank's own times. With `checkpoint`, the
    caller saves `state()` before it asks for the next result.
    """

    step: int
    metrics: dict[str, Any]
    state: Callable[[], TrainState]
    """Gathers all that a checkpoint holds; every rank must call it, or none."""
    totals: Callable[[], dict[str, Any]]
    """step, applied, skipped, rows_seen, epoch and best of now; nothing is sent."""
    log: bool = False
    evaluated: bool = False
    checkpoint: bool = False
    copy: bool = False
    """`state()` is to be kept in memory (`checkpoint.memory`), where the runner can."""
    status: Status = "running"
    events: bool = False
    """Some rank has events to collect: every rank takes part in gathering them."""


@dataclass
class Control:
    """What the outside asks of a running loop, from any thread. The loop agrees on it with all ranks once a step."""

    stop: str | None = None
    """Why to stop at the next step boundary, with a checkpoint; None to go on."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of this rank that nobody has collected yet."""
    progress: Progress = field(default_factory=Progress)
    """Where the training thread is, for the watchdog."""
    faults: Faults | None = None
    """Faults to inject, in tests."""
    reload: Callable[[], TrainState | None] | None = None
    """Gives the newest good checkpoint, the same on every rank; every rank calls it. For `bad_step: rollback`."""
    closing: Callable[[], dict[str, Any]] | None = None
    """What the model's strategy has to tell at the end (`Passes.closing`); every rank calls it."""
    profiler: Profiler | None = None
    """Records some steps, with `profile:`."""
    copies: bool = False
    """Whether somebody takes copies of the state (`checkpoint.memory`); the same on every rank."""
    failed_at: float | None = None
    """When the failure was noticed that this attempt follows (s since 1970), until the first step is done."""
    micro_size: int | None = None
    """A micro-batch size to start below what the job asks, after an attempt that ran out of memory."""

    def fault(self, where: str, step: int) -> None:
        if self.faults is not None:
            self.faults(where, step)

    def event(self, kind: str, **fields: Any) -> None:
        """Note an event of this rank; rank 0 writes it at the next boundary."""
        self.events.append({"kind": kind, **fields})

    def take(self) -> list[dict[str, Any]]:
        """The events noted so far, once."""
        taken, self.events = self.events, []
        return taken
