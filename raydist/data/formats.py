"""Parquet, CSV and JSON lines: how a file is cut into row groups, counted once, and read one row group at a time.

Parquet states its row groups in its footer. Text files are cut into pieces of about 8 MiB at ends of rows; counting them
parses them once, which also finds the types of the columns in the whole file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.json as pajson
import pyarrow.parquet as pq

from raydist.data.files import DataFile
from raydist.data.schema import unify
from raydist.errors import DataError

TEXT_PIECE = 8 * 2**20
"""Bytes of a piece of a text file, about."""


@dataclass(frozen=True)
class Group:
    """A row group: rows, uncompressed bytes, where it lies (parquet: number, 0; text: bytes from, to), nulls by column.

    `nulls` lists the columns that have any; None: not known until the group is read.
    """

    rows: int
    size: int
    at: tuple[int, int]
    nulls: dict[str, int] | None


@dataclass(frozen=True)
class FileScan:
    """What a file holds: the types of its columns and its row groups."""

    schema: pa.Schema
    groups: tuple[Group, ...]


class Format(Protocol):
    """How files of one format are scanned and read. `columns` None means all of them."""

    def scan(self, fs: pafs.FileSystem, file: DataFile, columns: list[str] | None) -> FileScan: ...

    def read(self, fs: pafs.FileSystem, file: DataFile, group: Group, schema: pa.Schema) -> pa.Table:
        """The group's rows with the columns of `schema` that the file has, in any order, types as the file has them."""
        ...


