"""What is learned from the whole training set before training: categories, and mean and standard deviation of columns.

`fit(config.data.train, config.data.fit)` reads the training set once. The result goes into the checkpoint (`to_json`) and into
both data sets, so that evaluation uses the training set's categories and statistics. It applies to the columns as the files
have them, before transforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raydist.data.columns import Columns
from raydist.errors import DataError

if TYPE_CHECKING:
    from raydist.config import DatasetConfig, FitConfig

MOST_CATEGORIES = 1_000_000


@dataclass(frozen=True)
class Scale:
    """Mean and (population) standard deviation: one number, or one for each place of a list, or for each image channel."""

    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class Fitted:
    """Categories in sorted order: a value becomes its number. Columns to scale: `(value - mean) / std`, float32."""

    index: dict[str, list[Any]] = field(default_factory=dict)
    scale: dict[str, Scale] = field(default_factory=dict)

    def only(self, names: list[str]) -> Fitted:
        """The part that concerns these columns."""
        return Fitted(
            {name: values for name, values in self.index.items() if name in names},
            {name: scale for name, scale in self.scale.items() if name in names},
        )

    def encode(self, table: pa.Table, path: str) -> pa.Table:
        """Replace values of indexed columns by their numbers (int64). DataError: a value the training set does not have."""
        for name, values in self.index.items():
            column = table.column(name)
            numbers = pc.index_in(column, value_set=pa.array(values, column.type))
            if numbers.null_count:
                strange = sorted(pc.unique(column.filter(pc.is_null(numbers))).to_pylist(), key=str)
                raise DataError(
                    f"{path}: column {name!r} has values that are not among the {len(values)} categories of the training set: "
                    f"{', '.join(repr(value) for value in strange[:5])}{' …' if len(strange) > 5 else ''}"
                )
            table = table.set_column(table.schema.get_field_index(name), name, numbers.cast(pa.int64()))
        return table

    def rescale(self, columns: Columns) -> Columns:
        """Scale the normalized columns; others as they are."""
        out = dict(columns)
        for name, scale in self.scale.items():
            array = columns[name]
            mean, std = (_spread(np.array(values), array) for values in (scale.mean, scale.std))
            out[name] = ((array - mean) / std).astype(np.float32)
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` reads it back."""
        scale = {name: {"mean": one.mean, "std": one.std} for name, one in self.scale.items()}
        return {"index": self.index, "scale": scale}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Fitted:
        scale = {name: Scale(one["mean"], one["std"]) for name, one in saved["scale"].items()}
        return Fitted(dict(saved["index"]), scale)


def fit(train: DatasetConfig, config: FitConfig, cache_dir: Path | str | None = None) -> Fitted:
    """Read the training set once for its categories and statistics. DataError: a column that is absent or of the wrong kind."""
    from raydist.data.tables import open_tables

    wanted = [*config.index, *config.normalize]
    tables = open_tables(train.model_copy(update={"columns": None, "transforms": []}), wanted, cache_dir)
    values: dict[str, set[Any]] = {name: set() for name in config.index}
    moments: dict[str, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
    for group in range(len(tables.groups)):
        columns = tables.read(group)
        for name in config.index:
            if not _is_category(columns[name]):
                raise DataError(
                    f"data.fit.index: column {name!r} holds {_kind(columns[name])}; categories are strings or integers"
                )
            values[name].update(np.unique(columns[name]).tolist())
            if len(values[name]) > MOST_CATEGORIES:
                raise DataError(
                    f"data.fit.index: column {name!r} has more than {MOST_CATEGORIES} different values: no categories"
                )
        for name in config.normalize:
            if columns[name].dtype.kind not in "iuf":
                raise DataError(f"data.fit.normalize: column {name!r} holds {_kind(columns[name])}; only numbers can be scaled")
            if len(columns[name]):
                moments[name] = _add(moments.get(name), columns[name])
    scale = {name: _scale(name, *moments[name]) for name in config.normalize}
    return Fitted({name: sorted(found) for name, found in values.items()}, scale)


def _is_category(array: NDArray[Any]) -> bool:
    return array.ndim == 1 and (array.dtype.kind in "iubU" or all(isinstance(value, str) for value in array))


def _kind(array: NDArray[Any]) -> str:
    if array.ndim > 1 or (array.dtype == object and len(array) and isinstance(array[0], np.ndarray)):
        return "lists"
    return "values that are no plain numbers" if array.dtype == object else f"{array.dtype} values"


def _per_row(array: NDArray[Any]) -> NDArray[np.float64]:
    """Values by place, shape (n, places): images by channel, lists by place, numbers as one place."""
    if array.ndim == 4:
        return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1]).astype(np.float64)
    return array.reshape(len(array), -1).astype(np.float64)


def _spread(values: NDArray[np.float64], array: NDArray[Any]) -> NDArray[np.float64]:
    """`values` in a shape that broadcasts against rows of `array`."""
    if array.ndim == 4:
        return values[:, None, None]
    return values.reshape(array.shape[1:]) if array.ndim > 1 else values.reshape(())


def _add(
    so_far: tuple[int, NDArray[np.float64], NDArray[np.float64]] | None, array: NDArray[Any]
) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Count, mean and sum of squared deviations with these rows added (Chan, Golub & LeVeque 1979, pairwise update)."""
    values = _per_row(array)
    count, mean = len(values), values.mean(axis=0)
    squares = ((values - mean) ** 2).sum(axis=0)
    if so_far is None:
        return count, mean, squares
    before, old_mean, old_squares = so_far
    total, delta = before + count, mean - old_mean
    return total, old_mean + delta * count / total, old_squares + squares + delta**2 * before * count / total


def _scale(name: str, count: int, mean: NDArray[np.float64], squares: NDArray[np.float64]) -> Scale:
    std = np.sqrt(squares / count)
    if not (np.isfinite(mean).all() and np.isfinite(std).all()):
        raise DataError(f"data.fit.normalize: column {name!r} has NaN or infinite values, so no mean; mend the data")
    return Scale(mean.tolist(), np.where(std > 0, std, 1.0).tolist())
