"""Runs a case, measures how long it took to go on, and says whether it ended as promised."""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from raydist.config import parse_config
from raydist.errors import RaydistError
from raydist.faults import VARIABLE
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from tests.chaos.acts import beside, drive
from tests.chaos.cases import Case
from tests.chaos.cluster import Nodes
from tests.chaos.promises import problems_of
from tests.chaos.runs import Undisturbed, job, unseen

END_S = 60.0
"""A fault that ends the run does so, and a hang is named, within this."""


@dataclass
class Report:
    """How a case went. `problems` are the promises that did not hold; seconds are from the fault on."""

    name: str
    outcome: str
    lost: int | None = None
    recovered: list[float] = field(default_factory=list)
    """To the next trained step, for each fault."""
    named: float | None = None
    """To the watchdog's sentence."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def seconds_to_recover(self) -> float | None:
        return statistics.median(self.recovered) if self.recovered else None


class Pace(threading.Thread):
    """Notes when a line comes to metrics.jsonl: lines carry no time of their own."""

    def __init__(self, file: Path) -> None:
        super().__init__(name="chaos-pace", daemon=True)
        self.file, self.appended = file, [0.0]
        self._over = threading.Event()

    def run(self) -> None:
        size = 0
        while not self._over.wait(0.01):
            try:
                status = self.file.stat()
            except FileNotFoundError:
                continue
            if status.st_size > size:
                self.appended.append(status.st_mtime)
            size = status.st_size

    def stop(self) -> None:
        self._over.set()
        self.join()

    def after(self, moment: float) -> float | None:
        """When the first line after `moment` came."""
        return next((time for time in self.appended if time > moment), None)


def run_case(case: Case, folder: Path, cluster: Nodes, undisturbed: Undisturbed) -> Report:
    """Let the fault happen to a run of its own, and look at what is left of the promises."""
    expected = undisturbed(case)
    if case.nodes is not None:
        cluster.want(case.nodes)
    name = re.sub(r"[^a-z0-9]+", "-", case.name.lower())
    run, content = folder / name, job(folder, name, case.settings)
    pace = Pace(run / "metrics.jsonl")
    pace.start()
    acted: list[float] = []
    began, error = time.time(), None
    try:
        with injected(case.faults):
            if case.act in ("driver", "sigterm", "ctrl_c", "ctrl_c_twice"):
                drive(case, run, content, cluster, acted)
            elif case.act is not None:
                beside(case, run, content, cluster, acted)
            else:
                train_ray(parse_config(content, folder), screen=unseen())
    except RaydistError as raised:
        error = raised
    finally:
        pace.stop()
    report = Report(case.name, "finished" if error is None else f"{type(error).__name__}: {error}", seconds=time.time() - began)
    times = acted or sorted(mark.stat().st_mtime for mark in (run / ".faults").glob("*"))
    _measure(report, run, times, pace)
    report.problems += problems_of(case, run, error, expected)
    if error is not None and times and time.time() - times[-1] > END_S:
        report.problems.append(f"the run ended {time.time() - times[-1]:.0f} s after the fault")
    if report.named is not None and report.named > END_S:
        report.problems.append(f"the hang was named {report.named:.0f} s after it began")
    if len(times) < len(acted or case.faults):
        report.problems.append(f"only {len(times)} of {len(case.faults)} faults happened")
    return report


@contextmanager
def injected(faults: list[dict[str, Any]]) -> Iterator[None]:
    """`faults` in the environment, where the runners look for them."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(faults)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _measure(report: Report, run: Path, times: list[float], pace: Pace) -> None:
    """Seconds from each fault to the next trained step, and what the run says of itself."""
    events = RunDir(str(run)).read_events()
    starts = [seconds(e) for e in events if e["kind"] in ("start", "restart", "resume")]
    for number, moment in enumerate(times):
        until = times[number + 1] if number + 1 < len(times) else float("inf")
        # a start loads the state; what is appended after it is a step trained from there
        anew = next((start for start in starts if moment < start < until), moment)
        if (step := pace.after(anew)) is not None and step < until:
            report.recovered.append(step - moment)
    hang = next((seconds(event) for event in events if event["kind"] == "hang"), None)
    report.named = None if hang is None else hang - times[0]
    report.lost = sum(event.get("lost_steps", 0) for event in events)


def seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
