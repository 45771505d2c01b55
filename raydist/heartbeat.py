"""Each rank says where it is, from a thread of its own, so that a watchdog can tell who is behind.

A beat is one small JSON file a rank (`<run>/.beats/rank-3.json`), replaced once a second or so: step, phase, how long since
anything moved, the training thread's Python stack, and the last collectives that torch's flight recorder saw.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raydist import storage
from raydist.storage import join

FOLDER = ".beats"
_PLACE = struct.Struct("<qq16s")
"""Step, moves and phase, as a rank's place file holds them."""


@dataclass
class Progress:
    """Where the training thread is; written by it, read by the beating thread. `moves` grows whenever it gets on."""

    step: int = 0
    phase: str = "start"
    moves: int = 0
    since: float = field(default_factory=time.monotonic)
    holds: str = ""
    """Words for the part of the model that this rank has, where it has a part: "stage 1 (layers 4 … 7)"."""
    said: Callable[[], None] | None = None
    """Called when `holds` changes."""
    _shared: mmap.mmap | None = None

    def enter(self, phase: str, step: int | None = None) -> None:
        """The training thread is now in `phase` (of `step`)."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.moves += 1
        self.since = time.monotonic()
        if self._shared is not None:
            _PLACE.pack_into(self._shared, 0, self.step, self.moves, phase.encode()[:16])

    def hold(self, words: str) -> None:
        """This rank has a part of the model only."""
        self.holds = words
        if self.said is not None:
            self.said()

    def share(self, path: Path) -> None:
        """Keep the place in a small mapped file too: it stays readable when this process is stopped between two beats."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_PLACE.pack(self.step, self.moves, self.phase.encode()[:16]))
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _PLACE.size)


@dataclass(frozen=True)
class Beat:
    """One rank's account of itself. Times in seconds; `stack` is innermost last, "file:line in function"."""

    rank: int
    step: int
    phase: str
    moves: int
    stuck_s: float
    count: int
    pid: int
    host: str
    stack: list[str] = field(default_factory=list)
    collective: str | None = None
    attempt: str = ""
    holds: str = ""


class Heart(threading.Thread):
    """Writes this rank's beat every `every` seconds, and lets `watch` look at everyone's.

    `watch` is called after each beat; it may end this process, which an exception could not: the training thread may sit in
    native code for ever.
    """

    def __init__(self, root: str, rank: int, progress: Progress, every: float, attempt: str, watch: Callable[[], None]) -> None:
        super().__init__(name="raydist-heart", daemon=True)
        self.folder = join(root, FOLDER)
        self.rank, self.progress, self.every, self.attempt, self.watch = rank, progress, every, attempt, watch
        self.watched = threading.get_ident()
        self._over = threading.Event()
        self._count = 0
        self._writing = threading.Lock()
        progress.said = self.beat
        if storage.is_local(self.folder):
            progress.share(storage.local_path(self.folder) / f"place-{rank}-{attempt}")

    def run(self) -> None:
        """Beat and watch until `stop`."""
        while not self._over.wait(self.every):
            self.beat()
            self.watch()

    def beat(self) -> None:
        """Write one beat now; both this thread and the training thread may call it."""
        with self._writing:
            self._beat()

    def _beat(self) -> None:
        self._count += 1
        stuck = time.monotonic() - self.progress.since
        # the flight recorder's dump imports parts of torch; in the start phase that would race the training thread
        still = stuck > 2 * self.every and self.progress.phase != "start"
        beat = Beat(
            rank=self.rank,
            step=self.progress.step,
            phase=self.progress.phase,
            moves=self.progress.moves,
            stuck_s=stuck,
            count=self._count,
            pid=os.getpid(),
            host=socket.gethostname(),
            stack=stack_of(self.watched) if stuck > 2 * self.every else [],
            collective=last_collective() if still else None,
            attempt=self.attempt,
            holds=self.progress.holds,
        )
        write_beat(self.folder, beat)

    def stop(self) -> None:
        """Write a last beat and end the thread."""
        self._over.set()
        if self.is_alive():
            self.join()
        self.beat()


def write_beat(folder: str, beat: Beat) -> None:
    """Replace a rank's beat; not synced to disk, it is worth nothing after a crash of the machine."""
    text = json.dumps(asdict(beat)).encode()
    name = f"rank-{beat.rank}.json"
    if not storage.is_local(folder):
        storage.write_bytes(join(folder, name), text)
        return
    path = storage.local_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    part = path / f".{name}.{os.getpid()}"
    part.write_bytes(text)
    part.replace(path / name)


def read_beats(root: str) -> dict[int, Beat]:
    """The newest beat of each rank."""
    folder = join(root, FOLDER)
    beats = {}
    for name in storage.names(folder):
        if name.startswith("rank-"):
            found = read_json(join(folder, name))
            if found is not None:
                beats[found["rank"]] = _placed(Beat(**found), folder)
    return beats


def _placed(beat: Beat, folder: str) -> Beat:
    """The beat with the place that the rank's mapped file shows, if that is newer."""
    if not storage.is_local(folder):
        return beat
    path = storage.local_path(folder) / f"place-{beat.rank}-{beat.attempt}"
    if not path.is_file():
        return beat
    step, moves, phase = _PLACE.unpack(path.read_bytes())
    return replace(beat, step=step, moves=moves, phase=phase.rstrip(b"\0").decode()) if moves > beat.moves else beat


def read_json(uri: str) -> dict[str, Any] | None:
    """A small JSON file; None when it is not there, or is being replaced."""
    try:
        return dict(json.loads(storage.read_bytes(uri)))
    except (FileNotFoundError, ValueError):
        return None


def clear(root: str) -> None:
    """Forget the beats of an earlier attempt."""
    storage.remove(join(root, FOLDER))


def end_process(pid: int) -> None:
    """SIGKILL: works on a stopped process too."""
    import signal

    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def stack_of(thread: int, limit: int = 12) -> list[str]:
    """The Python stack of a thread, innermost last: "file:line in function"."""
    frame = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None and len(lines) < 60:
        lines.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[:limit][::-1]


def _short(filename: str) -> str:
    parts = Path(filename).parts
    return "/".join(parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else "/".join(parts[-3:])


def last_collective() -> str | None:
    """The newest collective torch's flight recorder knows of: "gloo:all_reduce #9 of [20]"; None when nothing was recorded.

    The recorder is on when TORCH_FR_BUFFER_SIZE was set before the process group started (raydist's runners do).
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None or int(os.environ.get("TORCH_FR_BUFFER_SIZE") or 0) == 0:
        return None
    entries = pickle.loads(dump()).get("entries") or []  # this process's own memory, not a file
    waiting = [entry for entry in entries if not entry["retired"]] or entries[-1:]
    if not waiting:
        return None
    entry = waiting[0]
    sizes = "x".join(str(size) for size in entry["input_sizes"])
    state = "done" if entry["retired"] else "waiting"
    return f"{entry['profiling_name']} #{entry['collective_seq_id']} of {sizes} ({state})"
