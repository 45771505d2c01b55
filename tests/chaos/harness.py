"""Runs a case and says whether it ended as promised: each step and each row once, the weights of the undisturbed run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from raydist.checkpoint import load, load_latest
from raydist.config import parse_config
from raydist.errors import RaydistError
from raydist.faults import VARIABLE
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from raydist.screen import Screen
from raydist.state import TrainState
from tests.chaos.cases import EVAL_EVERY, SAVE_EVERY, STEPS, Case
from tests.chaos.cluster import Nodes, kill_controller, titles
from tests.chaos.task import LR, times_used

REPOSITORY = Path(__file__).parents[2]
ROWS, SIZE = 64, 8
END_S = 60.0
"""A fault that ends the run does so, and a hang is named, within this."""


def job(folder: Path, name: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The common job: 64 rows in 8 global batches, two epochs, two workers of two micro-batches."""
    content: dict[str, Any] = {
        "name": name,
        "task": {"target": "tests.chaos.task:Task", "args": {"rows": ROWS, "dropout": 0.1}},
        "data": {
            "train": {"target": "tests.chaos.task:Rows", "args": {"rows": ROWS, "delay": 0.003}, "shuffle": True},
            "eval": {"target": "tests.chaos.task:Rows", "args": {"rows": 8}},
        },
        "batch": {"global_size": SIZE, "micro_size": 2},
        "train": {"epochs": 2, "log_every": {"steps": 1}, "eval_every": {"steps": EVAL_EVERY}, "ema": {"decay": 0.5}},
        "optimizer": {"target": "tests.chaos.task:Momentum", "lr": LR},
        "checkpoint": {"every": {"steps": SAVE_EVERY}, "keep": 10},
        "scaling": {"workers": 2},
        "storage": str(folder),
    }
    for key, value in (settings or {}).items():
        *path, last = key.split(".")
        at = content
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return content


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


class Undisturbed:
    """The runs that nothing happened to, each trained once: with dropout on two workers, without on one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, dict[str, tuple[TrainState, list[dict[str, Any]]]]()

    def __call__(self, case: Case) -> tuple[TrainState, list[dict[str, Any]]]:
        """State and metrics of the run that `case` is compared with."""
        settings = {key: value for key, value in case.settings.items() if key == "task.args.dropout"}
        name = "undisturbed" + "".join(f"-{value}" for value in settings.values())
        if name not in self._known:
            train_ray(parse_config(job(self.folder, name, settings), self.folder), screen=unseen())
            self._known[name] = state_of(self.folder / name), lines_of(self.folder / name)
        return self._known[name]


def unseen() -> Screen:
    """A screen that nobody looks at."""
    return Screen(stream=io.StringIO())


def state_of(run: Path) -> TrainState:
    warnings: list[str] = []
    found = load_latest(str(run / "checkpoints"), warnings.append)
    assert found is not None and not warnings, warnings
    return found[0]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine say."""
    names = ("step", "epoch", "train_loss", "eval_loss", "lr", "grad_norm", "skipped")
    return [{name: line[name] for name in names if name in line} for line in RunDir(str(run)).read_metrics()]


# -- one case ---------------------------------------------------------------------------------------------------------


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
                _drive(case, run, content, cluster, acted)
            elif case.act is not None:
                _beside(case, run, content, cluster, acted)
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


def _beside(case: Case, run: Path, content: dict[str, Any], cluster: Nodes, acted: list[float]) -> None:
    """The job in a thread, and in this one what `case.act` does once the run waits at its gate; its time goes to `acted`."""
    raised: list[BaseException] = []

    def train() -> None:
        try:
            train_ray(parse_config(content, run.parent), screen=unseen())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=train, name="chaos-train", daemon=True)
    thread.start()
    while thread.is_alive() and not (run / ".faults" / "0-0").exists():
        time.sleep(0.02)
    if thread.is_alive():
        time.sleep(0.3)  # by now every rank waits: for the gate or in the collective behind it
        acted.append(time.time())
        acts = {"raylet": cluster.kill_second, "preempt": cluster.preempt_second, "grow": cluster.add_second}
        acts.get(str(case.act), lambda: kill_controller(cluster.session))()
    thread.join()
    if case.act in ("raylet", "preempt"):
        cluster.want(1)
    if raised:
        raise raised[0]


