"""Files of a data set: paths, globs and folders, local or remote, become a sorted list on one file system."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from raydist.errors import DataError

SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".csv.gz", ".csv.bz2", ".csv.zst"),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz", ".jsonl.bz2", ".jsonl.zst"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
}
"""File name endings of each format, lower case."""


@dataclass(frozen=True)
class DataFile:
    """One file: `path` as its file system names it, `name` relative to the data set, size in bytes, time in ns (0: unknown)."""

    path: str
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FileSet:
    """The files of a data set, sorted by path, and the file system they are on."""

    fs: pafs.FileSystem
    files: tuple[DataFile, ...]
    format: str


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI and the path on it: pyarrow's own where it has one, else fsspec's."""
    if not re.match(r"^[a-zA-Z][a-zA-Z0-9+.-]+://", uri):
        return pafs.LocalFileSystem(), Path(uri).expanduser().absolute().as_posix()
    try:
        fs, path = pafs.FileSystem.from_uri(uri)
        return fs, path
    except pa.ArrowInvalid:
        pass  # a scheme that pyarrow does not know
    except (OSError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{uri} cannot be opened: {error}") from error
    import fsspec

    try:
        found, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise DataError(
            f"{uri} cannot be opened: {error}. Paths may be local, or URIs of pyarrow (s3://, gs://, abfs://, hdfs://) "
            "or of an installed fsspec file system."
        ) from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(found)), path


def list_files(paths: str | list[str], format: str | None = None) -> FileSet:
    """Expand paths, folders and globs. `format` None takes it from the file names, which must then agree.

    Folders are read recursively; names that begin with `.` or `_` are skipped in them. DataError: nothing found, paths on
    different file systems, or formats that disagree.
    """
    wanted = [paths] if isinstance(paths, str) else list(paths)
    fs: pafs.FileSystem | None = None
    found: dict[str, DataFile] = {}
    for uri in wanted:
        one, path = open_filesystem(uri)
        if fs is not None and not fs.equals(one):
            raise DataError(f"{uri} is on another file system than {wanted[0]}: the paths of a data set must be on one")
        fs = fs or one
        matches = _expand(fs, uri, path, SUFFIXES[format] if format else None)
        if not matches:
            kinds = ", ".join(SUFFIXES[format]) if format else ", ".join(e for all_ in SUFFIXES.values() for e in all_[:1])
            raise DataError(f"{uri}: no data files there (looked for {kinds}); give a file, a folder, or a pattern with *")
        found.update((file.path, file) for file in matches)
    assert fs is not None
    files = tuple(found[path] for path in sorted(found))
    return FileSet(fs, files, format or _format_of(files))


def _expand(fs: pafs.FileSystem, uri: str, path: str, suffixes: tuple[str, ...] | None) -> list[DataFile]:
    path = path.rstrip("/") or path
    info = _info(fs, uri, path)
    if info.type == pafs.FileType.NotFound and any(sign in path for sign in "*?["):
        base = path[: re.search(r"[*?\[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        rule = re.compile(_pattern(path))
        infos = [info for info in _walk(fs, base or "/") if rule.match(info.path)]
        return [_file(info, base) for info in infos if _data_file(info.path, base, suffixes)]
    if info.type == pafs.FileType.File:
        return [_file(info, posixpath.dirname(path))]
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"{uri}: no such file or folder")
    return [_file(found, path) for found in _walk(fs, path) if _data_file(found.path, path, suffixes)]


def _info(fs: pafs.FileSystem, uri: str, path: str) -> pafs.FileInfo:
    try:
        return fs.get_file_info(path)
    except OSError as error:
        raise DataError(f"{uri} cannot be read: {error}") from error


def _walk(fs: pafs.FileSystem, base: str) -> list[pafs.FileInfo]:
    try:
        infos = fs.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
    except OSError as error:
        raise DataError(f"{base} cannot be listed: {error}") from error
    return [info for info in infos if info.type == pafs.FileType.File]


def _data_file(path: str, base: str, suffixes: tuple[str, ...] | None) -> bool:
    inner = path[len(base) :].lstrip("/")
    if any(part.startswith((".", "_")) for part in inner.split("/")):
        return False
    endings = suffixes or tuple(ending for all_ in SUFFIXES.values() for ending in all_)
    return inner.lower().endswith(endings)


def _file(info: pafs.FileInfo, base: str) -> DataFile:
    name = info.path[len(base) :].lstrip("/") if base and info.path.startswith(base) else info.path
    return DataFile(info.path, name or info.base_name, int(info.size or 0), int(info.mtime_ns or 0))


def _pattern(glob: str) -> str:
    """A regular expression of a glob in which `*` stays in one folder and `**` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", glob)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    out = (signs.get(part) or (fnmatch.translate(part)[4:-3] if part.startswith("[") else re.escape(part)) for part in parts)
    return "".join(out) + r"\Z"


def _format_of(files: tuple[DataFile, ...]) -> str:
    formats: dict[str, str] = {}
    for file in files:
        for name, endings in SUFFIXES.items():
            if file.path.lower().endswith(endings):
                formats.setdefault(name, file.path)
                break
        else:
            raise DataError(f"{file.path}: the format does not show in the name; set `format` to one of {', '.join(SUFFIXES)}")
    if len(formats) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in formats.items())
        raise DataError(f"the files are of several formats: {examples}; set `format`, or a pattern that picks one kind")
    return next(iter(formats))
