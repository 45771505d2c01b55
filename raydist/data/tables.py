"""A data set as row groups: opened once (footers, or a cached counting pass), then read group by group."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from raydist.data import clean
from raydist.data.columns import ADVICE, Columns, has_tensor, to_numpy
from raydist.data.files import DataFile, FileSet, list_files
from raydist.data.formats import Csv, FileScan, Format, Group, Json, Parquet, count_kept
from raydist.data.images import ImageFiles, classes_of
from raydist.data.plan import Ints, Piece
from raydist.data.schema import unify
from raydist.errors import DataError

if TYPE_CHECKING:
    from raydist.config import DatasetConfig
    from raydist.data.fit import Fitted

SCAN_VERSION = 1


@dataclass
class TableSet:
    """Row groups of all files, and how to read one. Picklable: reads open their files anew.

    schema: the columns that are read, with the types all files are cast to.
    rows: rows of each group that count (with `nulls: drop` those that are kept).
    """

    fs: pafs.FileSystem
    format: str
    files: tuple[DataFile, ...]
    schema: pa.Schema
    reader: Format | ImageFiles
    groups: tuple[Group, ...]
    file_of: Ints
    rows: Ints
    first_row: Ints
    nulls: str = "raise"
    fill_value: float | str | None = None
    fitted: Fitted | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Uncompressed bytes of the columns read, as the files state them."""
        return sum(group.size for group in self.groups)

    def read(self, group: int) -> Columns:
        """All rows of a group that count, as numpy columns."""
        file = self.files[self.file_of[group]]
        if isinstance(self.reader, ImageFiles):
            return self._image(file)
        table = self.reader.read(self.fs, file, self.groups[group], self.schema)
        table = clean.conform(table, self.schema, file.path)
        table = clean.apply_nulls(table, self.nulls, self.fill_value, file.path, int(self.first_row[group]))
        if table.num_rows != self.rows[group]:
            raise DataError(
                f"{file.path} has {table.num_rows} rows where {self.rows[group]} were counted: it has changed meanwhile"
            )
        if self.fitted is None:
            return to_numpy(table)
        return self.fitted.rescale(to_numpy(self.fitted.encode(table, file.path)))

    def _image(self, file: DataFile) -> Columns:
        assert isinstance(self.reader, ImageFiles)
        columns: Columns = {"image": self.reader.decode(self.fs, file)[None]}
        if "label" in self.schema.names:
            columns["label"] = np.array([self.reader.label(file)], dtype=np.int64)
        columns = {name: columns[name] for name in self.schema.names}
        return self.fitted.rescale(columns) if self.fitted is not None else columns

    def name(self, pieces: list[Piece], most: int = 8) -> str:
        """`file rows 3, 7..9, other file row 2`: rows counted from 0 in their file; `most` places are named."""
        by_file: dict[str, list[str]] = {}
        for piece in pieces[:most]:
            path = self.files[self.file_of[piece.group]].path
            start = int(self.first_row[piece.group]) + piece.start
            last = start + piece.rows - 1
            by_file.setdefault(path, []).append(str(start) if start == last else f"{start}..{last}")
        if self.format == "images":
            words = list(by_file)
        else:
            words = [f"{path} row{'s' if len(r) > 1 or '..' in r[0] else ''} {', '.join(r)}" for path, r in by_file.items()]
        return ", ".join(words) + (f" and {len(pieces) - most} more places" if len(pieces) > most else "")

    def fingerprint(self) -> dict[str, Any]:
        """Files by name relative to the data set, their sizes and rows. Not the place or the time: a copy is the same data."""
        per_file = np.bincount(self.file_of, weights=self.rows, minlength=len(self.files)).astype(np.int64)
        lines = [[file.name, file.size, int(rows)] for file, rows in zip(self.files, per_file, strict=True)]
        digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
        shown: dict[str, Any] = {"files": len(lines), "bytes": sum(line[1] for line in lines), "rows": int(self.rows.sum())}
        if len(lines) <= 100:
            shown["list"] = lines
        columns = {name: str(kind) for name, kind in zip(self.schema.names, self.schema.types, strict=True)}
        return {"format": self.format, **shown, "columns": columns, "sha256": digest}


