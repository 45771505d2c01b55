"""One measured command: when it began, when its steps began, when it ended, and how much memory its processes held.

The steps are told by the trained task itself: rank 0 writes `time.monotonic()` into a file at each loss (`Stamps`), so that
every contender is measured at the same place. On Linux that clock is one for all processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raydist.errors import RaydistError


class Stamps:
    """Notes in the file at `path` the process and when each step of rank 0 begins; called in the loss, by every contender."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: int | None = None

    def __call__(self) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        if self.file is None:
            self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(self.file, f"pid {os.getpid()}\n".encode())
        os.write(self.file, f"{time.monotonic()}\n".encode())


@dataclass(frozen=True)
class Measured:
    """Moments in seconds on one clock; memory in MiB, 0 when it was not watched."""

    began: float
    steps: list[float]
    ended: float
    worker_mb: float = 0.0
    all_mb: float = 0.0

    @property
    def start_s(self) -> float:
        """From the command to the first step."""
        return self.steps[0] - self.began

    @property
    def finish_s(self) -> float:
        """From the begin of the last step to the command's exit."""
        return self.ended - self.steps[-1]

    def step_s(self, warm: int) -> float:
        """The median step after the first `warm`."""
        return statistics.median(self._each(warm))

    def mean_step_s(self, warm: int) -> float:
        """The mean step after the first `warm`, pauses for logging included."""
        return statistics.fmean(self._each(warm))

    def _each(self, warm: int) -> list[float]:
        kept = self.steps[warm:]
        if len(kept) < 2:
            raise RaydistError(f"{len(self.steps)} steps are too few to measure one after a warm-up of {warm}")
        return [after - before for before, after in itertools.pairwise(kept)]


def measure(
    command: Sequence[str],
    stamps: Path,
    env: Mapping[str, str] | None = None,
    memory: bool = False,
    timeout: float = 300.0,
) -> Measured:
    """Run `command` to its end. Raises RaydistError with its last words when it fails, takes too long or takes no step."""
    said = stamps.with_suffix(".out")
    with open(said, "wb") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
        watch = _Memory(process.pid, stamps) if memory else None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RaydistError(f"{_words(command)} was not done after {timeout:g} s:\n{_tail(said)}") from error
        finally:
            ended = time.monotonic()
            if watch is not None:
                watch.close()
            if process.poll() is None:
                _end(process)
    if code:
        raise RaydistError(f"{_words(command)} ended with {code}:\n{_tail(said)}")
    moments = [float(line) for line in _lines(stamps) if not line.startswith("pid")]
    if not moments:
        raise RaydistError(f"{_words(command)} took no step:\n{_tail(said)}")
    found = (watch.worker_mb, watch.all_mb) if watch is not None else (0.0, 0.0)
    return Measured(began, moments, ended, *found)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _words(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the command's processes, so that Ray ends its own; then SIGKILL."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


@dataclass
class _Memory:
    """Looks now and then at the resident memory of a process and all below it; for a worker the kernel keeps the peak."""

    root: int
    stamps: Path
    every: float = 0.25
    worker_mb: float = 0.0
    all_mb: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(self.every):
            self.all_mb = max(self.all_mb, self._all())
            self.worker_mb = max(self.worker_mb, self._worker())

    def _all(self) -> float:
        import psutil  # comes with ray

        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.root)
            for process in [family, *family.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total / 2**20

    def _worker(self) -> float:
        first = next(iter(_lines(self.stamps)), "")
        if not first.startswith("pid "):
            return 0.0
        try:
            status = Path(f"/proc/{first.removeprefix('pid ')}/status").read_text()
        except OSError:
            return 0.0
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        return float(peak.split()[1]) / 1024
