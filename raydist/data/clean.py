"""What happens to nulls and to types that drift between files, one row group at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.data.formats import count_kept
from raydist.errors import DataError


def conform(table: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    """The table's columns by name, in the order and with the types of `schema`; an absent column is null throughout."""
    arrays = []
    for field in schema:
        if field.name not in table.column_names:
            arrays.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise DataError(f"{path}: column {field.name!r} ({column.type}) does not fit {field.type}: {error}") from error
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)


def apply_nulls(table: pa.Table, policy: str, fill_value: float | str | None, path: str, first_row: int) -> pa.Table:
    """Apply `nulls: raise | drop | fill` to the rows of a group that starts at `first_row` of its file.

    A null inside a list counts as a null of its row for `raise`; the other policies refuse it.
    """
    holes = [name for name in table.column_names if table.column(name).null_count]
    inner = [name for name in table.column_names if _inner_nulls(table.column(name))]
    if inner:
        raise DataError(
            f"{path}, rows {first_row}..{first_row + table.num_rows - 1}: column {inner[0]!r} has lists with nulls inside; "
            "`nulls` deals with whole rows only: mend the data, or leave the column out with `columns`"
        )
    if not holes:
        return table
    if policy == "drop":
        return table.filter(count_kept(table))
    if policy == "fill":
        for name in holes:
            table = _fill(table, name, fill_value, path)
        return table
    raise DataError(_null_message(table, holes[0], path, first_row))


def _null_message(table: pa.Table, name: str, path: str, first_row: int) -> str:
    column = table.column(name)
    valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
    row = first_row + int(np.argmin(valid))
    count = column.null_count
    many = f" and {count - 1} more rows" if count > 1 else ""
    if count == table.num_rows:
        many = " and in every other row of this row group; is the whole column null in this file?"
    return (
        f"{path} row {row}: column {name!r} is null there{many}. Set `nulls: drop` to leave such rows out, "
        "`nulls: fill` with a `fill_value`, or leave the column out with `columns`."
    )


def _fill(table: pa.Table, name: str, value: float | str | None, path: str) -> pa.Table:
    column = table.column(name)
    kind = pa.float64() if pa.types.is_null(column.type) and not isinstance(value, str) else column.type
    kind = pa.string() if pa.types.is_null(kind) else kind
    try:
        filler = pa.scalar(value).cast(kind)
        if not isinstance(value, str) and filler.as_py() != value:
            raise pa.ArrowInvalid(f"{value} would become {filler.as_py()}")
    except pa.ArrowException as error:
        raise DataError(f"fill_value {value!r} does not fit column {name!r} ({kind}) of {path}: {error}") from error
    filled = pc.fill_null(column.cast(kind), filler)
    return table.set_column(table.schema.get_field_index(name), pa.field(name, kind), filled)


def _inner_nulls(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    return any(chunk.flatten().null_count > 0 for chunk in column.chunks)
