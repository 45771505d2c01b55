"""What a failed attempt means: whose error came first, and whether another attempt can help."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from raydist.errors import CheckpointError, ConfigError, DataError, RaydistError, TrainError
from raydist.storage import is_local

_SAME_AGAIN = {"ConfigError": ConfigError, "DataError": DataError, "CheckpointError": CheckpointError, "TrainError": TrainError}
"""raydist's own errors follow from the job and its data: the same attempt would end the same way."""


@dataclass(frozen=True)
class Failure:
    """The first failing rank and its own error; `retry` says whether a restart may help."""

    error: RaydistError
    rank: int | None
    retry: bool


def failure_of(error: BaseException, root: str, since: float) -> Failure:
    """Read the workers' own words (events of this attempt), and Ray's account of who died, into one failure."""
    from raydist.rundir import RunDir

    dead = worker_failures(error)
    told = (
        []
        if not is_local(root)
        else [
            event
            for event in RunDir(root).read_events()
            if event["kind"] == "worker_failed" and datetime.fromisoformat(event["time"]).timestamp() >= since - 1.0
        ]
    )
    silent = [rank for rank in dead if rank not in {event["rank"] for event in told}]
    if silent and not any(event.get("raised") for event in told):
        rank = silent[0]
        return Failure(TrainError(f"rank {rank} died: {words_of(dead[rank])}"), rank, retry=True)
    if told:
        own = next((event for event in told if event.get("raised")), told[0])
        kind = _SAME_AGAIN.get(own["error"])
        if kind is not None:
            return Failure(kind(own["reason"]), own["rank"], retry=False)
        return Failure(TrainError(f"rank {own['rank']}: {own['reason']}"), own["rank"], retry=True)
    if dead:
        rank = next(iter(dead))
        return Failure(TrainError(f"rank {rank}: {words_of(dead[rank])}"), rank, retry=True)
    return Failure(TrainError(f"Ray Train failed: {words_of(error)}"), None, retry=True)


def worker_failures(error: BaseException) -> dict[int, BaseException]:
    """Ray's `{rank: error}` of a failed worker group, out of whatever it is wrapped in."""
    seen: Any = error
    while seen is not None:
        found = getattr(seen, "worker_failures", None)
        if found:
            return dict(found)
        seen = getattr(seen, "error", None) or seen.__cause__
        if not isinstance(seen, BaseException):
            return {}
    return {}


def words_of(error: BaseException) -> str:
    """The last telling line of an error, without Ray's traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return f"{type(cause).__name__}: {first}" if first else type(cause).__name__
