"""One way to name files: a local path, or a URI that fsspec knows (`s3://bucket/runs`).

Local files get what a file system can promise (atomic replace, fsync); an object store replaces one object at a time, and that
is atomic there. Everything above this module builds on these two facts.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 4 << 20
"""Bytes read or hashed at a time: large, so that the GIL is released for long stretches."""


def is_local(uri: str) -> bool:
    """True for a plain path and for `file://`."""
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> Path:
    """The path of a local URI."""
    return Path(uri.removeprefix("file://"))


def join(uri: str, *names: str) -> str:
    """`uri/name/...`, for paths and URIs alike."""
    return "/".join([uri.rstrip("/") if uri != "/" else "", *names])


def _remote(uri: str) -> tuple[Any, str]:
    """The fsspec file system of `uri` and the path in it. Its listing cache is emptied: other processes write too."""
    import fsspec  # a tenth of a second that local runs need not spend

    fs, path = fsspec.core.url_to_fs(uri)
    fs.invalidate_cache()
    return fs, path


def names(uri: str) -> list[str]:
    """Names directly under a folder, sorted; empty when there is no such folder."""
    if is_local(uri):
        path = local_path(uri)
        return sorted(os.listdir(path)) if path.is_dir() else []
    fs, remote = _remote(uri)
    try:
        found = fs.ls(remote, detail=False)
    except FileNotFoundError:
        return []
    base = remote.strip("/")
    return sorted({p.rstrip("/").rsplit("/", 1)[-1] for p in found if p.strip("/") != base})


def sizes(uri: str) -> dict[str, int]:
    """Every file under a folder, at any depth: relative name -> bytes. Empty when there is no such folder."""
    if is_local(uri):
        root = local_path(uri)
        files = (p for p in root.rglob("*") if not p.is_dir())
        return {p.relative_to(root).as_posix(): p.lstat().st_size for p in files}
    fs, remote = _remote(uri)
    base = remote.strip("/") + "/"
    found = fs.find(remote, detail=True)
    return {p.strip("/").removeprefix(base): int(info["size"]) for p, info in found.items()}


def exists(uri: str) -> bool:
    """Whether there is a file or folder of this name."""
    if is_local(uri):
        return local_path(uri).exists()
    fs, remote = _remote(uri)
    return bool(fs.exists(remote))


def read_bytes(uri: str) -> bytes:
    """The whole file. Raises FileNotFoundError."""
    if is_local(uri):
        return local_path(uri).read_bytes()
    fs, remote = _remote(uri)
    return bytes(fs.cat_file(remote))


def read_chunks(uri: str) -> Iterator[bytes]:
    """The file in pieces of `CHUNK` bytes. Raises FileNotFoundError."""
    if is_local(uri):
        with open(local_path(uri), "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                yield chunk
        return
    fs, remote = _remote(uri)
    with fs.open(remote, "rb", block_size=CHUNK) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def write_bytes(uri: str, data: bytes) -> None:
    """Replace the file as a whole: readers see the old content or the new, also after a crash. Makes missing folders."""
    if not is_local(uri):
        fs, remote = _remote(uri)
        fs.pipe_file(remote, data)
        return
    path = local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names in a local folder durable (renames, new files)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def upload(path: Path, uri: str) -> None:
    """Copy a local file to a remote object."""
    fs, target = _remote(uri)
    fs.put_file(str(path), target)


def download(uri: str, path: Path) -> None:
    """Copy a remote object to a local file."""
    fs, source = _remote(uri)
    fs.get_file(source, str(path))


def remove(uri: str) -> None:
    """Delete a file or a folder with all in it; nothing happens when it is absent."""
    if is_local(uri):
        path = local_path(uri)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return
    fs, remote = _remote(uri)
    try:
        fs.rm(remote, recursive=True)
    except FileNotFoundError:
        return