def _drive(case: Case, run: Path, content: dict[str, Any], cluster: Nodes, acted: list[float]) -> None:
    """The job by `raydist train` in a process of its own, on a Ray of its own unless it is killed; then the command again."""
    file = run.parent / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "raydist", "train", str(file), "--address", "local"]
    first = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / ".faults" / "0-0").exists():
            if time.monotonic() > deadline or first.poll() is not None:
                raise RaydistError(f"the driver did not reach its gate: {first.communicate()[1]}")
            time.sleep(0.02)
        time.sleep(0.3)
        session = session_of(first.pid)
        acted.append(time.time())
        if case.act == "driver":
            first.kill()
        else:
            number = signal.SIGTERM if case.act == "sigterm" else signal.SIGINT
            for _ in range(2 if case.act == "ctrl_c_twice" else 1):
                # Ctrl-C goes to the whole group, as a terminal sends it
                os.kill(first.pid, number) if case.act == "sigterm" else os.killpg(first.pid, number)
                time.sleep(0.5)
        text = first.communicate(timeout=60)[1]
    finally:
        first.kill()
        first.wait()
    took = time.time() - acted[0]
    code = {"driver": -9, "ctrl_c_twice": 130}.get(str(case.act), 3)
    if first.returncode != code:
        raise RaydistError(f"the driver's exit code is {first.returncode}, not {code}: {text}")
    if case.act in ("sigterm", "ctrl_c") and not re.search(case.says, text):
        raise RaydistError(f"the driver did not say {case.says!r}: {text}")
    if case.act == "ctrl_c_twice" and took > 15:
        raise RaydistError(f"a second Ctrl-C took {took:.0f} s")
    left = titles(session)
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = titles(session)
    if left:
        raise RaydistError(f"still running after the driver's end: {left}")
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    if again.returncode:
        raise RaydistError(f"the same command again ends with exit code {again.returncode}: {again.stderr}")


def session_of(driver: int) -> str:
    """The folder of the Ray session that a driver started, from its children's command lines."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                text = (entry / "cmdline").read_text()
            except OSError:
                continue
            found = re.search(r"--session-dir=([^\0]+)", text)
            if parent == driver and found:
                return found[1]
    raise AssertionError(f"process {driver} has started no Ray")


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


# -- the promises -------------------------------------------------------------------------------------------------------


def problems_of(
    case: Case, run: Path, error: RaydistError | None, expected: tuple[TrainState, list[dict[str, Any]]]
) -> list[str]:
    """What is not as promised."""
    run_dir = RunDir(str(run))
    events, summary = run_dir.read_events(), run_dir.read_summary() or {}
    told = [str(event.get("reason")) for event in events] + [str(summary.get("reason"))] + ([str(error)] if error else [])
    found = [] if any(re.search(case.says, words) for words in told) else [f"nobody said {case.says!r}, but {told}"]
    hang = next((e for e in events if e["kind"] == "hang"), None)
    if hang is not None and not hang["stack"] and "stopped" not in hang["reason"]:
        found.append("the hang has no stack")
    if case.ends:
        if error is None or summary.get("status") != "failed":
            found.append(f"it should have failed; the summary says {summary.get('status')}")
        return found
    if error is not None or summary.get("status") != "finished":
        return [*found, f"it should have finished: {error}"]
    steps = [line["step"] for line in lines_of(run)]
    if steps != list(range(1, STEPS + 1)):
        found.append(f"metrics.jsonl has steps {steps}")
    lost = sum(event.get("lost_steps", 0) for event in events)
    if lost > case.lost or summary["rows_seen"] != STEPS * SIZE or summary["steps"] != STEPS:
        found.append(f"lost {lost} steps (at most {case.lost}); steps {summary['steps']}, rows seen {summary['rows_seen']}")
    return found + rows_problems(case, run) + weights_problems(case, run, expected)


def rows_problems(case: Case, run: Path) -> list[str]:
    """Each row once an epoch, but for those of batches that must not count."""
    found = []
    middle = run / "checkpoints" / f"step-{STEPS // 2:08d}"
    checks = [(state_of(run).model, 2)] + ([(load(str(middle))[0].model, 1)] if (middle / "manifest.json").exists() else [])
    for model, epochs in checks:
        if case.name.startswith(("corrupt", "disk full")) and epochs == 1:
            continue
        used = times_used(model, SIZE)
        wrong = [row for row, times in enumerate(used) if times != epochs]
        if len(wrong) != case.left_out or any(used[row] != epochs - 1 for row in wrong):
            found.append(f"rows used not once an epoch, after {epochs}: {[(row, used[row]) for row in wrong]}")
    return found


def weights_problems(case: Case, run: Path, expected: tuple[TrainState, list[dict[str, Any]]]) -> list[str]:
    """Weights, averaged weights and momentum are those of the undisturbed run, and so is each line of metrics."""
    if case.weights == "other":
        return []
    state, other = state_of(run), expected[0]
    tolerance = 0.0 if case.weights == "equal" else 1e-6
    found = []
    for part, ours, theirs in (("model", state.model, other.model), ("ema", state.ema, other.ema)):
        assert ours is not None and theirs is not None
        for name, tensor in ours.items():
            same = torch.equal(tensor, theirs[name]) if not tolerance else (tensor - theirs[name]).abs().max() <= tolerance
            if not same:
                found.append(f"{part} {name} is off by {float((tensor - theirs[name]).abs().max()):.2e}")
    for key, slot in state.optimizer["state"].items():
        momentum, theirs = slot.get("momentum_buffer"), other.optimizer["state"][key].get("momentum_buffer")
        if momentum is not None and (momentum - theirs).abs().max() > tolerance:
            found.append(f"the momentum of parameter {key} is off by {float((momentum - theirs).abs().max()):.2e}")
    if not tolerance and lines_of(run) != expected[1]:
        found.append("metrics.jsonl differs from the undisturbed run's")
    return found
