"""What a failed attempt means: whose error came first, and whether another attempt can help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raydist.errors import CheckpointError, ConfigError, DataError, RaydistError, TrainError
from raydist.heartbeat import read_beats
from raydist.rundir import RunDir
from raydist.storage import is_local
from raydist.watchdog import verdict_of
from raydist.world import is_broken_link

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.keeper import Attempt

_SAME_AGAIN = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError, TrainError)}
"""raydist's own errors follow from the job and its data: the same attempt would end the same way."""


@dataclass(frozen=True)
class Failure:
    """The first failing rank and its own error. `retry`: a restart may help; `micro_size`: it needs a smaller micro-batch."""

    error: RaydistError
    rank: int | None
    retry: bool
    micro_size: int | None = None


def failure_of(error: BaseException, attempt: Attempt, since: float, config: JobConfig) -> Failure:
    """One failure out of the watchdog's verdict, the workers' own words (events of this attempt) and Ray's account of who died.

    A rank's own error beats a neighbour's broken connection, whichever was noticed first.
    """
    found = _failure_of(error, attempt, since, config)
    beat = None if found.rank is None else read_beats(attempt.start.root).get(found.rank)
    if beat is None or beat.attempt != attempt.key or not beat.holds or beat.holds in str(found.error):
        return found
    return replace(found, error=type(found.error)(f"{beat.holds}, {found.error}"))


def _failure_of(error: BaseException, attempt: Attempt, since: float, config: JobConfig) -> Failure:
    verdict = verdict_of(attempt.start.root, attempt.key)
    if verdict is not None:
        return Failure(TrainError(verdict[1]), verdict[0], retry=True)
    dead = worker_failures(error)
    told = _told(attempt.start.root, since)
    own = next((event for event in told if event["raised"]), None) or next(
        (e for e in told if not is_broken_link(e["reason"])), None
    )
    if own is not None:
        return _from_words(own, config)
    silent = [rank for rank in dead if rank not in {event["rank"] for event in told}]
    for rank in [*silent, *dead]:
        words = words_of(dead[rank])
        if rank in silent or not is_broken_link(words):
            return Failure(TrainError(f"rank {rank} died: {words}"), rank, retry=True)
    if told:
        return Failure(TrainError(f"rank {told[0]['rank']}: {told[0]['reason']}"), told[0]["rank"], retry=True)
    return Failure(TrainError(f"Ray Train failed: {words_of(error)}"), None, retry=True)


def _told(root: str, since: float) -> list[dict[str, Any]]:
    """What workers of this attempt said of their end, in order of time."""
    if not is_local(root):
        return []
    return [
        event
        for event in RunDir(root).read_events()
        if event["kind"] == "worker_failed" and datetime.fromisoformat(event["time"]).timestamp() >= since - 0.01
    ]


def _from_words(event: dict[str, Any], config: JobConfig) -> Failure:
    rank, reason = event["rank"], event["reason"]
    if event["error"] == "OutOfMemoryError":
        if config.batch.micro_size == "auto" and event.get("micro_size"):
            words = f"rank {rank}: {reason}; going on with micro-batches of {event['micro_size']}"
            return Failure(TrainError(words), rank, retry=True, micro_size=event["micro_size"])
        return Failure(TrainError(f"rank {rank}: {reason}. Lower batch.micro_size, or set it to auto"), rank, retry=False)
    kind = _SAME_AGAIN.get(event["error"])
    if kind is not None:
        return Failure(kind(reason), rank, retry=False)
    return Failure(TrainError(f"rank {rank}: {reason}"), rank, retry=True)


def worker_failures(error: BaseException) -> dict[int, BaseException]:
    """Ray's `{rank: error}` of a failed worker group, out of whatever it is wrapped in."""
    seen: Any = error
    while isinstance(seen, BaseException):
        found = getattr(seen, "worker_failures", None)
        if found:
            return dict(found)
        seen = getattr(seen, "error", None) or seen.__cause__
    return {}


def words_of(error: BaseException) -> str:
    """The type and the first telling line of an error, without Ray's traceback."""
    cause = getattr(error, "cause", None) or error
    if type(cause).__name__ in ("WorkerHealthCheckFailedError", "ActorDiedError", "ActorUnavailableError"):
        return "its process ended without a word (killed, out of memory, or its node is gone)"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return f"{type(cause).__name__}: {first}" if first else type(cause).__name__
