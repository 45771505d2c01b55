"""Transforms that tests name in a data set's `transforms`."""

from __future__ import annotations

import os
import uuid
from typing import Any

import numpy as np

from raydist.errors import DataError

Columns = dict[str, Any]


def add(batch: Columns, column: str, amount: float) -> Columns:
    return {**batch, column: (batch[column] + amount).astype(batch[column].dtype)}


def jitter(batch: Columns, rng: np.random.Generator) -> Columns:
    return {**batch, "noise": rng.random(len(batch["id"]), dtype=np.float32)}


class Scale:
    """Built once in a process; counts how often it was."""

    built = 0

    def __init__(self, factor: float) -> None:
        type(self).built += 1
        self.factor = factor

    def __call__(self, batch: Columns) -> Columns:
        return {**batch, "x": batch["x"] * self.factor}


def keep_even(batch: Columns) -> Columns:
    keep = batch["id"] % 2 == 0
    return {name: values[keep] for name, values in batch.items()}


def twice(batch: Columns) -> Columns:
    return {name: np.repeat(values, 2, axis=0) for name, values in batch.items()}


def nothing_left(batch: Columns) -> Columns:
    return {name: values[:0] for name, values in batch.items()}


def refuse_row(batch: Columns, row: int) -> Columns:
    if row in batch["id"]:
        raise DataError(f"row {row} is refused")
    return batch


def log_call(batch: Columns, folder: str, width: int) -> Columns:
    with open(os.path.join(folder, uuid.uuid4().hex), "w"):
        pass
    return {"id": batch["id"], "wide": np.zeros((len(batch["id"]), width), dtype=np.uint8)}


def no_dict(batch: Columns) -> Any:
    return list(batch)


def ragged(batch: Columns) -> Columns:
    return {**batch, "short": np.zeros(1)}


def as_lists(batch: Columns) -> Columns:
    return {"id": batch["id"].tolist(), "name": [f"<{name}>" for name in batch["name"]]}
