"""A sweep's folder: `sweep.jsonl`, from which everything can be told again, and what is made of it: `trials.csv`, `best.yaml`.

`sweep.jsonl` has a line for each thing that happens to a trial, written before it counts: `begin` (settings), `report` (a row),
`change` (PBT gave it other settings), `end` (status, error). A sweep that goes on reads it from the start.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raydist import storage
from raydist.config import JobConfig, to_yaml
from raydist.jsonl import JsonLines
from raydist.sweep.space import Settings, name_of
from raydist.sweep.trials import TABLE

FACTS = ("steps", "epochs", "rows", "seconds", "global_batch", "lr", "seed")
ENDED = ("finished", "stopped", "failed")


@dataclass
class Row:
    """A trial: status, settings, the last report, and why it failed."""

    number: int
    settings: Settings
    status: str = "pending"
    last: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def value(self, metric: str) -> float | None:
        """The metric's last value, None where it is not finite or the trial has failed."""
        found = self.last.get(metric)
        good = self.status != "failed" and isinstance(found, int | float) and math.isfinite(found)
        return float(found) if good and found is not None else None


class Journal:
    """All trials of a sweep. One process writes."""

    def __init__(self, root: str, metric: str, mode: str) -> None:
        self.root, self.metric, self.mode = root, metric, mode
        self._lines = JsonLines(storage.join(root, "sweep.jsonl"), flush_every=2.0)
        self.rows: dict[int, Row] = {}
        self.records = self._lines.records() if storage.exists(storage.join(root, "sweep.jsonl")) else []
        self.elapsed = max((float(record.get("elapsed", 0.0)) for record in self.records), default=0.0)
        """Seconds of earlier invocations."""
        self.hours = max((float(record.get("hours", 0.0)) for record in self.records), default=0.0)
        """Worker-hours used so far, over all invocations."""
        self._began = time.monotonic()
        self._written = 0.0
        self._text = ""
        for record in self.records:
            self._apply(record)
        for row in self.rows.values():
            if row.status not in ENDED:
                row.status = "pending"

    def seconds(self) -> float:
        """Seconds that the sweep has taken, over all invocations."""
        return self.elapsed + time.monotonic() - self._began

    def _note(self, kind: str, number: int, **fields: Any) -> None:
        record = {"kind": kind, "trial": number, "elapsed": round(self.seconds(), 3), "hours": round(self.hours, 6), **fields}
        self._lines.append(record)
        self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        number, kind = int(record["trial"]), record["kind"]
        if kind == "begin":
            self.rows[number] = Row(number, dict(record["settings"]))
            return
        row = self.rows[number]
        if kind == "report":
            row.last, row.status = dict(record["row"]), "running"
        elif kind == "change":
            row.settings = dict(record["settings"])
        elif kind == "end":
            row.status, row.error = record["status"], record.get("error", "")

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self, number: int, settings: Settings) -> None:
        """A trial is there, with these settings."""
        self._note("begin", number, settings=settings)

    def report(self, number: int, row: Mapping[str, Any]) -> None:
        """A trial has come to a report."""
        self._note("report", number, row=dict(row))

    def change(self, number: int, settings: Settings) -> None:
        """A trial goes on with other settings."""
        self._note("change", number, settings=settings)

    def end(self, number: int, status: str, error: str = "") -> None:
        """A trial is over."""
        self._note("end", number, status=status, error=error)

    # -- what is made of it -------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Row]:
        """Trials that were begun and have not ended."""
        return [row for row in self.rows.values() if row.status not in ENDED]

    def best(self) -> Row | None:
        """The best finished trial, else the best stopped one, else one that has not ended; None where no metric is finite."""
        scored = self.ranked()
        finished = [row for row in scored if row.status == "finished"]
        found = finished or [row for row in scored if row.status in ENDED] or scored
        return found[0] if found else None

    def ranked(self) -> list[Row]:
        """The trials with a finite metric, the best first."""
        sign = -1.0 if self.mode == "max" else 1.0
        scored = [(value, row) for row in self.rows.values() if (value := row.value(self.metric)) is not None]
        return [row for _, row in sorted(scored, key=lambda found: (sign * found[0], found[1].number))]

    def count(self, *states: str) -> int:
        """Trials in these states."""
        return sum(row.status in states for row in self.rows.values())

    def keys(self) -> list[str]:
        """The dotted keys that some trial sets, in order."""
        return list(dict.fromkeys(key for row in self.rows.values() for key in row.settings))

    def write(self, job: Callable[[Row], JobConfig], every: float = 0.0) -> None:
        """Write `trials.csv`, and `best.yaml` when there is a best one; not when the last time is less than `every` s ago."""
        if time.monotonic() - self._written < every:
            return
        self._written = time.monotonic()
        if (text := self.table()) != self._text:  # which tells all that the best one depends on
            storage.write_bytes(storage.join(self.root, TABLE), text.encode())
            if (best := self.best()) is not None:
                storage.write_bytes(storage.join(self.root, "best.yaml"), to_yaml(job(best)).encode())
            self._text = text
        self._lines.flush()

    def table(self) -> str:
        """All trials as CSV."""
        out = io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        keys = self.keys()
        lines.writerow(["trial", "status", self.metric, *FACTS, "error", *keys])
        for _, row in sorted(self.rows.items()):
            facts = [_cell(row.last.get(name)) for name in FACTS]
            swept = [_cell(row.settings[key], unset="null") if key in row.settings else "" for key in keys]
            value = _cell(row.value(self.metric))
            lines.writerow([name_of(row.number), row.status, value, *facts, row.error, *swept])
        return out.getvalue()


def _cell(value: Any, unset: str = "") -> str:
    if value is None:
        return unset
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
