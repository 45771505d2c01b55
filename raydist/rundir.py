"""The run directory: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `summary.json` and the folder of checkpoints.

Metrics have one writer at a time, events may have several (driver, rank 0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from raydist import storage
from raydist.errors import RaydistError
from raydist.jsonl import Follower, JsonLines, plain, read


class RunDir:
    """One run's outputs under `root`: a local folder or an fsspec URI. Nothing is created before the first write.

    `flush_every` is in seconds and matters on an object store only: call `flush()` when the run ends.
    """

    def __init__(self, root: str, flush_every: float = 10.0) -> None:
        self.root = root
        self.checkpoints = storage.join(root, "checkpoints")
        self._metrics = JsonLines(storage.join(root, "metrics.jsonl"), flush_every)
        self._events = JsonLines(storage.join(root, "events.jsonl"), flush_every)
        self._last_step: int | None = None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line. `record["step"]` is an int above every earlier one, else ValueError; NaN and inf become null."""
        step = record.get("step")
        if type(step) is not int:
            raise ValueError(f"a metrics record needs an integer 'step', not {step!r}")
        if self._last_step is None:
            steps = [r["step"] for r in self._metrics.records()]
            self._last_step = max(steps, default=-1)
        if step <= self._last_step:
            raise ValueError(
                f"metrics.jsonl already reaches step {self._last_step}, so step {step} cannot follow; "
                f"a run that resumes calls truncate_metrics(after_step) first"
            )
        self._metrics.append(record)
        self._last_step = step

    def read_metrics(self) -> list[dict[str, Any]]:
        return self._metrics.records()

    def truncate_metrics(self, after_step: int) -> None:
        """Drop the lines with a step above `after_step`, and a last line that a crash cut short."""
        kept = [record for record in self._metrics.records() if record["step"] <= after_step]
        if storage.exists(self._metrics.uri):
            self._metrics.rewrite(kept)
        self._last_step = max((record["step"] for record in kept), default=-1)

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add one line: `time` (ISO 8601, UTC), `kind`, and fields such as rank, step, reason."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._events.append({"time": time, "kind": kind, **fields})

    def read_events(self) -> list[dict[str, Any]]:
        return self._events.records()

    def follow(self, since: float | None = None) -> RunFollower:
        """A tail of metrics and events, from the start or, with `since` (Unix time), without what is older.

        Lines of metrics carry no time: with `since`, those that are in the file now count as older.
        """
        return RunFollower(self._metrics.uri, self._events.uri, since)

    def write_config(self, yaml_text: str) -> None:
        storage.write_bytes(storage.join(self.root, "config.yaml"), yaml_text.encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json as a whole; NaN and inf become null."""
        text = json.dumps(plain(summary), indent=2, allow_nan=False) + "\n"
        storage.write_bytes(storage.join(self.root, "summary.json"), text.encode())

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None before there is one."""
        uri = storage.join(self.root, "summary.json")
        data = read(uri)
        if not data:
            return None
        try:
            summary = json.loads(data)
        except ValueError as error:
            raise RaydistError(f"{uri} is not JSON ({error}); it is written as a whole: something else changed it") from error
        return dict(summary)

    def flush(self) -> None:
        """Write lines that are only in memory (object stores)."""
        self._metrics.flush()
        self._events.flush()


class RunFollower:
    """Reads a run's metrics and events as they grow: each event once, each step once, also when a restart rewrites lines."""

    def __init__(self, metrics_uri: str, events_uri: str, since: float | None) -> None:
        self._since = since
        self._metrics = Follower(metrics_uri, key="step", skip_existing=since is not None)
        self._events = Follower(events_uri)

    def new(self) -> list[tuple[str, dict[str, Any]]]:
        """What came since the last call: `("event", record)`, then `("line", record)` of metrics. Empty when nothing did."""
        events = [event for event in self._events.new() if self._since is None or _seconds(event) >= self._since]
        return [*(("event", event) for event in events), *(("line", line) for line in self._metrics.new())]


def _seconds(event: Mapping[str, Any]) -> float:
    """The Unix time of an event, rounded up to its last written millisecond."""
    return datetime.fromisoformat(event["time"]).timestamp() + 1e-3
