"""A slot: Ray Tune's trainable, with a gang of warm workers that runs trial after trial.

Ray Tune keeps the actor (`reuse_actors`) and gives it the next trial by `reset_config`. The slot itself takes no CPU: its
workers fill the bundles of the trial's placement group, so Ray Tune starts no trial whose workers do not fit.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.tune import Trainable

from raydist import storage
from raydist.errors import RaydistError, TrainError
from raydist.keeper import Attempt
from raydist.rundir import RunDir
from raydist.runners.failures import Failure, failure_of
from raydist.runners.gang import rank_variables, seats
from raydist.start import prepare, run_root
from raydist.sweep.space import Settings, name_of, trial_job
from raydist.sweep.worker import END, GO, SAVE, Ending, SweepWorker, row_of_summary

if TYPE_CHECKING:
    from raydist.config import JobConfig

NUMBER = "trial"
"""Key of a checkpoint that says whose it is."""
STATES = ".states"
"""Folder of the sweep with the states that PBT copies."""
_GRACE_S = 3.0
"""How long ranks may take to end after one has failed, before they count as stuck."""
_GROWTH_MB = 512.0
"""A slot whose workers hold this much more after a trial than after their first one is started anew."""
_THREADS = 4


class GangFailed(Exception):
    """Some ranks failed; `worker_failures` as in Ray Train's error."""

    def __init__(self, worker_failures: dict[int, BaseException]) -> None:
        super().__init__(f"ranks {', '.join(map(str, worker_failures))} failed")
        self.worker_failures = worker_failures


@dataclass(frozen=True)
class Shared:
    """What all slots of a sweep know: the job, where trials are kept, the workers of one and what each takes."""

    config: JobConfig
    root: str
    workers: int
    need: dict[str, float]
    shown: dict[str, str]
    secrets: dict[str, str]

    def job(self, number: int, settings: Settings) -> JobConfig:
        """The whole job of a trial."""
        return trial_job(self.config, self.root, number, settings)


