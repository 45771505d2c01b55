"""Columns from numpy to torch: what the task sees.

Numbers become tensors of the same type (uint16/32/64 widen to int32/int64/int64, which torch can compute with), strings a
list of str.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raydist.data.columns import ADVICE, Columns
from raydist.errors import DataError

WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


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


def _why_not(array: NDArray[Any]) -> str:
    shapes = sorted({np.shape(value) for value in array if isinstance(value, np.ndarray | list)})
    if len(shapes) > 1:
        return (
            f"has lists of different lengths (of shape {shapes[0]} and {shapes[-1]}): "
            "pad or cut them to one length, in the data or in a transform"
        )
    kinds = sorted({type(value).__name__ for value in array})
    return f"holds {', '.join(kinds)} values, {ADVICE}"
