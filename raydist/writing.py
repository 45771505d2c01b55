"""Writing a checkpoint's files: hashed while they are written, over the files of a checkpoint that is no longer needed.

A new file's pages are allocated by the kernel as they are written, which costs some eight times the CPU time of writing over
pages that are there (100 MB: 77 ms against 9 ms); so a run that prunes a checkpoint keeps its files for the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save as safetensors_bytes

from raydist.storage import CHUNK

HASH = "xxh3_128"
"""What a manifest has of each file: against damage, not against someone who means harm (who can write a manifest too)."""

_spares: dict[Path, Path] = {}
"""Store -> the folder of a checkpoint that this process took away from it."""


class Hashed:
    """A binary file that hashes what is written to it."""

    def __init__(self, path: Path, spare: Path | None = None) -> None:
        self._file = _open(path, spare)
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """All of `data`. Raises OSError, which `failure` keeps."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            self._hash.update(piece)
            done = 0
            try:
                while done < len(piece):
                    done += self._file.write(piece[done:])
            except OSError as error:
                self.failure = error
                raise
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing to do: it is not buffered."""

    def close(self) -> dict[str, Any]:
        """Make the file durable; returns its entry in the manifest."""
        self._file.truncate(self._size)
        os.fsync(self._file.fileno())
        return {"size": self._size, HASH: self._hash.hexdigest()}

    def __enter__(self) -> Hashed:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file, durably; returns its entry in the manifest."""
    with Hashed(path) as file:
        file.write(data)
        return file.close()


def write_tensors(path: Path, named: Mapping[str, torch.Tensor], spare: Path | None = None) -> dict[str, Any]:
    """Write contiguous CPU tensors as safetensors, durably; returns the file's entry in the manifest.

    The layout is the format's own: the header's length in 8 bytes, the header as JSON, then the tensors, the widest types
    first, so that each is aligned. https://github.com/huggingface/safetensors#format
    """
    order = sorted(named, key=lambda name: (-named[name].element_size(), name))
    header, end = {}, 0
    for name in order:
        start, end = end, end + named[name].nbytes
        header[name] = {"dtype": _code(named[name].dtype), "shape": list(named[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Hashed(path, spare) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            if named[name].numel():
                file.write(_bytes_of(named[name]))
        return file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@lru_cache
def _code(dtype: torch.dtype) -> str:
    """The format's name of a type, as the library writes it. Raises what the library raises for a type it has none for."""
    content = safetensors_bytes({"x": torch.empty(0, dtype=dtype)})
    (length,) = struct.unpack("<Q", content[:8])
    return str(json.loads(content[8 : 8 + length])["x"]["dtype"])


# -- files used again ------------------------------------------------------------------------------------------------------


def keep_spare(store: Path, folder: Path) -> bool:
    """Keep the hidden folder of a checkpoint taken away from `store` for the next one; False when there is one already."""
    if store in _spares:
        return False
    _spares[store] = folder
    return True


@contextmanager
def spare_of(store: Path) -> Iterator[Path | None]:
    """The folder kept for `store`, if any; what was not used of it is gone afterwards."""
    folder = _spares.pop(store, None)
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def drop_spare(store: Path) -> None:
    """Remove the files kept for `store`."""
    with spare_of(store):
        pass


def is_spare(folder: Path) -> bool:
    """Whether this process keeps the folder for its next checkpoint."""
    return folder in _spares.values()


def _open(path: Path, spare: Path | None) -> Any:
    """An unbuffered file to write from its start: the spare one of this name where nobody else can see it, else a new one."""
    if spare is not None and (old := spare / path.name).is_file() and not old.is_symlink():
        file = open(old, "r+b", buffering=0)  # noqa: SIM115
        if _alone(file.fileno()):
            os.rename(old, path)
            return file
        file.close()
    return open(path, "xb", buffering=0)


def _alone(fd: int) -> bool:
    """Whether the file has one name, and no other process has it open or mapped: the kernel grants a write lease only then.

    Where it cannot tell (a network file system), the answer is no.
    """
    if os.fstat(fd).st_nlink != 1:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # should someone open it just now; SIGIO would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