class Slot(Trainable):
    """See the module. A step is what happens between two reports of a trial."""

    def setup(self, config: dict[str, Any], shared: Shared) -> None:  # type: ignore[override]
        """Take the first trial; workers start with its first step."""
        self.shared = shared
        self.gang: Gang | None = None
        self._take(config)

    def _take(self, config: dict[str, Any]) -> None:
        self.number = int(self.trial_id)  # not in the settings, which PBT copies from trial to trial
        self.job = self.shared.job(self.number, dict(config))
        self.attempt: Attempt | None = None
        self.last: dict[str, Any] = {}
        self.source: dict[str, Any] | None = None
        self.restarts = 0
        self.micro_size: int | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial, with the same workers if they are fit for it."""
        self._leave()
        if self.gang is not None and self.gang.grown():
            self._close()
        self._take(new_config)
        return True

    def cleanup(self) -> None:
        """End the workers."""
        self._close()

    # -- Ray Tune's checkpoints: where the state is, not the state ----------------------------------------------------

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Save the running trial's state beside the trials, and say where."""
        store = storage.join(self.shared.root, STATES, name_of(self.number))
        row = None if self.gang is None else self.gang.save(store)
        return {"store": store, "step": None if row is None else row["saved"], NUMBER: self.number}

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """The next step goes on from there: from this trial's own state, or (PBT) from a copy of another one's."""
        assert isinstance(checkpoint, dict)
        self.source = checkpoint if checkpoint["step"] is not None else None

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        """To the trial's next report, or to its end."""
        if self.attempt is None:
            done = self._start()
            if done is not None:
                return done
        else:
            assert self.gang is not None
            self.gang.answer(GO)
        while True:
            assert self.gang is not None and self.attempt is not None
            try:
                row = self.gang.next()
            except GangFailed as error:
                failure = failure_of(error, self.attempt, self.launched, self.job)
                if not self.gang.sound:
                    self._close()
                words = self._decide(failure)
                if words is not None:
                    return self._row(self.last, done=True, failed=words)
                self._launch()
                continue
            self.last = row
            value = row[self._metric]
            if not math.isfinite(value):
                self._leave()
                return self._row(row, done=True, failed=f"{self._metric} is {value} at step {row['steps']}")
            return self._row(row, done=self.gang.ended)

    @property
    def _metric(self) -> str:
        assert self.shared.config.sweep is not None
        return self.shared.config.sweep.metric

    def _start(self) -> dict[str, Any] | None:
        """Begin the trial, or go on with it; the row of one that is finished already."""
        self.last = {self._metric: math.nan, "steps": 0, "epochs": 0, "rows": 0}
        self.began = time.monotonic()
        self._open()
        assert self.gang is not None
        root = run_root(self.job)
        try:
            if self.source is not None:
                self.gang.exploit(self.source["store"], self.source["step"], root, self.job.optimizer.lr)
            start = prepare(self.job, "auto" if self.source is not None else None)
        except RaydistError as error:
            return self._row(self.last, done=True, failed=str(error))
        if self.source is not None and self.source[NUMBER] != self.number:
            words = f"trial {name_of(self.source[NUMBER])} at step {self.source['step']} copied, lr {self.job.optimizer.lr:g}"
            RunDir(root).append_event("exploit", step=self.source["step"], reason=words)
        self.attempt = Attempt(start)
        if start.finished is not None:
            return self._row(row_of_summary(start.finished, self._metric), done=True)
        self._launch()
        return None

    def _launch(self) -> None:
        assert self.attempt is not None
        self.attempt = Attempt(self.attempt.start, self.restarts, self.micro_size, self.restarts)
        self._open()
        self.launched = time.time()
        assert self.gang is not None
        self.gang.train(self.job, self.attempt, self._metric)

    def _decide(self, failure: Failure) -> str | None:
        """Why the trial has failed; None to start it again from its last checkpoint."""
        if failure.retry and self.restarts < self.job.failure.max_restarts:
            self.restarts += 1
            self.micro_size = failure.micro_size or self.micro_size
            assert self.attempt is not None
            reason = f"{failure.error}; restart {self.restarts} of {self.job.failure.max_restarts}"
            RunDir(self.attempt.start.root).append_event("failure", rank=failure.rank, reason=reason)
            return None
        from raydist.work import failed

        assert self.attempt is not None
        failed(self.attempt.start, self.job, failure.error, self.restarts)
        return str(failure.error)

    def _row(self, row: dict[str, Any], done: bool, failed: str = "") -> dict[str, Any]:
        known = {"seconds": time.monotonic() - self.began, "global_batch": self.job.batch.global_size}
        known |= {"lr": self.job.optimizer.lr, "seed": self.job.seed}
        if failed:
            row = {**row, self._metric: math.nan}
        return {**row, **known, "done": done, "ended": done, "failed": failed}  # Ray Tune sets `done` when it stops a trial

    # -- the gang -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.gang is None:
            self.gang = Gang(self.shared)

    def _leave(self) -> None:
        """End the trial that still waits for a word."""
        if self.gang is not None and not self.gang.leave():
            self._close()

    def _close(self) -> None:
        if self.gang is not None:
            self.gang.close()
            self.gang = None


