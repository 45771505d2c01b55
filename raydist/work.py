"""What every worker of every runner does: open the data, go on from a checkpoint, run the loop, keep the run's folder.

Ray Train, torchrun and the one-process runner differ only in who calls `work` and what they pass as `data` and `control`.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import faults
from raydist.checkpoint import TrainState, load, load_latest
from raydist.data.job import Sources, open_sources
from raydist.errors import CheckpointError, RaydistError
from raydist.heartbeat import Heart
from raydist.loop import Control, StepResult, fit, total_steps
from raydist.manifest import folder_name
from raydist.rundir import RunDir
from raydist.saver import Saver
from raydist.start import Start
from raydist.storage import is_local, join
from raydist.task import build_task
from raydist.watchdog import Guard, Verdict, Watchdog, check_interval
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig

Listener = Callable[[str, dict[str, Any]], None]
"""Called on rank 0 with ("line" | "event" | "started", record)."""


OpenData = Callable[["JobConfig", World, dict[str, Any] | None], Sources]


@dataclass(frozen=True)
class Attempt:
    """One start of the workers. `number` is 0 for the first of this invocation, and counts restarts from there."""

    start: Start
    number: int = 0
    micro_size: int | None = None
    """A micro-batch size that an earlier attempt found to fit no more; this one starts below."""
    restarts: int = 0
    """Attempts before this one that failed; resizes do not count."""
    faults: str | None = field(default_factory=lambda: os.environ.get(faults.VARIABLE))
    """Faults to inject (`raydist.faults`), as the process that the user started has them in its environment."""
    reached: int = 0
    """The last step that an earlier attempt is known to have trained."""

    @property
    def key(self) -> str:
        """Names this attempt among all of the run's folder."""
        return f"{self.start.began:.3f}-{self.number}"


def work(
    config: JobConfig,
    world: World,
    attempt: Attempt,
    control: Control,
    open_data: OpenData | None = None,
    listen: Listener | None = None,
    on_result: Callable[[StepResult], None] | None = None,
) -> dict[str, Any]:
    """Train to the end and return the summary. Every rank must call it.

    Raises what `fit` raises; whoever called decides on a restart, and writes the summary of a failure.
    """
    keeper = _Keeper(config, world, attempt, control, listen)
    _collect_warnings(control)
    control.micro_size = attempt.micro_size
    control.reload = keeper.newest
    control.faults = faults.parse(attempt.faults, world.rank, Path(attempt.start.root) / ".faults")
    with _heart(config, world, attempt, control, keeper):
        return _work(config, world, control, keeper, open_data or open_sources, on_result)


def _work(
    config: JobConfig,
    world: World,
    control: Control,
    keeper: _Keeper,
    open_data: OpenData,
    on_result: Callable[[StepResult], None] | None,
) -> dict[str, Any]:
    state = keeper.resume()
    sources = open_data(config, world, None if state is None else state.data)
    try:
        task = build_task(config.task)
        total = total_steps(config, sources.train)
        keeper.started(state, total, sources)
        for result in fit(config, task, world, sources.train, sources.evaluation, state, control, sources.state):
            keeper.take(result)
            if on_result is not None:
                on_result(result)
        return keeper.finish()
    finally:
        keeper.close()
        sources.close()


@contextmanager
def _heart(config: JobConfig, world: World, attempt: Attempt, control: Control, keeper: _Keeper) -> Iterator[None]:
    """Beat, and watch the others' beats, while training runs; off with `failure.hang_timeout: null`."""
    timeout = config.failure.hang_timeout
    if timeout is None:
        yield
        return
    root = attempt.start.root
    watchdog = Watchdog(root, world.world_size, 0.75 * timeout, attempt.key)

    def report(verdict: Verdict) -> None:
        keeper.run.append_event("hang", rank=verdict.rank, reason=verdict.words, stack=verdict.beat.stack)
        keeper.run.flush()
        print(f"raydist: {verdict.words}", file=sys.stderr, flush=True)

    every = check_interval(timeout, is_local(root))
    heart = Heart(root, world.rank, control.progress, every, attempt.key, Guard(watchdog, world.rank, report))
    heart.beat()
    heart.start()
    try:
        yield
    finally:
        heart.stop()


