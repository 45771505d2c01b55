"""What a table holds, column by column: read once, as the data rooms read it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from raydist.config_words import closest
from raydist.data import clean
from raydist.data.files import list_files
from raydist.data.formats import Csv, Format, Json, Parquet
from raydist.data.schema import unify
from raydist.errors import ConfigError, DataError

MOST_BYTES = 2 * 2**30
MOST_CATEGORIES = 1000


@dataclass(frozen=True)
class Column:
    """One column. `use`: number, category, or "" (left out, `why` says why). `width`: numbers in a row of it.

    missing: rows that are null, NaN or infinite. distinct: different values, those aside (0 for lists).
    """

    name: str
    type: str
    use: str
    width: int = 1
    distinct: int = 0
    missing: int = 0
    why: str = ""
    scale: bool = False


def read_table(path: str, key: str = "--data") -> pa.Table:
    """All rows of parquet, CSV or JSON-lines files, as `data.train.path` takes them. ConfigError says what is wrong."""
    try:
        files = list_files(path)
        if files.format == "images":
            raise ConfigError(f"{key}: {path} holds images; that is --kind vision")
        size = sum(file.size for file in files.files)
        if size > MOST_BYTES:
            raise ConfigError(
                f"{key}: {path} is {size / 2**30:.1f} GiB, and init looks at up to {MOST_BYTES / 2**30:.0f} GiB: give it some "
                "of the files, and put all of them into data.train.path of the job file afterwards"
            )
        readers: dict[str, type[Parquet] | type[Csv] | type[Json]] = {"parquet": Parquet, "csv": Csv, "json": Json}
        reader: Format = readers[files.format]()
        scans = [reader.scan(files.fs, file, None) for file in files.files]
        named = [(file.path, scan.schema) for file, scan in zip(files.files, scans, strict=True) if len(scan.schema)]
        if not named:
            raise ConfigError(f"{key}: {path} is empty: no columns, no rows")
        schema = unify(named, None)
        tables = [
            clean.conform(reader.read(files.fs, file, group, schema), schema, file.path)
            for file, scan in zip(files.files, scans, strict=True)
            for group in scan.groups
        ]
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from error
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    if not table.num_rows:
        raise ConfigError(f"{key}: {path} has columns ({', '.join(schema.names)}) and no rows")
    return table.combine_chunks()


def without_nan(table: pa.Table) -> pa.Table:
    """The table with null where a float is NaN or infinite."""
    for at, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            column = table.column(at)
            finite = pc.fill_null(pc.is_finite(column), True)
            if not pc.all(finite).as_py():
                table = table.set_column(at, field, pc.if_else(finite, column, pa.scalar(None, field.type)))
    return table


def look(table: pa.Table, name: str) -> Column:
    """What one column is good for as an input."""
    column, kind, rows = table.column(name), table.schema.field(name).type, table.num_rows
    missing = column.null_count
    words = str(kind)
    if missing == rows:
        return Column(name, words, "", missing=missing, why="no value in any row")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(name, column, kind, missing)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (text or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return Column(name, words, "", missing=missing, why=f"{words}: turn it into numbers to use it")
    distinct = pc.count_distinct(column, mode="only_valid").as_py()
    facts = {"distinct": distinct, "missing": missing}
    if distinct < 2:
        return Column(name, words, "", **facts, why="the same value in every row")
    if text:
        if distinct > MOST_CATEGORIES or (distinct > 20 and distinct > rows / 2):
            return Column(name, words, "", **facts, why=f"{distinct} different texts in {rows} rows: an id, or free text")
        return Column(name, words, "category", **facts)
    if pa.types.is_integer(kind) and rows > 20 and distinct == rows and _counts_rows(column):
        return Column(name, words, "", **facts, why="numbers the rows")
    return Column(name, words, "number", **facts, scale=not pa.types.is_boolean(kind))


def _counts_rows(column: pa.ChunkedArray) -> bool:
    span = pc.min_max(column).as_py()
    return bool(span["max"] - span["min"] == len(column) - 1)


def _list(name: str, column: pa.ChunkedArray, kind: pa.DataType, missing: int) -> Column:
    inner = kind.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        return Column(name, str(kind), "", missing=missing, why=f"lists of {inner}: turn them into numbers to use them")
    lengths = pc.unique(pc.list_value_length(column.drop_null())).to_pylist()
    flat = pc.list_flatten(column)
    if len(lengths) > 1:
        return Column(name, str(kind), "", missing=missing, why=f"lists of {min(lengths)} to {max(lengths)} numbers: pad them")
    if flat.null_count or not pc.all(pc.is_finite(flat.cast(pa.float64()))).as_py():
        return Column(name, str(kind), "", missing=missing, why="nulls or NaN inside its lists")
    return Column(name, str(kind), "number", width=lengths[0], missing=missing, scale=True)


def nearest(name: str, names: list[str]) -> str:
    """` (did you mean 'x'?)` where a name is close."""
    close = closest(name, names)
    return "" if close is None else f" (did you mean {close!r}?)"
