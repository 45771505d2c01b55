"""Open a job's data without Ray: `open_train` and `open_eval` for file data.

    source = open_train(job.data.train, global_size=64, seed=0, rank=0, world_size=1, columns=[...], fitted=None)
    for step in source.steps(Position(epoch=0, index=0), stop_epoch=3): ...
    scores = open_eval(job.data.eval, batch_size=256, rank=0, world_size=1, seed=0, columns=[...], fitted=None)
    for batch in scores.batches(): ...

`columns` are the columns the task needs, or None; they are read when the data set has neither `columns` nor `transforms` of its
own. `fitted` holds categories and normalisation of the training set (`data.fit`). Both raise DataError, and may be called on
every rank alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raydist.data.changing import ChangingSource
from raydist.data.direct import DirectEval, DirectSource
from raydist.data.plan import Plan, auto_window, round_window
from raydist.data.reading import SpanReader
from raydist.data.source import EvalSource, TrainSource
from raydist.data.tables import TableSet, open_tables
from raydist.data.transforms import Transforms
from raydist.errors import DataError

if TYPE_CHECKING:
    from raydist.config import DatasetConfig
    from raydist.data.fit import Fitted


def open_train(
    config: DatasetConfig,
    *,
    global_size: int,
    seed: int,
    rank: int,
    world_size: int,
    columns: list[str] | None = None,
    fitted: Fitted | None = None,
    cache_dir: Path | str | None = None,
) -> TrainSource:
    """This rank's training data, read without Ray."""
    reader = open_reader(config, global_size=global_size, seed=seed, columns=columns, fitted=fitted, cache_dir=cache_dir)
    return direct_source(config, reader, rank, world_size)


def direct_source(config: DatasetConfig, reader: SpanReader, rank: int, world_size: int) -> TrainSource:
    """One rank's source that reads by itself."""
    if config.rows == "changes":
        return ChangingSource(reader, rank, world_size, config.drop_last)
    return DirectSource(reader, rank, world_size)


def open_eval(
    config: DatasetConfig,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    columns: list[str] | None = None,
    fitted: Fitted | None = None,
    cache_dir: Path | str | None = None,
) -> EvalSource:
    """This rank's part of the evaluation data, in batches of `batch_size` rows; over all ranks every row comes once."""
    tables = open_set(config, columns, fitted, cache_dir)
    return DirectEval(tables, Transforms(config.transforms, seed), batch_size, rank, world_size, config.rows == "changes")


def open_reader(
    config: DatasetConfig,
    *,
    global_size: int,
    seed: int,
    columns: list[str] | None = None,
    fitted: Fitted | None = None,
    cache_dir: Path | str | None = None,
) -> SpanReader:
    """The plan of a data set and what reads it; the same on every rank and at every world size."""
    tables = open_set(config, columns, fitted, cache_dir)
    drop_last = config.drop_last and config.rows == "same"
    plan = Plan(tables.rows, global_size, seed, window_of(config, tables, global_size), drop_last)
    if not plan.steps_per_epoch:
        raise DataError(
            f"{config.path} has {plan.rows} rows, fewer than the {global_size} of a global batch, and drop_last leaves them "
            "all out: lower batch.global_size, or set drop_last: false"
        )
    return SpanReader(tables, plan, Transforms(config.transforms, seed))


def open_set(config: DatasetConfig, columns: list[str] | None, fitted: Fitted | None, cache_dir: Path | str | None) -> TableSet:
    """The tables of a data set with what was fitted applied."""
    tables = open_tables(config, None if config.transforms else columns, cache_dir)
    if fitted is not None:
        tables.fitted = fitted.only(tables.schema.names)
    return tables


def window_of(config: DatasetConfig, tables: TableSet, global_size: int) -> int | None:
    """Rows of the shuffle window; None without shuffle."""
    if not config.shuffle:
        return None
    asked = "auto" if config.shuffle is True else config.shuffle.window
    if asked == "auto":
        return auto_window(int(tables.rows.sum()), tables.size, global_size)
    return round_window(int(asked), global_size)
