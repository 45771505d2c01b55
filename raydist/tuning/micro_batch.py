"""Micro-batch sizes tried one after the other, each twice the last, until one does not fit."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from raydist.batching import padded_share
from raydist.control import Control
from raydist.errors import ConfigError, DataError, TrainError
from raydist.metrics import peak_memory_mb
from raydist.tuning.trial import results, rows_of, short_job
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig

_WARM_UP = 3
"""Steps of a size that are not timed."""
_ENOUGH_S = 5.0
"""A size is timed no longer than this, once it has two timed steps."""
_SLOW_S = 30.0
"""A step that takes longer ends the search: nobody waits for its double."""
_NEAR = 0.95
"""A smaller size with this share of the best throughput is as fast, and leaves memory."""


@dataclass(frozen=True)
class Size:
    """A micro-batch size and whether it fitted; median seconds of a step without the wait for data, rows a second, peak MiB."""

    rows: int
    fits: bool
    step_s: float | None = None
    rows_per_s: float | None = None
    memory_mb: float | None = None


@dataclass
class Sizes:
    """All sizes tried, why there are no larger ones, the largest that fits, the fastest, and the one for the job.

    `share` is the most rows that a worker gets of one global batch: a larger micro-batch never comes up in this job.
    """

    share: int
    tried: list[Size] = field(default_factory=list)
    ended: str = ""

    @property
    def largest(self) -> int:
        return max(size.rows for size in self.tried if size.fits)

    @property
    def fastest(self) -> int:
        return _fastest([size for size in self.tried if size.fits])

    @property
    def suggested(self) -> int:
        """The fastest of those that come up in this job."""
        return _fastest([size for size in self.tried if size.fits and size.rows <= self.share])


def _fastest(sizes: list[Size]) -> int:
    best = max(size.rows_per_s or 0.0 for size in sizes)
    return min(size.rows for size in sizes if (size.rows_per_s or 0.0) >= _NEAR * best)


def try_sizes(
    config: JobConfig, world: World, steps: int = 20, largest: int | None = None, memory_mb: float | None = None
) -> Sizes:
    """Train a few steps at each size: 1, 2, 4, … and the worker's share. Forward, backward and optimizer of one worker.

    Ends at the first size that runs out of memory, at `largest` rows, at the rows of the training set, where the next size
    would need more than `memory_mb` (without it, on the CPU: what is free; a GPU says itself when it is full), or where a step
    takes 30 s. Raises ConfigError for what cannot be tried, TrainError when one row does not fit.
    """
    _check(config, world, steps, largest)
    rows = rows_of(short_job(config, steps, {"batch": {"global_size": 1, "micro_size": 1}}), world)
    if rows == 0:
        raise DataError(f"data.train: no rows at all in {config.data.train.path or config.data.train.target}")
    if memory_mb is None and world.device.type == "cpu":
        memory_mb = peak_memory_mb(world.device)[0] + 0.9 * _free_mb()
    found = Sizes(padded_share(config.batch.global_size, config.workers[1]))
    size = 1
    while not found.ended:
        tried = _try(config, world, size, steps)
        found.tried.append(tried)
        size = found.share if size < found.share < 1 << size.bit_length() else 1 << size.bit_length()
        found.ended = _end(tried) or _limit(found, size, rows, largest, memory_mb)
    if not any(tried.fits for tried in found.tried):
        raise TrainError(f"not one micro-batch size fits: {found.ended}; use a smaller model, precision: bf16, or more memory")
    return found


def _check(config: JobConfig, world: World, steps: int, largest: int | None) -> None:
    if config.strategy.name == "pipeline":
        raise ConfigError(
            "strategy: tune batch times one worker with the whole model, and a pipeline's micro-batches pass through several; "
            "compare runs with batch.micro_size=… (`raydist sweep`)"
        )
    if config.strategy.name == "fsdp":
        raise ConfigError(
            "strategy: tune batch times one worker, and one worker of fsdp holds the whole model; `raydist plan` works out its "
            "memory, and `raydist sweep` compares runs with batch.micro_size=…"
        )
    if world.world_size > 1:
        raise ConfigError("tune batch times one worker: start it without torchrun")
    if steps < _WARM_UP + 2:
        raise ConfigError(f"--steps {steps} are too few: the first {_WARM_UP} are not timed, so at least {_WARM_UP + 2}")
    if largest is not None and largest < 1:
        raise ConfigError(f"--max {largest} is no size: at least 1 row")


def _end(tried: Size) -> str:
    """Why nothing larger is tried after this; empty when there may be."""
    if not tried.fits:
        return f"{tried.rows} rows did not fit"
    slow = tried.step_s is not None and tried.step_s > _SLOW_S
    return f"a step of {tried.rows} rows took {tried.step_s:.0f} s" if slow else ""


def _limit(found: Sizes, size: int, rows: int | None, largest: int | None, memory_mb: float | None) -> str:
    """Why `size` is not tried; empty when it is."""
    if largest is not None and size > largest:
        return f"--max is {largest} rows"
    if rows is not None and size > rows:
        return f"the training set has {rows} rows"
    if memory_mb is not None:
        last = found.tried[-1]
        before = found.tried[-2] if len(found.tried) > 1 else last
        slope = ((last.memory_mb or 0.0) - (before.memory_mb or 0.0)) / max(1, last.rows - before.rows)
        wanted = (last.memory_mb or 0.0) + slope * (size - last.rows)
        if wanted > memory_mb:
            return f"{size} rows would need about {wanted:,.0f} MiB, and {memory_mb:,.0f} MiB are allowed"
    return ""


def _try(config: JobConfig, world: World, size: int, steps: int) -> Size:
    """A fresh model, trained with one micro-batch of `size` rows a step."""
    batch = {"global_size": size, "micro_size": size}
    job = short_job(config, steps, {"batch": batch, "data": {"train": _full_batches(config)}})
    times: list[float] = []
    memory, began = 0.0, time.monotonic()
    _forget(world)
    running = results(job, world, Control())
    try:
        for result in running:
            memory = float(result.metrics["memory_mb"])
            times.append(result.metrics["step_s"] - result.metrics["data_wait_s"])
            if len(times) >= _WARM_UP + 2 and time.monotonic() - began > _ENOUGH_S:
                break
            if times[-1] > _SLOW_S:
                break
    except (RuntimeError, TrainError) as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):  # the CPU's allocator
            raise
        return Size(size, False)
    finally:
        running.close()
        _forget(world)
    step = max(1e-9, statistics.median(times[_WARM_UP:] or times))
    return Size(size, True, step, size / step, memory)


def _full_batches(config: JobConfig) -> dict[str, object]:
    from raydist.config import to_plain

    return {**to_plain(config.data.train), "drop_last": True}


def _forget(world: World) -> None:
    """Free what the last size held, and count the peak anew where that can be done."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _free_mb() -> float:
    import psutil  # comes with ray

    return float(psutil.virtual_memory().available) / 2**20
