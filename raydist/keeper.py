"""Keeps a run's folder while it trains: where to go on from, metrics, events, checkpoints, the summary.

Rank 0 writes; all ranks make the same calls, because some of them agree on things.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from raydist import faults, storage
from raydist.checkpoint import load, load_latest
from raydist.control import Control, StepResult
from raydist.data.job import Sources
from raydist.errors import CheckpointError, RaydistError
from raydist.loggers import Loggers, open_loggers
from raydist.manifest import folder_name
from raydist.monitor import Monitor, place_of, places_in_words
from raydist.rundir import RunDir
from raydist.saver import Saver
from raydist.start import Start
from raydist.state import TrainState
from raydist.storage import join
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig


class Copies(Protocol):
    """Copies of the state outside of storage, newest first to be used after a failure."""

    def put(self, step: int, state: TrainState) -> None:
        """Keep `state`; it may change when this returns."""

    def newest(self, above: int) -> tuple[int, TrainState] | None:
        """Step and state of the newest copy, if it is of a step above `above`."""


Listener = Callable[[str, dict[str, Any]], None]
"""Called on rank 0 with ("line" | "event" | "started", record)."""


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
    failed_at: float | None = None
    """When (s since 1970) the driver noticed the failure that this attempt follows; None where it follows none."""
    copies: Copies | None = None
    """Where copies of the state in memory are, when the runner keeps any."""

    @property
    def key(self) -> str:
        """Names this attempt among all of the run's folder."""
        return f"{self.start.began:.3f}-{self.number}"


class Keeper:
    """Keeps the run's folder: metrics, events, checkpoints, summary. Only rank 0 writes; all ranks make the same calls."""

    def __init__(self, config: JobConfig, world: World, attempt: Attempt, control: Control, listen: Listener | None) -> None:
        self.config, self.world, self.attempt, self.control = config, world, attempt, control
        self.listen = listen or (lambda kind, record: None)
        self.run = RunDir(attempt.start.root)
        self.saver: Saver | None = None
        self.last: StepResult | None = None
        self.monitor = Monitor()
        self.loggers = Loggers([], print)
        self.evaluated: dict[str, Any] = {}
        self.trained: dict[str, Any] = {}
        self._from_memory = False

    # -- going on ---------------------------------------------------------------------------------------------------

    def resume(self) -> TrainState | None:
        """The state to go on from: of this run, or at first of where the user pointed. Every rank must call it."""
        first, asked = self.attempt.number == 0, self.attempt.start.resume
        if first and asked is None:
            return None
        folders = [self.run.checkpoints] if asked in (None, "auto") else [self.run.checkpoints, str(asked)]
        state = self._agreed(*(folders[-1:] if first else folders))
        return state if first or self.attempt.copies is None else self._fresher(self.attempt.copies, state)

    def _fresher(self, copies: Copies, state: TrainState | None) -> TrainState | None:
        """A copy in memory where that is newer than the checkpoint: rank 0 picks. Every rank must call it."""
        step = -1 if state is None else int(state.counters["step"])
        found = copies.newest(step) if self.world.is_main else None
        picked = self.world.broadcast(None if found is None else found[0])
        if picked is None:
            return state
        if found is None:
            found = copies.newest(picked - 1)
        if found is None or found[0] != picked:  # the next attempt looks again
            raise RuntimeError(f"the copy of step {picked} in memory was lost while it was read")
        self._from_memory = True
        return found[1]

    def _agreed(self, *folders: str) -> TrainState | None:
        """The newest good state of the first folder that has one: rank 0 picks, the others load its pick."""
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
        places = self.world.gather(place_of(self.world))
        if not self.world.is_main:
            return
        known = self.run.read_metrics()
        lost = max(0, self._reached(known) - step)
        logged = step - 1 if state is not None and "owed" in state.extra else step  # an owed evaluation writes its step's line
        own = [line for line in known if line["step"] <= logged]
        for line in own:
            self._remember(line)
            self.monitor.add(line)
        self.monitor.begin(step)
        self.run.truncate_metrics(logged)
        kind = "restart" if self.attempt.number else "start" if state is None else "resume"
        reason = f"from step {step}" if state is not None else "from scratch"
        if self._from_memory:
            reason += ", which a copy in memory held"
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
        self.event("monitor", reason=places_in_words(places), backend=self.world.backend, ranks=places)
        self.loggers = open_loggers(self.config, self.run.root, step, lambda reason: self.event("warning", reason=reason))
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
                self.loggers.line(result.metrics)
                if (slow := self.monitor.add(result.metrics)) is not None:
                    self.event("slow_rank", step=result.step, **slow)
        if result.checkpoint or result.copy:
            state = result.state()
            if result.checkpoint and self.saver is not None:
                self.saver.save(state, result.step, self.evaluated_at(result))
            if result.copy and self.attempt.copies is not None and self.world.is_main:
                self.attempt.copies.put(result.step, state)
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
        totals = self.last.totals()
        told = self.control.closing() if self.control.closing is not None else {}
        if self.world.is_main and "trace" in told:
            from raydist.pipeline.timeline import TRACE

            storage.write_bytes(join(self.run.root, TRACE), json.dumps(told["trace"]).encode())
        status = "interrupted" if self.last.status == "interrupted" else "finished"
        reason = self.control.stop if status == "interrupted" else "early stop" if self.last.status == "early_stop" else None
        summary = {
            "name": self.config.name,
            "status": status,
            "reason": reason,
            "steps": totals["step"],
            "applied": totals["applied"],
            "skipped": totals["skipped"],
            "rows_seen": totals["rows_seen"],
            "epochs": totals["epoch"],
            "metrics": {**self.trained, **self.evaluated},
            "best": totals["best"],
            "workers": self.world.world_size,
            "restarts": self.attempt.restarts,
            "lost_steps": self._lost() if self.world.is_main else 0,
            "seconds": time.time() - self.attempt.start.began,
            **self.monitor.summary(),
            **told.get("summary", {}),
            "run": self.attempt.start.root,
        }
        self.loggers.close(status)
        if self.world.is_main:
            self.run.write_summary(summary)
            self.event("finish", step=summary["steps"], reason=status)  # the last thing: whoever reads it may end the workers
            self.run.flush()
        return summary

    def _lost(self) -> int:
        """Steps that were trained twice in this invocation, because a failure came before they were saved."""
        since = self.attempt.start.began
        starts = [e for e in self.run.read_events() if e["kind"] in ("start", "restart", "resume")]
        return sum(e["lost_steps"] for e in starts if datetime.fromisoformat(e["time"]).timestamp() >= since - 0.01)

    def close(self) -> None:
        self.loggers.close("failed")  # nothing is left to close when the run has ended well
        if self.saver is not None:
            self.saver.close()
        if self.world.is_main:
            self.run.flush()