class Gang:
    """The ranks of a slot. `ended`: no trial runs; `sound`: all ranks are idle and in step, so that another trial can run."""

    def __init__(self, shared: Shared) -> None:
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.ended = self.sound = True
        self.key = ""
        self._first: list[float] | None = None
        self._memory: list[float] = []
        self._runs: dict[Any, int] = {}
        group: Any = get_current_placement_group()
        actor: Any = ray.remote(SweepWorker)
        self.actors = [
            actor.options(
                num_cpus=shared.need.get("CPU", 0.0),
                num_gpus=shared.need.get("GPU", 0.0),
                max_concurrency=_THREADS,
                runtime_env={"env_vars": shared.shown} if shared.shown else {},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(shared.workers)
        ]
        try:
            self._join(shared)
        except BaseException:
            self.close()
            raise

    def _join(self, shared: Shared) -> None:
        places = ray.get([actor.place.remote() for actor in self.actors])
        order = seats(places, None)
        self.actors = [self.actors[index] for index, _ in order]
        port = ray.get(self.actors[0].free_port.remote())
        joins = []
        for actor, (_, seat) in zip(self.actors, order, strict=True):
            env = rank_variables(seat, shared.workers, (order[0][1].place.ip, port))
            if seat.devices:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
            joins.append(actor.join.remote(shared.config, env, shared.secrets))
        ray.get(joins)

    def train(self, job: JobConfig, attempt: Attempt, metric: str) -> None:
        """Start a trial on all ranks."""
        self.key, self.ended, self.sound = attempt.key, False, False
        self._runs = {actor.train.remote(job, attempt, metric): rank for rank, actor in enumerate(self.actors)}
        self._endings: dict[int, Ending] = {}
        self._report = self.actors[0].report.remote(attempt.key)

    def next(self) -> dict[str, Any]:
        """The next report's row, or the last one at the trial's end (`ended`). Raises GangFailed."""
        while self._runs:
            waiting = [*self._runs, *([] if self._report is None else [self._report])]
            ready, _ = ray.wait(waiting, num_returns=1)
            if ready[0] == self._report:
                self._report = None
                try:
                    row: dict[str, Any] | None = ray.get(ready[0])
                except ray.exceptions.RayError:
                    continue  # its `train` tells more
                if row is not None:
                    return row
            else:
                dead = self._ended(ready[0])
                if dead or any(ending.kind == "failed" for ending in self._endings.values()):
                    raise GangFailed(self._failures(dead))
        self._settle()
        return self._endings[0].row

    def _ended(self, reference: Any) -> dict[int, BaseException] | None:
        """Note a rank's ending; what Ray says of a rank that died."""
        rank = self._runs.pop(reference)
        try:
            self._endings[rank] = ray.get(reference)
        except ray.exceptions.RayError as error:
            return {rank: error}
        return None

    def _failures(self, dead: dict[int, BaseException] | None) -> dict[int, BaseException]:
        """All ranks that failed, after a moment for those that are about to; whether the rest can go on together."""
        failed = dict(dead or {})
        if self._runs:
            ready, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_GRACE_S)
            for reference in ready:
                failed |= self._ended(reference) or {}
        together = len(self._endings) == len(self.actors)
        words = {ending.words for ending in self._endings.values()}
        own = all(ending.kind == "failed" and ending.error for ending in self._endings.values())
        self._settle(sound=together and own and len(words) == 1)  # one error on all ranks was raised in step
        return failed | {rank: TrainError(ending.words) for rank, ending in self._endings.items() if ending.kind == "failed"}

    def _settle(self, sound: bool = True) -> None:
        self.ended, self.sound, self._report = True, sound, None
        self._memory = [ending.memory_mb for _, ending in sorted(self._endings.items())]
        self._first = self._first or self._memory

    def answer(self, word: str) -> None:
        """The word that the trial waits for."""
        self.actors[0].answer.remote(word)
        self._report = self.actors[0].report.remote(self.key)

    def save(self, store: str) -> dict[str, Any] | None:
        """Save the state of the trial that waits for a word; its row. None when none does."""
        if self.ended:
            return None
        self.answer(SAVE + store)
        row: dict[str, Any] | None = ray.get(self._report)
        self._report = None
        return row

    def leave(self) -> bool:
        """End the trial that waits for a word, if one does; whether another trial can run."""
        if not self.ended:
            self.actors[0].answer.remote(END)
            ready, late = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=10 * _GRACE_S)
            if late or any(self._ended(reference) for reference in ready):
                return False
            self._settle(sound=all(ending.kind == "over" for ending in self._endings.values()))
        return self.sound

    def exploit(self, store: str, step: int, root: str, lr: float) -> None:
        """See `SweepWorker.exploit`."""
        ray.get(self.actors[0].exploit.remote(store, step, root, lr))

    def grown(self) -> bool:
        """Whether some worker holds much more than after its first trial."""
        return has_grown(self._first or [], self._memory)

    def close(self) -> None:
        """End the ranks."""
        for actor in self.actors:
            with suppress(Exception):
                ray.kill(actor)
        self.actors = []


def has_grown(first: list[float], now: list[float], limit: float = _GROWTH_MB) -> bool:
    """Whether some rank holds `limit` MiB more than after its first trial."""
    return any(after - before > limit for before, after in zip(first, now, strict=False))
