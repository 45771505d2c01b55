"""Writing a checkpoint so that it appears whole or not at all, and taking one away likewise."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from raydist import storage
from raydist.errors import CheckpointError
from raydist.jsonl import plain
from raydist.manifest import NAME, VERSION, folder_name, render
from raydist.state import Packed, finite
from raydist.writing import Hashed, is_spare, keep_spare, spare_of, write_bytes, write_tensors

STALE_AFTER_S = 24 * 3600.0
"""A temporary folder of another host counts as abandoned when nothing in it changed for this long."""

_writing: set[str] = set()
"""Temporary folders that this process is writing now."""


def commit(store: str, packed: Packed, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Write the checkpoint of `step` and make it visible; one of the same step is replaced. Returns its manifest.

    Raises CheckpointError naming the cause; nothing of the attempt stays behind then, and other checkpoints are untouched.
    """
    uri = storage.join(store, folder_name(step))
    manifest: dict[str, Any] = {
        "version": VERSION,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": plain(metrics),
        "finite": finite(packed, packed.document["buffers"]),
    }
    try:
        if storage.is_local(store):
            _commit_local(storage.local_path(store), packed, manifest, folder_name(step))
        else:
            _commit_remote(uri, packed, manifest)
    except Exception as error:  # any cause (disk, network, a library's own error) means the same: not committed
        raise CheckpointError(f"cannot write checkpoint {uri}: {type(error).__name__}: {error}") from error
    return manifest


def _commit_local(store: Path, packed: Packed, manifest: dict[str, Any], name: str) -> None:
    store.mkdir(parents=True, exist_ok=True)
    folder = store / _temporary(name)
    _writing.add(folder.name)
    try:
        folder.mkdir()
        with spare_of(store) as spare:
            manifest["files"] = write_files(folder, packed, spare)
        write_bytes(folder / NAME, render(manifest))
        storage.sync_folder(folder)
        _appear(folder, store / name)
        storage.sync_folder(store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a failed attempt, or the checkpoint that was replaced
        _writing.discard(folder.name)


def _commit_remote(uri: str, packed: Packed, manifest: dict[str, Any]) -> None:
    """Files, then the manifest. A complete checkpoint of this step stays readable until the new manifest replaces its own."""
    old = storage.sizes(uri)
    inside = f"r{secrets.token_hex(4)}/" if NAME in old else ""
    with tempfile.TemporaryDirectory(prefix="raydist-") as folder:
        files = write_files(Path(folder), packed)
        for name, entry in files.items():
            storage.upload(Path(folder) / name, storage.join(uri, inside + name))
            if inside:
                entry["at"] = inside + name
    manifest["files"] = files
    storage.write_bytes(storage.join(uri, NAME), render(manifest))
    for name in old:
        if name != NAME and name not in {entry.get("at", key) for key, entry in files.items()}:
            storage.remove(storage.join(uri, name))


def write_files(folder: Path, packed: Packed, spare: Path | None = None) -> dict[str, dict[str, Any]]:
    """Write the state's files, durably, over those in `spare` where that can be; returns their manifest entries."""
    files = {}
    for part, named in packed.tensors.items():
        name = f"{part}.safetensors"
        files[name] = write_tensors(folder / name, named, spare)
    with Hashed(folder / "optimizer.pt", spare) as file:
        try:
            with _without_crc32():
                torch.save(packed.other, file)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's zip writer reports its own lost position, not what the disk said
            raise file.failure or error from error
        files["optimizer.pt"] = file.close()
    files["state.json"] = write_bytes(folder / "state.json", json.dumps(packed.document).encode() + b"\n")
    return files


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch's archive without CRC-32 of each record: it takes four fifths of the time, and the manifest has a hash of all."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _appear(folder: Path, target: Path) -> None:
    """Give the finished folder its name; where the name is taken the two trade places in one step."""
    if not target.exists():
        os.rename(folder, target)
        return
    if _exchange(folder, target):
        return
    # This file system cannot exchange: for a moment neither has the name. `dispose_stale` puts the old one back if we die here.
    aside = target.with_name(_temporary(f"replaced-{target.name}"))
    os.rename(target, aside)
    os.rename(folder, target)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically (Linux renameat2); False where that is not supported."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _temporary(name: str) -> str:
    """A hidden name that tells who writes: `.tmp-<name>-<host>-<pid>-<random>`."""
    return f".tmp-{name}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def discard(store: str, uri: str, recycle: bool = False) -> None:
    """Take a checkpoint away: first it stops being one, then its files go, or are kept (hidden) for the next one to be written.

    Who recycles calls `raydist.writing.drop_spare` at the end.
    """
    if not storage.is_local(store):
        storage.remove(storage.join(uri, NAME))
        storage.remove(uri)
        return
    path = storage.local_path(uri)
    aside = path.with_name(_temporary(f"removed-{path.name}"))
    os.rename(path, aside)
    if not (recycle and keep_spare(path.parent, aside)):
        shutil.rmtree(aside)


def dispose_stale(store: str) -> None:
    """Remove temporary folders whose writer is dead (local stores; a remote leftover goes when its step is written again)."""
    if not storage.is_local(store):
        return
    root = storage.local_path(store)
    for name in storage.names(store):
        if not name.startswith(".tmp-") or not _abandoned(root / name):
            continue
        replaced = re.fullmatch(r"\.tmp-replaced-(step-\d+)-.*", name)
        if replaced and not (root / replaced[1]).exists():
            os.rename(root / name, root / replaced[1])
        else:
            storage.remove(storage.join(store, name))


def _abandoned(path: Path) -> bool:
    parts = path.name.rsplit("-", 3)
    if len(parts) == 4 and parts[1] == _host() and parts[2].isdigit():
        pid = int(parts[2])
        if pid == os.getpid():
            return path.name not in _writing and not is_spare(path)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False
    try:
        newest = max(p.lstat().st_mtime for p in [path, *path.rglob("*")])
    except FileNotFoundError:
        return False  # it is being renamed or removed right now
    return time.time() - newest > STALE_AFTER_S
