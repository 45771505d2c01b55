"""Data sets for tests: row i carries the number i in `id`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from raydist.config import DatasetConfig
from raydist.data.opening import open_train
from raydist.data.source import Position, TrainSource

Batches = list[list[int]]


def numbered(rows: int) -> pa.Table:
    """`id` 0..rows-1, `x` = id / 8 (float32), `v` two floats, `name` a string."""
    ids = np.arange(rows)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2).astype(np.float32)), 2)
    return pa.table({"id": ids, "x": (ids / 8).astype(np.float32), "v": pairs, "name": [f"row {i}" for i in ids]})


def write_parquet(folder: Path, rows: int, files: int = 3, group: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = numbered(rows)
    for number in range(files):
        low, high = rows * number // files, rows * (number + 1) // files
        pq.write_table(table.slice(low, high - low), folder / f"{number}.parquet", row_group_size=group)
    return folder


def write_csv(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pacsv.write_csv(table, path)
    return path


def write_json(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def dataset(path: Path | str, **settings: Any) -> DatasetConfig:
    return DatasetConfig.model_validate({"path": str(path), **settings})


def opened(config: DatasetConfig, size: int, rank: int = 0, world_size: int = 1, **rest: Any) -> TrainSource:
    return open_train(config, global_size=size, seed=rest.pop("seed", 0), rank=rank, world_size=world_size, **rest)


def global_batches(
    config: DatasetConfig, size: int, world_size: int = 1, start: Position | None = None, stop: int = 1, **rest: Any
) -> Batches:
    """`id`s of each global batch: the ranks' shares one after the other."""
    shares = []
    for rank in range(world_size):
        source = opened(config, size, rank, world_size, **rest)
        shares.append([step.batch["id"][: step.rows].tolist() for step in source.steps(start or Position(), stop)])
    assert len({len(share) for share in shares}) == 1, "ranks yield different numbers of steps"
    return [[row for part in parts for row in part] for parts in zip(*shares, strict=True)]