class Parquet:
    """Row groups as the footer states them. Holds the file it read last open."""

    def __init__(self) -> None:
        self._open: tuple[str, pq.ParquetFile] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_open": None}

    def scan(self, fs: pafs.FileSystem, file: DataFile, columns: list[str] | None) -> FileScan:
        if file.size == 0:
            raise DataError(f"{file.path} is empty (0 bytes), so it is no parquet file: a write that broke off? Remove it.")
        with self._file(fs, file) as opened:
            meta = opened.metadata
            wanted = {
                meta.schema.column(i).path: i
                for i in range(meta.num_columns)
                if columns is None or meta.schema.column(i).path.split(".")[0] in columns
            }
            return FileScan(opened.schema_arrow, tuple(_parquet_group(meta, i, wanted) for i in range(meta.num_row_groups)))

    def read(self, fs: pafs.FileSystem, file: DataFile, group: Group, schema: pa.Schema) -> pa.Table:
        if self._open is None or self._open[0] != file.path:
            if self._open is not None:
                self._open[1].close(force=True)
            self._open = (file.path, self._file(fs, file))
        try:
            return self._open[1].read_row_group(group.at[0], columns=schema.names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path}: row group {group.at[0]} cannot be read: {error}") from error

    @staticmethod
    def _file(fs: pafs.FileSystem, file: DataFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(fs.open_input_file(file.path), pre_buffer=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path} cannot be read as parquet: {error}") from error


def _parquet_group(meta: pq.FileMetaData, number: int, wanted: dict[str, int]) -> Group:
    group = meta.row_group(number)
    nulls: dict[str, int] | None = {}
    size = 0
    for path, index in wanted.items():
        chunk = group.column(index)
        size += chunk.total_uncompressed_size
        if group.num_rows == 0:
            continue
        # the statistics of a nested column count nulls at any depth, so only flat ones say how many rows are null
        known = chunk.is_stats_set and chunk.statistics.has_null_count and "." not in path
        if known and nulls is not None and chunk.statistics.null_count:
            nulls[path] = chunk.statistics.null_count
        elif not known:
            nulls = None
    return Group(group.num_rows, size, (number, 0), nulls)


class Text:
    """What CSV and JSON lines share: pieces that end at ends of rows."""

    quotes = False

    def scan(self, fs: pafs.FileSystem, file: DataFile, columns: list[str] | None) -> FileScan:
        tables: list[tuple[str, pa.Schema]] = []
        found: list[tuple[int, int, tuple[int, int], dict[str, int]]] = []
        first = 0
        for start, data in self._pieces(fs, file):
            table = self._parse(file, data, start, None)
            if table.num_rows:
                nulls = {name: table.column(name).null_count for name in table.column_names}
                found.append((table.num_rows, table.nbytes, (start, start + len(data)), nulls))
            if table.num_rows or not tables:
                tables.append((f"{file.path} rows {first}..{first + max(table.num_rows, 1) - 1}", table.schema))
            first += table.num_rows
        # a key that a piece of JSON lines never has is null in all its rows
        names = list(dict.fromkeys(name for _, schema in tables for name in schema.names))
        full = [(where, _with(schema, names)) for where, schema in tables]
        groups = tuple(
            Group(rows, size, at, {name: n for name in names if (n := nulls.get(name, rows))})
            for rows, size, at, nulls in found
        )
        return FileScan(unify(full, None) if full else pa.schema([]), groups)

    def read(self, fs: pafs.FileSystem, file: DataFile, group: Group, schema: pa.Schema) -> pa.Table:
        start, stop = group.at
        try:
            if _compressed(file):
                with fs.open_input_stream(file.path) as stream:
                    data = stream.read()
            else:
                with fs.open_input_file(file.path) as opened:
                    data = opened.read_at(stop - start, start)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error
        return self._parse(file, data, start, schema)

    def _parse(self, file: DataFile, data: bytes, start: int, schema: pa.Schema | None) -> pa.Table:
        raise NotImplementedError

    def _pieces(self, fs: pafs.FileSystem, file: DataFile) -> Iterator[tuple[int, bytes]]:
        """Pieces of the file with the byte each starts at. A compressed file is one piece."""
        try:
            with fs.open_input_stream(file.path) as stream:
                if _compressed(file):
                    data = stream.read()
                    if data:
                        yield 0, data
                    return
                start, rest = 0, b""
                while block := stream.read(TEXT_PIECE):
                    data = rest + block
                    cut = last_row_end(data, self.quotes)
                    if cut:
                        yield start, data[:cut]
                        start += cut
                    rest = data[cut:]
                if rest:
                    yield start, rest
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error


def _with(schema: pa.Schema, names: list[str]) -> pa.Schema:
    return pa.schema([schema.field(name) if name in schema.names else pa.field(name, pa.null()) for name in names])


def last_row_end(data: bytes, quotes: bool) -> int:
    """The byte after the last newline that ends a row; with `quotes`, newlines inside double quotes do not. 0: none."""
    if not quotes or b'"' not in data:
        return data.rfind(b"\n") + 1
    signs = np.frombuffer(data, dtype=np.uint8)
    outside = np.cumsum(signs == ord('"')) % 2 == 0
    ends = np.flatnonzero((signs == ord("\n")) & outside)
    return int(ends[-1]) + 1 if len(ends) else 0


def _compressed(file: DataFile) -> bool:
    return file.path.lower().endswith((".gz", ".bz2", ".zst"))


class Csv(Text):
    """CSV with a header row. Columns are matched by name; an empty field of a number is null."""

    quotes = True

    def __init__(self) -> None:
        self._header: dict[str, list[str]] = {}

    def _names(self, fs: pafs.FileSystem, file: DataFile) -> list[str]:
        if file.path not in self._header:
            data = next(iter(self._pieces(fs, file)))[1]
            self._parse(file, data, 0, None)
        return self._header[file.path]

    def read(self, fs: pafs.FileSystem, file: DataFile, group: Group, schema: pa.Schema) -> pa.Table:
        if group.at[0]:
            self._names(fs, file)
        return super().read(fs, file, group, schema)

    def _parse(self, file: DataFile, data: bytes, start: int, schema: pa.Schema | None) -> pa.Table:
        names = self._header[file.path] if start else None
        read = pacsv.ReadOptions(use_threads=False, column_names=names, block_size=max(len(data), 1) + 1)
        parse = pacsv.ParseOptions(newlines_in_values=b'"' in data)
        convert = pacsv.ConvertOptions()
        if schema is not None:
            convert = pacsv.ConvertOptions(column_types=schema, include_columns=schema.names)
        try:
            table = pacsv.read_csv(io.BytesIO(data), read_options=read, parse_options=parse, convert_options=convert)
        except pa.ArrowInvalid as error:
            where = f" (rows are counted from byte {start} of the file)" if start else ""
            raise DataError(f"{file.path} cannot be read as CSV: {error}{where}") from error
        if not start and schema is None:
            self._check_header(file, table.column_names)
        return table

    def _check_header(self, file: DataFile, names: list[str]) -> None:
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise DataError(f"{file.path}: the header names {', '.join(double)} more than once; column names must be unique")
        self._header[file.path] = names


class Json(Text):
    """JSON lines: one object a line."""

    def _parse(self, file: DataFile, data: bytes, start: int, schema: pa.Schema | None) -> pa.Table:
        if data.lstrip()[:1] == b"[":
            raise DataError(f"{file.path} holds a JSON array; write JSON lines instead: one object a line, no brackets around")
        parse = pajson.ParseOptions()
        if schema is not None:
            parse = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        read = pajson.ReadOptions(use_threads=False, block_size=max(len(data), 1) + 1)
        if not data.strip():
            return pa.table({})
        try:
            return pajson.read_json(io.BytesIO(data), read_options=read, parse_options=parse)
        except pa.ArrowInvalid as error:
            where = f" (rows are counted from byte {start} of the file)" if start else ""
            raise DataError(f"{file.path} cannot be read as JSON lines: {error}{where}") from error


def count_kept(table: pa.Table) -> pa.Array:
    """A mask of the rows in which no column is null."""
    keep = pa.array(np.ones(table.num_rows, dtype=bool))
    for column in table.columns:
        if column.null_count:
            keep = pc.and_(keep, column.combine_chunks().is_valid())
    return keep
