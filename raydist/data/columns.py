"""Columns between Arrow, numpy and torch.

numpy is what transforms see: one array a column, first dimension the rows. Numbers keep their type; lists of one length
become further dimensions; strings, bytes and lists of unequal lengths become object arrays.
torch is what the task sees: numbers as tensors of the same type (uint16/32/64 widen to int32/int64/int64, which torch can
compute with), strings as a list of str.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from raydist.errors import DataError

Columns = dict[str, NDArray[Any]]

WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


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
    return {name: _array(table.column(name).combine_chunks(), table.schema.field(name)) for name in table.column_names}


def _array(column: pa.Array, field: pa.Field) -> NDArray[Any]:
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return np.asarray(column.to_numpy_ndarray())
    if isinstance(kind, pa.BaseExtensionType):
        return _array(column.storage, field)
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


def to_torch(columns: Columns) -> dict[str, Any]:
    """Tensors that share memory with the arrays where they can; strings become lists. DataError names a column that cannot."""
    return {name: _tensor(name, array) for name, array in columns.items()}


def _tensor(name: str, array: NDArray[Any]) -> Any:
    if array.dtype == object:
        if all(isinstance(value, str) for value in array):
            return array.tolist()
        raise DataError(f"column {name!r} {_why_not(array)}")
    if array.dtype.kind in "US":
        return array.tolist()
    if array.dtype.kind not in "biufc":
        raise DataError(f"column {name!r} holds {array.dtype} values, {ADVICE}")
    if array.dtype in WIDER:
        array = array.astype(WIDER[array.dtype])
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    return torch.from_numpy(array)


ADVICE = (
    "which have no tensor type: leave the column out with `columns`, convert it to numbers in a transform, "
    "or write it as numbers"
)


def _why_not(array: NDArray[Any]) -> str:
    shapes = sorted({np.shape(value) for value in array if isinstance(value, np.ndarray | list)})
    if len(shapes) > 1:
        return (
            f"has lists of different lengths (of shape {shapes[0]} and {shapes[-1]}): "
            "pad or cut them to one length, in the data or in a transform"
        )
    kinds = sorted({type(value).__name__ for value in array})
    return f"holds {', '.join(kinds)} values, {ADVICE}"


def has_tensor(kind: pa.DataType) -> bool:
    """Whether a column of this type becomes a tensor or a list of strings without a transform."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_tensor(kind.storage_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return has_tensor(kind.value_type) and not _text(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or _text(kind))


def _text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
