"""Types of columns over many files: drift that can be reconciled is, the rest is an error that names both files."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from raydist.errors import DataError


def unify(schemas: Sequence[tuple[str, pa.Schema]], columns: list[str] | None) -> pa.Schema:
    """One schema for all files (pairs of where, schema): columns by name, in the first file's order.

    Integers widen, integers and floats become float64, a column that is null in a whole file takes the others' type.
    DataError: a column that one file has and another lacks, or types that do not go together (a number and a string).
    """
    first_where, first = schemas[0]
    names = columns if columns is not None else list(first.names)
    for where, schema in schemas:
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise DataError(
                f"{where} has no column {_quoted(missing)}; it has {_quoted(schema.names)}"
                + (f" (columns are those of {first_where})" if columns is None else "")
                + ". Set `columns` to those that every file has, or mend the file."
            )
        extra = [name for name in schema.names if name not in names] if columns is None else []
        if extra:
            raise DataError(
                f"{where} has a column {_quoted(extra)} that {first_where} lacks. "
                "Set `columns` to those that every file has, or mend the files."
            )
    return pa.schema([_field(name, schemas) for name in names])


def _field(name: str, schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Field:
    where, schema = schemas[0]
    field = _plain(schema.field(name))
    for other_where, other in schemas[1:]:
        found = _plain(other.field(name))
        if found.type == field.type:
            continue
        field = _wider(name, field, where, found, other_where)
        if pa.types.is_null(schema.field(name).type):
            where = other_where
    return field


def _wider(name: str, one: pa.Field, one_where: str, two: pa.Field, two_where: str) -> pa.Field:
    try:
        merged = pa.unify_schemas([pa.schema([one]), pa.schema([two])], promote_options="permissive")
    except pa.ArrowException:
        merged = None
    if merged is not None and _same_kind(one.type, two.type):
        kind = merged.field(0).type
        return pa.field(name, pa.float64() if pa.types.is_floating(kind) and _mixed(one.type, two.type) else kind)
    raise DataError(
        f"column {name!r} is {one.type} in {one_where} and {two.type} in {two_where}: these do not go together. "
        "Write the column with one type, or leave it out with `columns`."
    )


def _plain(field: pa.Field) -> pa.Field:
    """The field with dictionary encoding taken off, nullable."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, metadata=field.metadata)


def _number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _mixed(one: pa.DataType, two: pa.DataType) -> bool:
    return bool(pa.types.is_integer(one)) != bool(pa.types.is_integer(two))


def _same_kind(one: pa.DataType, two: pa.DataType) -> bool:
    if pa.types.is_null(one) or pa.types.is_null(two):
        return True
    if _number(one) or _number(two):
        return _number(one) and _number(two)
    return True


def _quoted(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:12]]
    return ", ".join(shown) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
