"""Numbers about a run: weighted losses, torchmetrics over all ranks, and where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from raydist.errors import ConfigError
from raydist.task import to_device
from raydist.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric


def merge_metrics(world: World, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics' values over the rows of all ranks. Every rank must call it; ranks that saw no row are fine.

    States are gathered and merged by torchmetrics' own reductions, so a value comes from global totals (RMSE from the global sum
    of squares), never from a mean of per-rank values. Raises ConfigError for a metric that cannot be merged or is no single number.
    """
    if not metrics:
        return {}
    states = world.gather({name: _state(metric) for name, metric in metrics.items()})
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        seen = [state[name] for state in states if state[name]["_update_count"]]
        metric.reset()
        if not seen:
            continue
        _fill(metric, seen[0])
        for state in seen[1:]:
            other = metric.clone()
            other.reset()
            _fill(other, state)
            try:
                _merge(metric, other)
            except RuntimeError as error:
                raise ConfigError(
                    f"task.metrics.{name}: {type(metric).__name__} cannot be merged over workers ({error}); choose another metric or one worker"
                ) from error
        values[name] = _number(name, metric.compute())
        metric.reset()
    return values


def _state(metric: Metric) -> dict[str, Any]:
    state = {key: to_device(getattr(metric, key), torch.device("cpu")) for key in metric._defaults}
    return {**state, "_update_count": metric._update_count}


def _fill(metric: Metric, state: dict[str, Any]) -> None:
    for key, value in state.items():
        setattr(metric, key, to_device(value, metric.device) if key != "_update_count" else value)


def _merge(metric: Metric, other: Metric) -> None:
    """Add the rows of `other` to `metric`; its rows were seen later."""
    count = metric._update_count + other._update_count
    if metric.full_state_update or metric.full_state_update is None or metric.dist_sync_on_step:
        raise RuntimeError("its update needs the whole state")
    metric._update_count, other._update_count = count, metric._update_count
    other.merge_state(metric)  # merge_state puts the incoming rows first
    for key in metric._defaults:
        setattr(metric, key, getattr(other, key))


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    what = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise ConfigError(
        f"task.metrics.{name}: gives {what}, not one number; choose an average (for torchmetrics: average='macro')"
    )


class LossMeter:
    """The weighted mean loss since the last log line, over all ranks: `sum w_i loss_i / sum w_i`."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.weight = 0.0

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """`loss` is a mean over rows that weigh `weight` together. Stays on the device: no synchronisation."""
        if weight == 0:
            return
        part = loss.detach().to(torch.float64) * weight if loss.device.type != "mps" else loss.detach() * weight
        self.total = part if self.total is None else self.total + part
        self.weight += weight

    def drop(self, total: torch.Tensor | None, weight: float) -> None:
        """Go back to an earlier `(total, weight)`: a skipped step does not count."""
        self.total, self.weight = total, weight

    def reduce(self, world: World) -> float | None:
        """The mean over all ranks, kept on rank 0 so that a later call goes on from it. Every rank must call it."""
        total = 0.0 if self.total is None else float(self.total)
        total, weight = world.sum([total, self.weight])
        keep = world.is_main
        self.total = torch.tensor(total, dtype=torch.float64) if keep else None
        self.weight = weight if keep else 0.0
        return total / weight if weight else None

    def reset(self) -> None:
        self.total, self.weight = None, 0.0


class Clock:
    """Where the wall time since the last log line went: waiting for data, waiting for other ranks, and the rest."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.steps = 0
        self.rows = 0
        self.data_wait = 0.0
        self.sync_wait = 0.0
        self.paused = 0.0

    def pause(self, seconds: float) -> None:
        """Seconds of evaluation or checkpointing, which no step pays for."""
        self.paused += seconds

    def read(self) -> dict[str, float]:
        """Per step: seconds, and seconds waited for data and for other ranks; rows a second of the global batch."""
        elapsed = max(1e-9, time.perf_counter() - self.start - self.paused)
        steps = max(1, self.steps)
        return {
            "step_s": elapsed / steps,
            "data_wait_s": self.data_wait / steps,
            "sync_wait_s": self.sync_wait / steps,
            "rows_per_s": self.rows / elapsed,
        }


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process held so far, in MiB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