class _Keeper:
    """Keeps the run's folder: metrics, events, checkpoints, summary. Only rank 0 writes; all ranks make the same calls."""

    def __init__(self, config: JobConfig, world: World, attempt: Attempt, control: Control, listen: Listener | None) -> None:
        self.config, self.world, self.attempt, self.control = config, world, attempt, control
        self.listen = listen or (lambda kind, record: None)
        self.run = RunDir(attempt.start.root)
        self.saver: Saver | None = None
        self.last: StepResult | None = None
        self.evaluated: dict[str, Any] = {}
        self.trained: dict[str, Any] = {}

    # -- going on ---------------------------------------------------------------------------------------------------

    def resume(self) -> TrainState | None:
        """The state to go on from: of this run, or at first of where the user pointed. Every rank must call it."""
        first, asked = self.attempt.number == 0, self.attempt.start.resume
        if first and asked is None:
            return None
        folders = [self.run.checkpoints] if asked in (None, "auto") else [self.run.checkpoints, str(asked)]
        return self._agreed(*(folders[-1:] if first else folders))

    def _agreed(self, *folders: str) -> TrainState | None:
        """The newest good state of the first folder that has one, the same on every rank: rank 0 picks, the others load its pick."""
        picked: tuple[str, TrainState] | None = None
        problem: RaydistError | None = None
        if self.world.is_main:
            try:
                picked = next((found for folder in folders if (found := self._pick(folder)) is not None), None)
            except RaydistError as error:
                problem = error
        where, words = self.world.broadcast((None if picked is None else picked[0], None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        if words is not None:
            raise CheckpointError(words)
        if where is None:
            return None
        return picked[1] if picked is not None else load(where)[0]

    def newest(self) -> TrainState | None:
        """The newest good checkpoint of this run, after saves under way are done. Every rank must call it."""
        if self.saver is not None:
            self.saver.wait()
        return self._agreed(self.run.checkpoints)

    def _pick(self, folder: str) -> tuple[str, TrainState] | None:
        def warn(message: str) -> None:
            self.event("bad_checkpoint", reason=message)

        if folder.rstrip("/").rpartition("/")[2].startswith("step-"):
            return folder, load(folder)[0]
        found = load_latest(folder, warn)
        return None if found is None else (join(folder, folder_name(found[1]["step"])), found[0])

    def started(self, state: TrainState | None, total: int | None, sources: Sources) -> None:
        step = 0 if state is None else int(state.counters["step"])
        if not self.world.is_main:
            return
        known = self.run.read_metrics()
        lost = max(0, self._reached(known) - step)
        own = [line for line in known if line["step"] <= step]
        for line in own:
            self._remember(line)
        self.run.truncate_metrics(step)
        kind = "restart" if self.attempt.number else "start" if state is None else "resume"
        reason = f"from step {step}" if state is not None else "from scratch"
        if lost:
            reason += f"; {lost} steps are done again"
        self.event(
            kind,
            step=step,
            reason=reason,
            total_steps=total,
            world_size=self.world.world_size,
            lost_steps=lost,
            attempt=self.attempt.number,
        )
        for note in [*(self.attempt.start.notes if not self.attempt.number else []), *sources.notes]:
            self.event("note", reason=note)
        self.listen("started", {"step": step, "total": total})
        checkpoint = self.config.checkpoint
        self.saver = Saver(
            self.run.checkpoints,
            keep=checkpoint.keep,
            best=checkpoint.best,
            asynchronous=checkpoint.asynchronous,
            on_event=lambda kind, **fields: self.event(kind, **fields),
        )

    def _reached(self, known: list[dict[str, Any]]) -> int:
        """The last step that was trained before this start, as far as the metrics and the beats of rank 0 tell."""
        logged = int(known[-1]["step"]) if known else 0
        beat = self.attempt.reached
        return max(logged, beat)

    # -- while it runs ----------------------------------------------------------------------------------------------

    def take(self, result: StepResult) -> None:
        """Write what a result says. Every rank must call it with every result."""
        self.last = result
        if result.events:
            for rank, events in enumerate(self.world.gather(self.control.take())):
                if self.world.is_main:
                    for event in events:
                        self.event(event.pop("kind"), **{"rank": rank, **event})
        if result.log:
            self._remember(result.metrics)
            if self.world.is_main:
                self.run.append_metrics(result.metrics)
                self.listen("line", result.metrics)
        if result.checkpoint:
            state = result.state()
            if self.saver is not None:
                self.saver.save(state, result.step, self.evaluated_at(result))
        if result.status != "running" and self.saver is not None:
            self.saver.wait()
            if self.saver.failure is not None:
                raise CheckpointError(f"the last checkpoint, of step {result.step}, could not be saved: {self.saver.failure}")

    def evaluated_at(self, result: StepResult) -> dict[str, Any]:
        return {k: v for k, v in result.metrics.items() if isinstance(v, (int, float))}

    def _remember(self, line: dict[str, Any]) -> None:
        if line.get("train_loss") is not None:
            self.trained = {"train_loss": line["train_loss"]}
        if "eval_loss" in line:
            self.evaluated = {k: v for k, v in line.items() if k.startswith("eval_") and k != "eval_s"}

    def event(self, kind: str, **fields: Any) -> None:
        if self.world.is_main:
            self.run.append_event(kind, **fields)
            self.listen("event", {"kind": kind, **fields})

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        assert self.last is not None
        state = self.last.state()
        status = "interrupted" if self.last.status == "interrupted" else "finished"
        reason = self.control.stop if status == "interrupted" else "early stop" if self.last.status == "early_stop" else None
        summary = {
            "name": self.config.name,
            "status": status,
            "reason": reason,
            "steps": state.counters["step"],
            "applied": state.counters["applied"],
            "skipped": state.counters["skipped"],
            "rows_seen": state.counters["rows_seen"],
            "epochs": state.position["epoch"],
            "metrics": {**self.trained, **self.evaluated},
            "best": state.best,
            "workers": self.world.world_size,
            "restarts": self.attempt.restarts,
            "lost_steps": self._lost() if self.world.is_main else 0,
            "seconds": time.time() - self.attempt.start.began,
            "run": self.attempt.start.root,
        }
        if self.world.is_main:
            self.event("finish", step=summary["steps"], reason=status)
            self.run.write_summary(summary)
            self.run.flush()
        return summary

    def _lost(self) -> int:
        """Steps that were trained twice in this invocation, because a failure came before they were saved."""
        since = self.attempt.start.began
        starts = [e for e in self.run.read_events() if e["kind"] in ("start", "restart", "resume")]
        return sum(e["lost_steps"] for e in starts if datetime.fromisoformat(e["time"]).timestamp() >= since - 0.01)

    def close(self) -> None:
        if self.saver is not None:
            self.saver.close()
        if self.world.is_main:
            self.run.flush()


def failed(start: Start, config: JobConfig, error: BaseException, restarts: int) -> dict[str, Any]:
    """Write and return the summary of a run that did not end well."""
    run = RunDir(start.root)
    lines = run.read_metrics()
    last = lines[-1] if lines else {}
    summary = {
        "name": config.name,
        "status": "failed",
        "reason": str(error),
        "steps": last.get("step", 0),
        "applied": last.get("step", 0) - last.get("skipped", 0),
        "skipped": last.get("skipped", 0),
        "rows_seen": last.get("rows_seen", 0),
        "metrics": {k: v for k, v in last.items() if k == "train_loss" or (k.startswith("eval_") and k != "eval_s")},
        "workers": config.scaling.workers,
        "restarts": restarts,
        "seconds": time.time() - start.began,
        "run": start.root,
    }
    run.append_event("failed", reason=str(error))
    run.write_summary(summary)
    run.flush()
    return summary


def _collect_warnings(control: Control) -> None:
    """Show each warning once, as an event with its rank."""
    seen: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        text = f"{category.__name__}: {message}"
        if text not in seen:
            seen.add(text)
            control.event("warning", reason=text)

    warnings.showwarning = show
