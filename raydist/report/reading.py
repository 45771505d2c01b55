"""What a run's folder says, read for people: settings, lines, events, summary, and when each step was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from raydist import storage
from raydist.config import diff_settings
from raydist.errors import ConfigError
from raydist.jsonl import read
from raydist.rundir import RunDir

MOST_RUNS = 40
"""Runs of a sweep that a report draws; more curves in one chart tell nothing."""

STARTS = ("start", "resume", "restart")
TROUBLE = (
    "failure",
    "restart",
    "resume",
    "resize",
    "bad_step",
    "out_of_memory",
    "hang",
    "bad_checkpoint",
    "failed",
    "slow_rank",
)
"""Kinds of events that a chart marks."""


@dataclass(frozen=True)
class Run:
    """One run, as it stands on disk; it may still be going on."""

    root: str
    name: str
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    times: dict[int, float] = field(default_factory=dict)
    """Seconds from the first event to the end of each logged step; between events estimated from the steps' own times."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was written and is finite."""
        found = [(line["step"], line[key]) for line in self.lines if isinstance(line.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def numbers(self) -> list[str]:
        """Names of all numbers in the lines, in the order of their first appearance."""
        return list(dict.fromkeys(key for line in self.lines for key, value in line.items() if isinstance(value, int | float)))

    def trouble(self) -> list[dict[str, Any]]:
        """The events that a chart marks."""
        return [event for event in self.events if event.get("kind") in TROUBLE]

    @property
    def status(self) -> str:
        """The summary's status; without one, whether the run has begun."""
        return str(self.summary["status"]) if self.summary else "running or killed" if self.events else "not started"


def find_runs(path: str) -> list[str]:
    """`path` itself when it is a run's folder, else the runs in it (a sweep's trials), at most two levels down.

    Raises ConfigError when there is neither a run nor a sweep's `trials.csv`.
    """
    path = path if "://" in path else str(Path(path).expanduser())
    if _is_run(path):
        return [path.rstrip("/")]
    found: list[str] = []
    for name in storage.names(path):
        inside = storage.join(path, name)
        if name.startswith(".") or name == "checkpoints":
            continue
        if _is_run(inside):
            found.append(inside)
        else:
            below = [storage.join(inside, deeper) for deeper in storage.names(inside) if not deeper.startswith(".")]
            found += [where for where in below if _is_run(where)]
    if not found and not storage.exists(storage.join(path, "trials.csv")):  # no trial of a sweep need have a folder
        raise ConfigError(
            f"{path}: no run there; give the folder of a run (with metrics.jsonl or events.jsonl in it), or of a sweep"
        )
    return found


def _is_run(path: str) -> bool:
    return storage.exists(storage.join(path, "metrics.jsonl")) or storage.exists(storage.join(path, "events.jsonl"))


def read_run(root: str) -> Run:
    """Read a run's folder. A job file that this release no longer takes is shown as it is written."""
    run = RunDir(root)
    text = read(storage.join(root, "config.yaml"))
    config = yaml.safe_load(text) if text else {}
    lines, events = run.read_metrics(), run.read_events()
    name = str(config.get("name") or root.rstrip("/").rpartition("/")[2])
    return Run(root, name, config, lines, events, run.read_summary(), step_times(lines, events))


def step_times(lines: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """When each line's step ended, in seconds after the first event.

    Lines carry no clock, so a step's time is that of the start before it plus what its lines say they took; an event that names
    its step (a checkpoint, a bad step) puts the count right.
    """
    if not events:
        return {}
    first = seconds(events[0])
    known: dict[int, float] = {}
    for event in events:
        if isinstance(event.get("step"), int):
            known[event["step"]] = max(known.get(event["step"], 0.0), seconds(event) - first)
    starts = {event["step"]: seconds(event) - first for event in events if event["kind"] in STARTS and "step" in event}
    times: dict[int, float] = {}
    now, step = 0.0, 0
    for line in lines:
        passed = [s for s in starts if step <= s < line["step"]]
        if passed:
            step, now = max(passed), max(now, starts[max(passed)])
        now += (line["step"] - step) * float(line.get("step_s") or 0.0) + float(line.get("eval_s") or 0.0)
        step = line["step"]
        times[step] = now = min(now, known[step]) if step in known and known[step] > 0 else now
    return times


def seconds(event: dict[str, Any]) -> float:
    """An event's Unix time."""
    return datetime.fromisoformat(event["time"]).timestamp()


def label(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, unlike those of the others: the name, or as much of its folder as is needed."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    parts = [run.root.rstrip("/").split("/") for run in runs]
    for depth in range(1, max(len(part) for part in parts) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """`(key, value in each run)` of every setting that the runs do not share; the name and the folder are no settings."""
    keys: dict[str, None] = {}
    for run in runs[1:]:
        for key, _, _ in diff_settings(runs[0].config, run.config):
            if key not in ("name", "storage"):
                keys[key] = None
    return [(key, [_at(run.config, key) for run in runs]) for key in keys]


def _at(config: dict[str, Any], key: str) -> Any:
    found = {name: value for name, _, value in diff_settings({}, config)}
    return found.get(key)
