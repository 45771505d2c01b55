"""What each stage did when: the bubble as it was, and a trace of one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import pipelining

from raydist.pipeline.orders import Action, Kind, Span, bubble, orders, simulate

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy

_EVERY_ON_GPU = 20
"""On a GPU an action's time is known only after a synchronisation, which costs overlap: so one pass in so many is timed."""


class StageClock:
    """The actions of this stage's passes. Cheap on the CPU (two clock readings an action)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on = False
        self.spans: list[Span] = []
        """Of the newest pass that was timed, in seconds since 1970."""
        self.totals: dict[tuple[Kind, int], tuple[float, int]] = {}
        self.wall = 0.0
        self.passes = 0
        self._seen = 0
        self._zero = time.time() - time.perf_counter()

    def begin(self) -> float:
        """A pass begins. The first one warms up and does not count."""
        self._seen += 1
        self.on = self._seen > 1 and (self.device.type != "cuda" or self._seen % _EVERY_ON_GPU == 2)
        if self.on:
            self.spans = []
        return self._now()

    def end(self, began: float) -> None:
        """The pass that began then is over."""
        if self.on:
            self.wall += self._now() - began
            self.passes += 1
        self.on = False

    def timed(self, kind: Kind, run: int, micro: int, work: Callable[[], Any]) -> Any:
        """Do `work` and note how long it took."""
        if not self.on:
            return work()
        start = self._now()
        result = work()
        end = self._now()
        self.spans.append(Span(Action(kind, run, micro), start, end))
        seconds, count = self.totals.get((kind, run), (0.0, 0))
        self.totals[kind, run] = seconds + end - start, count + 1
        return result

    def _now(self) -> float:
        if self.on and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._zero + time.perf_counter()


class TimedStage(pipelining.PipelineStage):
    """torch's stage, with a clock around what it computes."""

    clock: StageClock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        work = super().forward_one_chunk
        return self.clock.timed("F", self.stage_index, fwd_chunk_id, lambda: work(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        work = super().backward_one_chunk
        kind: Kind = "B" if kwargs.get("full_backward", True) else "I"
        return self.clock.timed(kind, self.stage_index, bwd_chunk_id, lambda: work(bwd_chunk_id, *args, **kwargs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        work = super().backward_weight_one_chunk
        return self.clock.timed("W", self.stage_index, bwd_chunk_id, lambda: work(bwd_chunk_id, *args, **kwargs))


def account(strategy: PipelineStrategy, clocks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the summary says, from `plain` of each stage of one replica, in order. None when nothing was timed.

    `bubble` is the time in passes that stages did not compute; `limit` the schedule's own with these times of actions and
    nothing spent on sending. `busy_s` and `wait_s` (for other stages, and for what is sent) are per pass and stage.
    """
    if not all(clock["passes"] and clock["totals"] for clock in clocks):
        return None
    seconds = {key: total / count for clock in clocks for key, (total, count) in clock["totals"].items()}
    busy = [sum(total for total, _ in clock["totals"].values()) / clock["passes"] for clock in clocks]
    wall = [clock["wall"] / clock["passes"] for clock in clocks]
    pad = _filled(seconds)
    return {
        "schedule": strategy.schedule,
        "stages": strategy.stages,
        "replicas": strategy.replicas,
        "micro_batches": strategy.micro,
        "bubble": 1.0 - sum(busy) / sum(wall),
        "limit": bubble(simulate(orders(strategy), pad)),
        "busy_s": busy,
        "wait_s": [whole - part for whole, part in zip(wall, busy, strict=True)],
    }


def _filled(seconds: dict[tuple[Kind, int], float]) -> dict[tuple[Kind, int], float]:
    """With a time for kinds that a run did not have: torch splits no backward where nothing needs a gradient of the input."""
    found = dict(seconds)
    for _, run in seconds:
        whole = seconds.get(("B", run), seconds.get(("I", run), 0.0) + seconds.get(("W", run), 0.0))
        found.setdefault(("B", run), whole)
        found.setdefault(("I", run), whole / 2)
        found.setdefault(("W", run), whole / 2)
    return found


def chrome_trace(clocks: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One pass as a Chrome trace (Perfetto, chrome://tracing): a row a stage, microseconds from the first start."""
    spans = [(stage, Span(*span)) for stage, clock in enumerate(clocks) for span in clock["spans"]]
    zero = min((span.start for _, span in spans), default=0.0)
    words = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
    rows = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": at, "args": {"name": name}} for at, name in enumerate(names)]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *rows,
            *(
                {
                    "ph": "X",
                    "name": f"{words[span.action.kind]} {span.action.micro}",
                    "cat": span.action.kind,
                    "pid": 0,
                    "tid": stage,
                    "ts": round(1e6 * (span.start - zero), 1),
                    "dur": round(1e6 * (span.end - span.start), 1),
                    "args": {"run": span.action.run, "micro_batch": span.action.micro},
                }
                for stage, span in spans
            ),
        ],
    }


def plain(clock: StageClock) -> dict[str, Any]:
    """A clock as it travels between ranks."""
    spans = [(span.action, span.start, span.end) for span in clock.spans]
    return {"spans": spans, "totals": clock.totals, "wall": clock.wall, "passes": clock.passes}