def default_cache() -> Path:
    """Where counting passes are kept: `raydist` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydist"


def open_tables(config: DatasetConfig, columns: list[str] | None = None, cache_dir: Path | str | None = None) -> TableSet:
    """Find the files of a data set and its row groups; read its types and check them.

    columns: what to read when the config does not say (None: everything); those of transforms are the caller's business.
    cache_dir: where counting passes of text files are kept (None: the user's cache folder).
    DataError: files that cannot be read, types that do not go together, nulls that are refused.
    """
    assert config.path is not None
    file_set = list_files(config.path, config.format)
    wanted = list(config.columns) if config.columns is not None else columns
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    reader = _reader(file_set, config)
    scans = _scan_all(file_set, reader, wanted, cache)
    notes = []
    empty = [i for i, scan in enumerate(scans) if not len(scan.schema)]
    if empty:
        notes.append(f"{len(empty)} empty file(s) hold no rows, for instance {file_set.files[empty[0]].path}")
    named = [(file.path, scan.schema) for file, scan in zip(file_set.files, scans, strict=True) if len(scan.schema)]
    if not named:
        raise DataError(f"{config.path}: the {len(scans)} file(s) there hold no rows")
    schema = unify(named, wanted)
    if not config.transforms:
        _check_types(schema, named[0][0])
    flat = [(at, group) for at, scan in enumerate(scans) for group in scan.groups]
    counts = np.array([group.rows for _, group in flat], dtype=np.int64)
    file_of = np.array([at for at, _ in flat], dtype=np.int64)
    tables = TableSet(
        file_set.fs, file_set.format, file_set.files, schema, reader, tuple(group for _, group in flat),
        file_of, counts, _first_rows(file_of, counts), config.nulls, config.fill_value, None, notes,
    )  # fmt: skip
    _null_policy(tables, cache)
    if not tables.rows.sum():
        raise DataError(
            f"{config.path}: " + ("every row has a null, so none is left" if counts.sum() else "the files hold no rows")
        )
    return tables


def _reader(file_set: FileSet, config: DatasetConfig) -> Format | ImageFiles:
    if file_set.format == "images":
        size = config.images.size
        return ImageFiles((size[0], size[1]) if size else None, config.images.mode, classes_of(file_set.files))
    readers: dict[str, type[Parquet] | type[Csv] | type[Json]] = {"parquet": Parquet, "csv": Csv, "json": Json}
    return readers[file_set.format]()


def _scan_all(file_set: FileSet, reader: Format | ImageFiles, wanted: list[str] | None, cache: Path) -> list[FileScan]:
    if file_set.format == "images":
        return [reader.scan(file_set.fs, file, None) for file in file_set.files]
    if file_set.format == "parquet":
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda file: reader.scan(file_set.fs, file, wanted), file_set.files))
    return [_cached_scan(file_set, reader, file, cache) for file in file_set.files]


def _cached_scan(file_set: FileSet, reader: Format | ImageFiles, file: DataFile, cache: Path) -> FileScan:
    path = cache_path(cache, file_set.fs.type_name, file_set.format, file)
    if path is not None and path.is_file():
        return _load_scan(path)
    scan = reader.scan(file_set.fs, file, None)
    if path is not None:
        write_cache(path, {"schema": base64.b64encode(scan.schema.serialize().to_pybytes()).decode(),
                           "groups": [[g.rows, g.size, list(g.at), g.nulls] for g in scan.groups]})  # fmt: skip
    return scan


def _load_scan(path: Path) -> FileScan:
    saved = json.loads(path.read_text())
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["schema"])))
    return FileScan(schema, tuple(Group(rows, size, (at[0], at[1]), nulls) for rows, size, at, nulls in saved["groups"]))


def cache_path(cache: Path, kind: str, what: str, file: DataFile) -> Path | None:
    """Where what was counted in a file is kept; None for a file without a time, which cannot be told from a changed one."""
    if not file.mtime_ns:
        return None
    key = json.dumps([SCAN_VERSION, kind, what, file.path, file.size, file.mtime_ns])
    return cache / f"{what[:20]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def write_cache(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as out:
        json.dump(value, out)
    os.replace(out.name, path)


def _check_types(schema: pa.Schema, where: str) -> None:
    for column in schema:
        if not has_tensor(column.type) and not pa.types.is_null(column.type):
            raise DataError(f"column {column.name!r} of {where} holds {column.type} values, {ADVICE}")


def _first_rows(file_of: Ints, counts: Ints) -> Ints:
    """The row of its file at which each group starts."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])[:-1]
    begins = np.searchsorted(file_of, file_of, side="left")
    return starts - starts[begins] if len(starts) else starts


def _null_policy(tables: TableSet, cache: Path) -> None:
    """Refuse nulls that are known of before anything is read; with `drop`, count the rows that stay."""
    total: dict[str, int] = {}
    for number, group in enumerate(tables.groups):
        for name, nulls in (group.nulls or {}).items():
            if name in tables.schema.names and nulls:
                total[name] = total.get(name, 0) + nulls
                if tables.nulls == "raise":
                    tables.read(number)  # names the row
    if tables.nulls == "fill" and total:
        counts = ", ".join(f"{n} in {name!r}" for name, n in total.items())
        tables.notes.append(f"nulls are filled with {tables.fill_value!r}: {counts}")
    if tables.nulls == "drop":
        _count_kept(tables, cache)


def _count_kept(tables: TableSet, cache: Path) -> None:
    assert not isinstance(tables.reader, ImageFiles) or not any(group.nulls for group in tables.groups)
    kept = tables.rows.copy()
    names = hashlib.sha256(json.dumps(sorted(tables.schema.names)).encode()).hexdigest()[:12]
    for at in np.unique(tables.file_of):
        numbers = [
            int(i)
            for i in np.flatnonzero(tables.file_of == at)
            if tables.groups[i].nulls is None or set(tables.groups[i].nulls or ()) & set(tables.schema.names)
        ]
        if not numbers or isinstance(tables.reader, ImageFiles):
            continue
        file = tables.files[at]
        path = cache_path(cache, tables.fs.type_name, f"kept-{names}", file)
        if path is not None and path.is_file():
            counted = json.loads(path.read_text())
        else:
            counted = [
                int(np.count_nonzero(count_kept(clean.conform(
                    tables.reader.read(tables.fs, file, tables.groups[i], tables.schema), tables.schema, file.path
                )).to_numpy(zero_copy_only=False))) for i in numbers
            ]  # fmt: skip
            if path is not None:
                write_cache(path, counted)
        kept[numbers] = counted
    dropped = int(tables.rows.sum() - kept.sum())
    if dropped:
        tables.notes.append(f"{dropped} of {int(tables.rows.sum())} rows have a null and are dropped")
    tables.rows = kept
