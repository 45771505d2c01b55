"""Numbers about a run: weighted losses, torchmetrics over all ranks, and where the time of a step goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raydist.errors import ConfigError
from raydist.task import to_device
from raydist.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric


def merge_metrics(world: World, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics' values over the rows of all ranks. Every rank must call it; ranks that saw no row are fine.

    States are gathered and reduced by the metric's own functions, as torchmetrics does over processes, so a value comes from
    global totals (RMSE from the global sum of squares), never from a mean of per-rank values. Raises ConfigError for a metric
    that cannot be merged or is no single number.
    """
    if not metrics:
        return {}
    states = world.gather({name: _state(metric) for name, metric in metrics.items()})
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        seen = [state[name] for state in states if any(part["count"] for part in state[name].values())]
        metric.reset()
        if not seen:
            continue
        for path, part in _parts(metric):
            try:
                _fill(part, [state[path] for state in seen if state[path]["count"]])
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"task.metrics.{name}: {type(part).__name__} cannot be merged over workers ({error}); "
                    "choose another metric or one worker"
                ) from error
        values[name] = _number(name, metric.compute())
        metric.reset()
    return values


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """The metric and, for a wrapper or a sum of metrics, those inside it."""
    from torchmetrics import Metric

    return [(path, part) for path, part in metric.named_modules() if isinstance(part, Metric)]


def _state(metric: Metric) -> dict[str, dict[str, Any]]:
    cpu = torch.device("cpu")
    return {
        path: {"count": part._update_count, "values": {key: to_device(getattr(part, key), cpu) for key in part._defaults}}
        for path, part in _parts(metric)
    }


def _fill(metric: Metric, states: list[dict[str, Any]]) -> None:
    """Make `metric` the one that saw the rows of all `states`, in their order."""
    metric.sync_on_compute = metric._to_sync = False  # or compute() would gather again and count each row world_size times
    metric._update_count = sum(state["count"] for state in states)
    for key in metric._defaults if states else ():
        values = [to_device(state["values"][key], metric.device) for state in states]
        setattr(metric, key, values[0] if len(values) == 1 else _reduce(values, metric._reductions[key]))


def _reduce(values: list[Any], function: Any) -> Any:
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    if isinstance(values[0], list):
        rows = [item for value in values for item in value]
        return rows if function in (None, dim_zero_cat) else function(rows)
    if function is dim_zero_cat:
        return torch.cat([value.reshape(-1) if value.dim() == 0 else value for value in values])
    if function is dim_zero_mean and any(not torch.equal(value, values[0]) for value in values):
        raise TypeError("it keeps a mean on each, and the rows behind it are not known")
    stacked = torch.stack(values)
    return stacked if function is None else function(stacked)


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
        return self._reduce(world, world.sum)

    def _reduce(self, world: World, sum_all: Callable[[Sequence[float]], list[float]]) -> float | None:
        total, weight = sum_all([0.0 if self.total is None else float(self.total), self.weight])
        keep = world.is_main
        self.total = torch.tensor(total, dtype=torch.float64) if keep else None
        self.weight = weight if keep else 0.0
        return total / weight if weight else None

    def reduce_with(self, world: World, mine: Sequence[float]) -> tuple[float | None, list[list[float]]]:
        """`reduce`, and every rank's `mine` (equally many numbers) in rank order, in one message. Every rank must call it."""
        width = len(mine)
        places = [0.0] * (world.world_size * width)
        places[world.rank * width : (world.rank + 1) * width] = mine
        everyone: list[float] = []

        def sum_all(values: Sequence[float]) -> list[float]:
            total, weight, *rest = world.sum([*values, *places])
            everyone.extend(rest)
            return [total, weight]

        loss = self._reduce(world, sum_all)
        return loss, [everyone[start : start + width] for start in range(0, len(everyone), width)]

    def reset(self) -> None:
        self.total, self.weight = None, 0.0


_SAMPLE_EVERY_S = 0.05
"""Between two samples of the wait in the gradients' reduction: one costs 0.1 ms."""


class Clock:
    """Where the wall time since the last log line went: waiting for data, waiting for other ranks, and the rest.

    `sync_wait` is what is known of each step; the wait in the gradients' reduction is sampled (`sample`) and its mean added.
    """

    def __init__(self) -> None:
        self.sampled_at = -math.inf
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.steps = 0
        self.rows = 0
        self.data_wait = 0.0
        self.sync_wait = 0.0
        self.paused = 0.0
        self.reduce_wait = 0.0
        self.samples = 0

    def sample(self, reduce_wait: Callable[[], float | None], always: bool = False) -> None:
        """Take a sample of the wait in the reduction, unless the last one is too fresh."""
        now = time.perf_counter()
        if now - self.sampled_at < _SAMPLE_EVERY_S and not always:
            return
        self.sampled_at = now
        if (seconds := reduce_wait()) is not None:
            self.reduce_wait += seconds
            self.samples += 1

    def pause(self, seconds: float) -> None:
        """Seconds of evaluation or checkpointing, which no step pays for."""
        self.paused += seconds

    def read(self) -> dict[str, float]:
        """Per step: seconds, and those waited for data, computed, waited for other ranks; rows a second of the global batch."""
        elapsed = max(1e-9, time.perf_counter() - self.start - self.paused)
        steps = max(1, self.steps)
        step, data = elapsed / steps, self.data_wait / steps
        sync = self.sync_wait / steps + self.reduce_wait / max(1, self.samples)
        return {
            "step_s": step,
            "data_wait_s": data,
            "compute_s": max(0.0, step - data - sync),
            "sync_wait_s": sync,
            "rows_per_s": self.rows / elapsed,
        }


def peak_memory_mb(device: torch.device) -> tuple[float, float]:
    """The most memory this process held so far, in MiB: allocated and reserved on its GPUs, or resident (twice) on the CPU."""
    if device.type == "cuda":
        return sum_pairs(cuda_memory_mb().values())
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = peak / (2**20 if sys.platform == "darwin" else 2**10)
    return resident, resident


def cuda_memory_mb() -> dict[str, tuple[float, float]]:
    """Per GPU that this process used: the most memory allocated and reserved so far, in MiB."""
    found = {}
    for index in range(torch.cuda.device_count()):
        reserved = torch.cuda.max_memory_reserved(index)
        if reserved:
            found[f"cuda:{index}"] = (torch.cuda.max_memory_allocated(index) / 2**20, reserved / 2**20)
    return found


def sum_pairs(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Element-wise sum."""
    first, second = 0.0, 0.0
    for one, other in pairs:
        first, second = first + one, second + other
    return first, second
