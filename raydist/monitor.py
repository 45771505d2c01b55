"""Each rank's time and memory, which rank the others wait for, and where the ranks are.

The numbers travel with the loss of a log line, in the same message: a step pays nothing for them.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

import torch

from raydist.metrics import cuda_memory_mb, peak_memory_mb
from raydist.world import World

TIMES = ("data_wait_s", "compute_s", "sync_wait_s")
"""The three parts of a step's time, as metrics.jsonl calls them."""
_MEMORY = ("memory_mb", "memory_reserved_mb")
_CAUSES = {"data_wait_s": "data", "compute_s": "compute"}
_SHARE = 0.2
"""A rank is slow when it needs this share of the step longer than the others."""
_LEAST_S = 1e-3
"""And at least this much, in seconds: below it, the clock of a busy machine decides."""


def row_of(times: Mapping[str, float], device: torch.device) -> list[float]:
    """What this rank adds to a log line: its `TIMES`, and the memory allocated and reserved, in MiB."""
    return [*(times[key] for key in TIMES), *peak_memory_mb(device)]


def columns(rows: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """All ranks' rows as `{name: [value of rank 0, of rank 1, …]}`."""
    digits = {**dict.fromkeys(TIMES, 7), **dict.fromkeys(_MEMORY, 1)}
    return {name: [round(row[i], digits[name]) for row in rows] for i, name in enumerate((*TIMES, *_MEMORY))}


def memory_of(rows: Sequence[Sequence[float]], world: World) -> dict[str, Any]:
    """This rank's memory for its line; per GPU where one worker holds several."""
    allocated, reserved = rows[world.rank][len(TIMES) :]
    line: dict[str, Any] = {"memory_mb": allocated}
    if world.device.type == "cuda":
        line["memory_reserved_mb"] = reserved
        devices = cuda_memory_mb()
        if len(devices) > 1:
            line["devices"] = {name: dict(zip(_MEMORY, pair, strict=True)) for name, pair in devices.items()}
    return line


def slow_rank(line: Mapping[str, Any]) -> tuple[int, str] | None:
    """The rank that the others wait for in a line, and what for: "data" or "compute". None when there is none.

    A rank is compared with the median of the others. Data comes first: a wait for data is never another rank's doing, while a
    rank that waits for another's buffers seems to compute.
    """
    ranks = line.get("ranks") or {}
    for key, cause in _CAUSES.items():
        values = ranks.get(key) or []
        if len(values) < 2:
            return None
        worst = max(range(len(values)), key=values.__getitem__)
        excess = values[worst] - statistics.median([*values[:worst], *values[worst + 1 :]])
        if excess >= max(_LEAST_S, _SHARE * line["step_s"]):
            return worst, cause
    return None


class Monitor:
    """Adds up the lines of a run, and says once that a rank is slow: when two lines in a row agree on it."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {key: [] for key in TIMES}
        self.memory: list[float] = []
        self.lines = 0
        self._slow: dict[tuple[int, str], int] = {}
        self._last: tuple[int, str] | None = None
        self._said: set[tuple[int, str]] = set()
        self._step = 0

    def begin(self, step: int) -> None:
        """The workers start, again perhaps, after `step`."""
        self._step, self._last = step, None
        self._said.clear()

    def add(self, line: Mapping[str, Any]) -> dict[str, Any] | None:
        """Count a line; the fields of an event when a rank has turned out slow."""
        steps, self._step = max(0, line["step"] - self._step), line["step"]
        ranks = line.get("ranks")
        if not ranks or not steps:
            return None
        self.lines += 1
        for key in TIMES:
            self.totals[key] = _added(self.totals[key], [value * steps for value in ranks[key]])
        self.memory = [max(pair) for pair in zip_longest(self.memory, ranks["memory_mb"], fillvalue=0.0)]
        found = slow_rank(line)
        before, self._last = self._last, found
        if found is None:
            return None
        self._slow[found] = self._slow.get(found, 0) + 1
        if found != before or found in self._said:
            return None
        self._said.add(found)
        return _event(found, line)

    def summary(self) -> dict[str, Any]:
        """For summary.json: seconds per rank of each part, peak memory per rank, and the rank that was slow most often."""
        if not self.lines:
            return {}
        slow = None
        if self._slow:
            (rank, cause), lines = max(self._slow.items(), key=lambda item: item[1])
            if lines >= max(2, self.lines / 4):
                slow = {"rank": rank, "cause": cause, "lines": lines, "of": self.lines}
        return {"time_split": self.totals, "peak_memory_mb": self.memory, "slow_rank": slow}


def _added(totals: list[float], values: list[float]) -> list[float]:
    """Element-wise sum of lists that need not be equally long: the number of workers may change."""
    return [one + other for one, other in zip_longest(totals, values, fillvalue=0.0)]


def _event(found: tuple[int, str], line: Mapping[str, Any]) -> dict[str, Any]:
    rank, cause = found
    key = next(key for key, word in _CAUSES.items() if word == cause)
    values = line["ranks"][key]
    others = statistics.median([*values[:rank], *values[rank + 1 :]])
    what = "waits for data" if cause == "data" else "computes"
    reason = (
        f"rank {rank} is slow: {cause} (it {what} {1e3 * values[rank]:.1f} ms of a {1e3 * line['step_s']:.1f} ms step, "
        f"the others {1e3 * others:.1f} ms)"
    )
    return {"rank": rank, "cause": cause, "reason": reason}


# -- where the ranks are -------------------------------------------------------------------------------------------------


def place_of(world: World) -> dict[str, Any]:
    """Where this rank runs."""
    place: dict[str, Any] = {
        "rank": world.rank,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": str(world.device),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    if world.device.type == "cuda":
        place["gpu"] = torch.cuda.get_device_name(world.device)
    else:
        place["threads"] = torch.get_num_threads()
    return place


def places_in_words(places: Sequence[Mapping[str, Any]]) -> str:
    """One line for people: backend, world size, and which ranks run on which devices of which host."""
    parts = []
    for host, group in groupby(places, key=lambda place: str(place["host"])):
        ranks = list(group)
        devices = list(dict.fromkeys(str(place["device"]) for place in ranks))
        gpus = sorted({str(place["gpu"]) for place in ranks if "gpu" in place})
        kind = f" ({', '.join(gpus)})" if gpus else f" ({ranks[0]['threads']} threads each)" if "threads" in ranks[0] else ""
        first, last = ranks[0]["rank"], ranks[-1]["rank"]
        parts.append(f"{f'rank {first}' if first == last else f'ranks {first}-{last}'} on {host}, {_range(devices)}{kind}")
    backend = places[0]["backend"] if len(places) > 1 else "no"
    return f"{backend} backend, world size {len(places)}: {'; '.join(parts)}"


def _range(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
