"""What the ranks of `raydist run` print: files per rank as torchrun lays them out, and some of it on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from raydist.runners.rank import ERR, OUT

NAMES = {OUT: "stdout.log", ERR: "stderr.log"}
_TAIL_BYTES = 2**16
_TAIL_LINES = 40


class Output:
    """`<folder>/attempt_0/<rank>/stdout.log` and `stderr.log`, byte for byte. `shown` ranks go to the screen too.

    One shown rank is passed on as it is; with more, each line begins with its rank, and an unfinished line waits for its end.
    """

    def __init__(self, folder: Path, workers: int, shown: Collection[int]) -> None:
        self.folder, self.workers, self.shown = folder, workers, set(shown)
        self._files: dict[tuple[int, int], BinaryIO] = {}
        self._open: dict[tuple[int, int], bytes] = {}
        self._closed: set[int] = set()

    def begin(self, attempt: int) -> None:
        """New files, for this attempt (0, 1, …)."""
        self.end()
        self._attempt = self.folder / f"attempt_{attempt}"
        for rank in range(self.workers):
            folder = self._attempt / str(rank)
            folder.mkdir(parents=True)
            for stream, name in NAMES.items():
                self._files[rank, stream] = (folder / name).open("wb", buffering=0)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """A piece of what a rank printed."""
        self._files[rank, stream].write(data)
        if rank not in self.shown:
            return
        if len(self.shown) == 1:
            self._show(stream, data)
            return
        *lines, self._open[rank, stream] = (self._open.get((rank, stream), b"") + data).split(b"\n")
        self._show(stream, b"".join(b"[%d] %s\n" % (rank, line) for line in lines))

    def record(self, rank: int, error_file: str) -> None:
        """What torch's `@record` wrote."""
        (self._attempt / str(rank) / "error.json").write_text(error_file)

    def end(self) -> None:
        """Show unfinished lines, and close the files."""
        for (rank, stream), line in self._open.items():
            if line:
                self._show(stream, b"[%d] %s\n" % (rank, line))
        self._open = {}
        for file in self._files.values():
            file.close()
        self._files = {}

    def path(self, rank: int, stream: int) -> Path:
        """The newest file of a rank."""
        return self._attempt / str(rank) / NAMES[stream]

    def tail(self, rank: int) -> str:
        """The last lines of a rank's stderr."""
        with self.path(rank, ERR).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:])

    def _show(self, stream: int, data: bytes) -> None:
        if stream in self._closed or not data:
            return
        target = sys.stdout if stream == OUT else sys.stderr
        try:
            target.flush()
            raw = getattr(target, "buffer", None)
            if raw is None:
                target.write(data.decode(errors="replace"))
            else:
                raw.write(data)
            target.flush()
        except BrokenPipeError:  # `raydist run … | head`: the files go on
            self._closed.add(stream)
