"""Who is behind, when nothing moves: beats of all ranks in, one sentence with a name out.

Ranks that wait in a collective are not the cause; the cause is the rank that is somewhere else. Four kinds are told apart: a
process that is stopped, a rank that waits for data, a rank that is stuck in Python, and a rank in a collective of its own.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raydist import storage
from raydist.heartbeat import FOLDER, Beat, end_process, read_beats, read_json
from raydist.storage import join

EXIT_CODE = 70
"""Of a process that the watchdog ended."""

SLOW_PHASES = {"start": 10.0, "checkpoint": 10.0, "first step": 5.0}
"""Phases that may take this many times longer: starting, compiling, and writing to slow storage are no hangs."""


_STOPPED_S = 5.0
"""A process that is plainly stopped (SIGSTOP) while nothing moves is named after so long, whatever the timeout."""


@dataclass(frozen=True)
class Verdict:
    """The rank that is behind and the sentence that says so."""

    rank: int
    words: str
    beat: Beat


class Watchdog:
    """Looks at the beats of one attempt; `look()` gives a verdict once nothing has moved for `timeout` seconds.

    All times are of this process's clock: a beat counts as new when its number differs from the last one seen.
    """

    def __init__(self, root: str, world_size: int, timeout: float, attempt: str) -> None:
        self.root, self.world_size, self.timeout, self.attempt = root, world_size, timeout, attempt
        self._moved: dict[int, tuple[int, float]] = {}
        self._beaten: dict[int, tuple[int, float]] = {}

    def look(self, now: float | None = None) -> Verdict | None:
        """The verdict, or None while something moves (or not all ranks have started)."""
        now = time.monotonic() if now is None else now
        beats = {rank: beat for rank, beat in read_beats(self.root).items() if beat.attempt == self.attempt}
        for rank, beat in beats.items():
            if self._moved.get(rank, (-1, 0.0))[0] != beat.moves:
                self._moved[rank] = (beat.moves, now)
            if self._beaten.get(rank, (-1, 0.0))[0] != beat.count:
                self._beaten[rank] = (beat.count, now)
        if len(beats) < self.world_size:
            return None
        still = min(now - moved for _, moved in self._moved.values())
        if still >= min(self.timeout, _STOPPED_S):
            mute = {rank: now - at for rank, (_, at) in self._beaten.items() if now - at > min(self.timeout, _STOPPED_S) / 2}
            stopped = {rank: since for rank, since in mute.items() if _state(beats[rank]) == "T"}
            if stopped:
                return judge(list(beats.values()), stopped)
        silent = {rank: now - at for rank, (_, at) in self._beaten.items() if now - at > self.timeout / 2}
        patience = 1.0 if silent else max(SLOW_PHASES.get(beat.phase, 1.0) for beat in beats.values())
        if still < self.timeout * patience:
            return None
        return judge(list(beats.values()), silent)

    def order(self) -> dict[str, Any] | None:
        """The order to end, once some rank has given it."""
        found = read_json(self._order)
        return found if found is not None and found["attempt"] == self.attempt else None

    def give_order(self, verdict: Verdict) -> bool:
        """Tell every rank to end; True for the one caller that was first to say so."""
        text = json.dumps({"attempt": self.attempt, **asdict(verdict)}).encode()
        if not storage.is_local(self._order):
            if self.order() is not None:
                return False
            storage.write_bytes(self._order, text)
            return True
        part = storage.local_path(f"{self._order}.{os.getpid()}")
        part.write_bytes(text)
        try:
            os.link(part, storage.local_path(self._order))  # complete at once, and only for the first
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    @property
    def _order(self) -> str:
        return join(self.root, FOLDER, f"order-{self.attempt}.json")


_LOOKING = 8
"""About so many ranks look at everyone's beats, evenly spread so that they sit on several nodes: if all did, the reads would
grow with the square of the workers. The others only look for the order to end."""


class Guard:
    """What a heart calls after each beat: look, and end this process when a rank hangs.

    `on_verdict(verdict)` is called in the one rank that gives the order, before it ends.
    """

    def __init__(self, watchdog: Watchdog, rank: int, on_verdict: Callable[[Verdict], None]) -> None:
        self.watchdog, self.rank, self.on_verdict = watchdog, rank, on_verdict
        self.looks = rank % max(1, watchdog.world_size // _LOOKING) == 0

    def __call__(self) -> None:
        order = self.watchdog.order()
        if order is None and self.looks:
            verdict = self.watchdog.look()
            if verdict is None:
                return
            if self.watchdog.give_order(verdict):
                self.on_verdict(verdict)
            order = self.watchdog.order()
        if order is not None:
            beat = order["beat"]
            if beat["rank"] != self.rank and beat["host"] == socket.gethostname():
                end_process(int(beat["pid"]))  # a stopped process cannot end itself
            os._exit(EXIT_CODE)


def verdict_of(root: str, attempt: str) -> tuple[int, str] | None:
    """Rank and words of the verdict that ended an attempt, if one did."""
    order = Watchdog(root, 1, 1.0, attempt).order()
    return None if order is None else (order["rank"], order["words"])


def judge(beats: list[Beat], silent: dict[int, float]) -> Verdict:
    """Name the rank that is behind. `silent` maps ranks whose beats stopped to the seconds since the last one."""
    beats = sorted(beats, key=lambda beat: beat.rank)
    for beat in beats:
        if beat.rank in silent:
            return Verdict(beat.rank, _silence(beat, silent[beat.rank]), beat)
    outside = [beat for beat in beats if not in_collective(beat)]
    if outside:
        beat = min(outside, key=lambda b: (b.step, b.moves))
        where = "waits for data" if beat.phase == "data" else f"is stuck in Python ({beat.phase})"
        return Verdict(beat.rank, f"{_who(beat)} {where} since {beat.stuck_s:.0f} s{_at(beat)}{_others(beats, beat)}", beat)
    beat = odd_one(beats)
    return Verdict(
        beat.rank,
        f"{_who(beat)} is in a collective that the others do not enter{_at(beat)}"
        + (f"; last collective {beat.collective}" if beat.collective else "")
        + _others(beats, beat),
        beat,
    )


def _who(beat: Beat) -> str:
    who = f"rank {beat.rank} (step {beat.step}, process {beat.pid} on {beat.host})"
    return f"{beat.holds}, {who}" if beat.holds else who


def _silence(beat: Beat, seconds: float) -> str:
    if is_stopped(beat):
        seen = f"last seen in phase {beat.phase} {seconds:.0f} s ago"
        return f"{_who(beat)} is stopped (SIGSTOP, a debugger or a frozen container), {seen}"
    return (
        f"{_who(beat)} runs no Python since {seconds:.0f} s, last seen in phase {beat.phase}: it is stopped, "
        "sits in native code that holds the interpreter lock, or its machine hangs"
    )


def is_stopped(beat: Beat) -> bool:
    """Whether the process is in state T, as far as this machine can see it."""
    return _state(beat) in ("T", "t")


def _state(beat: Beat) -> str:
    """The letter of the process's state ("t": a debugger holds it); empty where this machine cannot see it."""
    if beat.host != socket.gethostname():
        return ""
    try:
        text = Path(f"/proc/{beat.pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def in_collective(beat: Beat) -> bool:
    """Whether the innermost Python frame is a collective: torch's, raydist's agreement, or the backward in which DDP waits."""
    if not beat.stack or beat.phase == "data":
        return False
    innermost = beat.stack[-1]
    return (
        innermost.startswith(("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")) or "raydist/world.py" in innermost
    )


def odd_one(beats: list[Beat]) -> Beat:
    """The rank whose place differs from the most common one; among equals the one deepest in user code."""
    places = Counter(_place(beat) for beat in beats)
    least = min(places.values())
    odd = [beat for beat in beats if places[_place(beat)] == least]
    return max(odd, key=lambda beat: (not _in_training(beat), beat.step < max(b.step for b in beats), -beat.rank))


def _place(beat: Beat) -> str:
    own = [line for line in beat.stack if not line.startswith("torch/")]
    return own[-1] if own else ""


def _in_training(beat: Beat) -> bool:
    """Whether the rank waits where every step waits: in the backward, or where raydist agrees with the other ranks."""
    return _place(beat).split(":")[0].endswith(("raydist/precision.py", "raydist/world.py", "raydist/passes.py"))


def _at(beat: Beat) -> str:
    own = [line for line in beat.stack if not line.startswith("torch/")]
    return f", at {own[-1]}" if own else ""


def _others(beats: list[Beat], culprit: Beat) -> str:
    rest = [beat for beat in beats if beat is not culprit]
    if not rest:
        return ""
    waiting = ", ".join(
        f"rank {b.rank} {b.phase} of step {b.step}" + (f" ({b.collective})" if b.collective else "") for b in rest[:4]
    )
    return f"; waiting for it: {waiting}" + (" …" if len(rest) > 4 else "")


def check_interval(timeout: float, local: bool = True) -> float:
    """Seconds between beats (and looks) that name a stall in time; an object store is asked less often."""
    return min(1.0 if local else 5.0, max(0.05, timeout / 20))


def flight_recorder() -> None:
    """Have torch record collectives, if the user has not decided otherwise. Call before the process group starts."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")
