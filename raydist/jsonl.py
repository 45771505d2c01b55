"""Append-only files of JSON lines that survive crashes and several writers, and a reader that follows them.

A local line is one `write` to a file opened with O_APPEND, so lines of several processes never mix. An object store cannot
append: there lines are kept in memory and the object is rewritten at most every `flush_every` seconds, and on `flush()`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from raydist import storage
from raydist.environment import hide


def plain(value: Any) -> Any:
    """`value` as strict JSON takes it: floats that are not finite become None, scalars with `.item()` their number.

    Secrets in text are hidden.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return hide(value)
    if hasattr(value, "item") and not isinstance(value, int | float):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def encode(record: Mapping[str, Any]) -> bytes:
    """One line, with its newline. Raises TypeError for a value that JSON has no word for."""
    return json.dumps(plain(record), allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> list[dict[str, Any]]:
    """The records of all complete lines; a line that a crash cut short is left out."""
    records = []
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def read(uri: str) -> bytes:
    """The file's bytes; empty when there is no file yet."""
    try:
        return storage.read_bytes(uri)
    except FileNotFoundError:
        return b""


def _ends_inside_a_line(fd: int) -> bool:
    """Whether the file's last line has no end, and gets none in 20 ms: a file can be seen to grow while a line is written."""
    for _ in range(10):
        end = os.fstat(fd).st_size
        if not end or os.pread(fd, 1, end - 1) == b"\n":
            return False
        time.sleep(0.002)
    return True


class JsonLines:
    """One file of JSON lines, to write; safe to use from several threads and processes.

    In an object store a flush reads the object and writes it back longer, so only two processes that flush in the very same
    moment can lose lines.
    """

    def __init__(self, uri: str, flush_every: float) -> None:
        self.uri = uri
        self._local = storage.is_local(uri)
        self._flush_every = flush_every
        self._lock = threading.Lock()
        self._pending = bytearray()
        """Lines that are not in the object yet (remote only)."""
        self._flushed = -math.inf

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line. Raises OSError when the disk does not take it; a remote line is kept and tried again then."""
        line = encode(record)
        with self._lock:
            if self._local:
                self._append_local(line)
                return
            self._pending += line
            if time.monotonic() - self._flushed >= self._flush_every:
                self._flush()

    def _append_local(self, line: bytes) -> None:
        path = storage.local_path(self.uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if _ends_inside_a_line(fd):
                line = b"\n" + line  # its writer died there: end that line, so that this one stays whole
            if (written := os.write(fd, line)) != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes fit", str(path))
        finally:
            os.close(fd)

    def _flush(self) -> None:
        if self._pending:
            self._flushed = time.monotonic()
            storage.write_bytes(self.uri, read(self.uri) + self._pending)
            self._pending.clear()

    def flush(self) -> None:
        """Write what is only in memory (remote)."""
        with self._lock:
            self._flush()

    def records(self) -> list[dict[str, Any]]:
        """All records so far, those in memory included."""
        with self._lock:
            return decode(read(self.uri) + self._pending)

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace the whole content. Only where this process is the one writer."""
        with self._lock:
            self._pending.clear()
            storage.write_bytes(self.uri, b"".join(encode(record) for record in records))


class Follower:
    """Reads a JSON-lines file as it grows: `new()` gives the records added since the last call.

    With `key`, a record is given only when its `key` is greater than that of every record given before: a file that was cut
    back and written again (a restart) repeats nothing. With `skip_existing`, lines that are there already are not given.
    """

    def __init__(self, uri: str, key: str | None = None, skip_existing: bool = False) -> None:
        self.uri = uri
        self.key = key
        self._skipped = frozenset(read(uri).split(b"\n")) if skip_existing else frozenset()
        self._offset = 0
        self._last_line = b""
        self._seen = -math.inf

    def new(self) -> list[dict[str, Any]]:
        fresh = self._fresh()
        end = fresh.rfind(b"\n") + 1
        if not end:
            return []
        fresh = fresh[:end]
        self._offset += end
        self._last_line = fresh[fresh.rfind(b"\n", 0, end - 1) + 1 :]
        if self._skipped:
            fresh = b"".join(line for line in fresh.splitlines(keepends=True) if line[:-1] not in self._skipped)
        records = decode(fresh)
        if self.key is None:
            return records
        given = []
        for record in records:
            if record.get(self.key, -math.inf) > self._seen:
                self._seen = record[self.key]
                given.append(record)
        return given

    def _fresh(self) -> bytes:
        """Bytes not yet read. The last line read is read again: when it is no longer there, all is new."""
        start = self._offset - len(self._last_line)
        data = self._read_from(start)
        if data.startswith(self._last_line):
            return data[len(self._last_line) :]
        self._offset, self._last_line = 0, b""
        return self._read_from(0)

    def _read_from(self, start: int) -> bytes:
        if not storage.is_local(self.uri):
            return read(self.uri)[start:]
        try:
            with open(storage.local_path(self.uri), "rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""
