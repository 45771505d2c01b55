"""Columns from Arrow to numpy.

numpy is what transforms see: one array a column, first dimension the rows. Numbers keep their type; lists of one length
become further dimensions; strings, bytes and lists of unequal lengths become object arrays.
`tensors` makes what the task sees out of them. This module does not import torch: tasks of Ray Data need none of it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]


def rows_of(columns: Columns) -> int:
    """Rows of a batch of columns."""
    return len(next(iter(columns.values()))) if columns else 0


def take(parts: list[Columns], order: NDArray[np.int64]) -> Columns:
    """Rows `order` of the parts one after the other: always a copy."""
    names = parts[0].keys() if parts else ()
    return {name: join([part[name] for part in parts])[order] for name in names}


def join(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays one after the other. Where item shapes differ the result is an object array, one array a row."""
    if len(arrays) == 1:
        return arrays[0]
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    out = np.empty(sum(len(array) for array in arrays), dtype=object)
    out[:] = [row for array in arrays for row in array]
    return out


def to_numpy(table: pa.Table) -> Columns:
    """Every column of a table without nulls."""
    return {name: _array(_one(table.column(name)), table.schema.field(name)) for name in table.column_names}


def to_arrow(columns: Columns) -> pa.Table:
    """A table that `to_numpy` turns back into these columns; numbers are not copied."""
    return pa.table({name: _arrow(array) for name, array in columns.items()})


def _arrow(array: NDArray[Any]) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _array(column: pa.Array, field: pa.Field) -> NDArray[Any]:
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return np.asarray(column.to_numpy_ndarray())
    if isinstance(kind, pa.BaseExtensionType):
        values = _array(column.storage, field)
        # where ray.data is imported, its tensor columns come as its own type, and the shape with it
        shape = getattr(kind, "shape", None)
        return values.reshape(len(values), *shape) if shape and values.dtype != object else values
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _shaped(_lists(column), field)
    if pa.types.is_decimal(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=object)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(column: pa.Array) -> NDArray[Any]:
    rows = len(column)
    lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False)) if rows else np.zeros(0, dtype=np.int64)
    values = column.flatten()
    inner = _array(values, pa.field("item", values.type))
    if rows and values.null_count == 0 and inner.dtype != object and (lengths == lengths[0]).all():
        return inner.reshape(rows, int(lengths[0]), *inner.shape[1:])
    ends = np.cumsum(lengths)
    out = np.empty(rows, dtype=object)
    for row in range(rows):
        out[row] = inner[ends[row] - lengths[row] : ends[row]]
    return out


def _shaped(array: NDArray[Any], field: pa.Field) -> NDArray[Any]:
    """Give rows the shape that Ray Data writes beside its tensor columns."""
    metadata = field.metadata or {}
    if not metadata.get(b"ARROW:extension:name", b"").startswith(b"ray.data.arrow_tensor") or array.dtype == object:
        return array
    shape = json.loads(metadata[b"ARROW:extension:metadata"])
    return array.reshape(len(array), *shape)


ADVICE = (
    "which have no tensor type: leave the column out with `columns`, convert it to numbers in a transform, "
    "or write it as numbers"
)


def has_tensor(kind: pa.DataType) -> bool:
    """Whether a column of this type becomes a tensor or a list of strings without a transform."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_tensor(kind.storage_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return has_tensor(kind.value_type) and not _text(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or _text(kind))


def _text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
