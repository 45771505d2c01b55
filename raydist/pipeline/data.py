"""Data of a pipeline: each replica has its share; the stages between the first and the last read nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raydist.batching import rows_in_step, share
from raydist.data.job import Sources, open_sources
from raydist.data.source import Position, StepData, TrainSource

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.pipeline.grid import Grid


def open_stage(config: JobConfig, grid: Grid, stored: dict[str, Any] | None) -> Sources:
    """The data of this rank's replica; of a stage that sees no data, its steps only. Every rank must call it."""
    sources = open_sources(config, grid.peers, stored)
    strategy: Any = config.strategy
    needs = grid.stage in (0, strategy.rank_of(strategy.runs - 1))
    if not needs and sources.train.rows_per_epoch is not None:
        sources.train = Unread(sources.train, config.batch.global_size, grid.replica, grid.replicas)
    return sources


class Unread:
    """The steps of a source whose rows nobody here needs (a `TrainSource`)."""

    def __init__(self, source: TrainSource, global_size: int, rank: int, world_size: int) -> None:
        self.source, self.global_size, self.rank, self.world_size = source, global_size, rank, world_size
        self.rows_per_epoch, self.steps_per_epoch = source.rows_per_epoch, source.steps_per_epoch

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        """Steps from `start` on, with `batch` None."""
        assert self.rows_per_epoch is not None and self.steps_per_epoch is not None
        epoch, index = start.epoch, start.index
        while stop_epoch is None or epoch < stop_epoch:
            for at in range(index, self.steps_per_epoch):
                rows = rows_in_step(self.rows_per_epoch, self.global_size, at)
                first, last = share(rows, self.rank, self.world_size)
                yield StepData(epoch, at, at + 1 == self.steps_per_epoch, rows, last - first, None)
            epoch, index = epoch + 1, 0

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        return self.source.name_rows(epoch, index, start, stop)

    def close(self) -> None:
        self.source.close()
