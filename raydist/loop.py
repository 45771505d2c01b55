"""The training loop: one generator for every runner, with nothing of Ray in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raydist.control import Control, Status, StepResult
from raydist.data.source import EvalSource, Position, StepData, TrainSource
from raydist.errors import DataError, TrainError
from raydist.evaluation import evaluate
from raydist.faults import poisoned
from raydist.metrics import Clock
from raydist.milestones import due, is_best, stops_early
from raydist.monitor import columns, memory_of, row_of
from raydist.task import Task
from raydist.trainer import Outcome, Sample, Trainer
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import Interval, JobConfig
    from raydist.state import TrainState


def fit(
    config: JobConfig,
    task: Task,
    world: World,
    train: TrainSource,
    evaluation: EvalSource | None = None,
    state: TrainState | None = None,
    control: Control | None = None,
    data_state: dict[str, Any] | None = None,
) -> Iterator[StepResult]:
    """Train until `epochs`, `max_steps` or an early stop; yields a `StepResult` at each log, evaluation and checkpoint.

    Every rank must run it, with its own `World` and its own sources over the same data, and take every result. `state` is where
    to go on from; an interrupted run and its resume give the same steps as one that was not. Raises DataError when there are
    no rows, TrainError when a step fails.
    """
    if train.rows_per_epoch == 0 or train.steps_per_epoch == 0:
        raise DataError(_no_steps(config, train))
    trainer = Trainer(config, task, world, total_steps(config, train), sampler(config, task, world, train))
    control = control or Control()
    if words := trainer.spread.where():
        control.progress.hold(words)
    for kind, fields in trainer.spread.notes() if world.is_main else ():
        control.event(kind, **fields)
    position = Position() if state is None else trainer.load(state)
    loop = _Loop(config, world, trainer, train, evaluation, control, data_state or {})
    yield from loop.run(position)


def _no_steps(config: JobConfig, train: TrainSource) -> str:
    where = config.data.train.path or config.data.train.target
    if train.rows_per_epoch == 0 and not config.data.train.drop_last:
        return f"data.train: no rows at all in {where}"
    return (
        f"data.train: {where} has fewer rows than batch.global_size = {config.batch.global_size}, and drop_last "
        "leaves out the only batch; lower batch.global_size or set drop_last: false"
    )


def sampler(config: JobConfig, task: Task, world: World, train: TrainSource) -> Sample | None:
    """What a pipeline measures its layers on: the inputs of the first micro-batch. None for the other strategies."""
    if config.strategy.name != "pipeline":
        return None
    from raydist.pipeline.sample import inputs_of

    return partial(inputs_of, config, task, world, train)


def total_steps(config: JobConfig, train: TrainSource) -> int | None:
    """Optimizer steps of the whole run; None when the data cannot say how many make an epoch."""
    limits = []
    if config.train.max_steps is not None:
        limits.append(config.train.max_steps)
    if config.train.epochs is not None and train.steps_per_epoch is not None:
        limits.append(config.train.epochs * train.steps_per_epoch)
    return min(limits) if limits else None


class _Loop:
    def __init__(
        self,
        config: JobConfig,
        world: World,
        trainer: Trainer,
        train: TrainSource,
        evaluation: EvalSource | None,
        control: Control,
        data_state: dict[str, Any],
    ) -> None:
        self.config, self.world, self.trainer = config, world, trainer
        self.train, self.evaluation, self.control, self.data_state = train, evaluation, control, data_state
        self.clock = Clock()
        self.last_norm = 0.0
        self.saved_at = self.evaluated_at = self.logged_at = self.copied_at = time.monotonic()
        self.position = Position()
        self.first = 0
        control.closing = trainer.passes.closing
        trainer.passes.fault = control.fault if control.faults is not None else None
        if control.micro_size is not None:
            trainer.passes.micro_size = min(control.micro_size, trainer.passes.micro_size or control.micro_size)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self, position: Position) -> Iterator[StepResult]:
        self.position, self.first = position, self.trainer.counters.step
        if self._over(position):
            yield self._result({"step": self.trainer.counters.step, "epoch": position.epoch}, status="finished", log=False)
            return
        self.clock.reset()
        if (owed := self.trainer.extra.pop("owed", None)) is not None:
            paid = self._pay(**owed)
            yield paid
            if paid.status != "running":
                return
            self.clock.reset()
        for data in self._read(position):
            flags = self.world.agree(self._wishes())
            self.control.progress.enter("step" if self.clock.steps or self.trainer.counters.step > self.first else "first step")
            outcome = self._step(data)
            self._count(data, outcome)
            self.control.progress.enter("agreement")
            asked = time.perf_counter()
            wishes = flags.wait()
            self.clock.sync_wait += time.perf_counter() - asked
            self.position = _after(data)
            if outcome.bad:
                self._bad(data, outcome)
            result = self._boundary(data, wishes)
            if result is not None:
                self.control.progress.enter("checkpoint" if result.checkpoint else "output")
                if result.checkpoint:
                    self.control.fault("checkpoint", result.step)
                began = time.perf_counter()
                yield result
                self.clock.pause(time.perf_counter() - began)
                if result.log:
                    self.clock.reset()
                if result.status != "running":
                    return
        raise TrainError(
            f"the data ended after {self.trainer.counters.step} steps, before train.epochs or train.max_steps was reached: "
            "the files changed while they were read"
        )

    def _step(self, data: StepData) -> Outcome:
        profiler = self.control.profiler
        if profiler is not None:
            profiler.before(self.trainer.counters.step + 1)
        try:
            outcome = self.trainer.train_step(data)
            if profiler is not None:
                profiler.after(self.trainer.counters.step)
            return outcome
        except torch.OutOfMemoryError:
            self.control.micro_size = max(
                1, self.trainer.passes.size(data) // 2
            )  # for the next attempt: this one's collectives are out of step
            raise

    def _read(self, position: Position) -> Iterator[StepData]:
        """The steps' data, with the waiting marked for the watchdog and with faults, if any."""
        steps = iter(self.train.steps(position, self.config.train.epochs))
        while True:
            step = self.trainer.counters.step + 1
            self.control.progress.enter("data", step)
            self.control.fault("data", step)
            data = next(steps, None)
            if data is None:
                return
            if self.control.faults is not None and self.control.faults.poison:
                self.control.faults.poison = False
                data = replace(data, batch=poisoned(data.batch))
            yield data

    def _over(self, position: Position) -> bool:
        limit = self.config.train
        return (limit.max_steps is not None and self.trainer.counters.step >= limit.max_steps) or (
            limit.epochs is not None and position.epoch >= limit.epochs
        )

    def _count(self, data: StepData, outcome: Outcome) -> None:
        self.clock.steps += 1
        self.clock.rows += data.global_rows
        if self.control.failed_at is not None:
            seconds, self.control.failed_at = time.time() - self.control.failed_at, None
            if self.world.is_main:
                reason = f"the next step was done {seconds:.1f} s after the failure was noticed"
                self.control.event("recovered", step=self.trainer.counters.step, seconds=round(seconds, 2), reason=reason)
        self.clock.data_wait += data.wait_s
        self.clock.sample(self.trainer.spread.reduce_wait)
        self.last_norm = outcome.grad_norm
        for kind, reason in self.trainer.passes.notes:
            if self.world.is_main:
                self.control.event(kind, step=self.trainer.counters.step, reason=reason)
        self.trainer.passes.notes.clear()

    def _wishes(self) -> list[int]:
        """What this rank wants of the coming boundary: to stop, and (rank 0's clock) what is due by minutes."""
        now = time.monotonic()
        return [
            int(self.control.stop is not None),
            self._minutes(self.config.checkpoint.every, now - self.saved_at),
            self._minutes(self.config.train.eval_every, now - self.evaluated_at),
            self._minutes(self.config.train.log_every, now - self.logged_at),
            self._minutes(self.config.checkpoint.memory, now - self.copied_at),
            int(bool(self.control.events)),
        ]

    def _minutes(self, interval: Interval | None, elapsed: float) -> int:
        due = interval is not None and interval.minutes is not None and elapsed >= interval.minutes * 60
        return int(due and self.world.is_main)

    # -- boundaries -------------------------------------------------------------------------------------------------

    def _boundary(self, data: StepData, wishes: list[int]) -> StepResult | None:
        stop, save_now, eval_now, log_now, copy_now, events = wishes
        step = self.trainer.counters.step
        status: Status = "interrupted" if stop else "finished" if self._over(self.position) else "running"
        done = status == "finished"
        evaluating = self.evaluation is not None and (eval_now or done or due(self.config.train.eval_every, step, data))
        logging = bool(log_now or done or evaluating or due(self.config.train.log_every, step, data))
        self.trainer.extra.pop("owed", None)  # a rollback may have brought it back
        if evaluating and stop and not done:  # there may be no time for it: the run does it, and logs the step, when it goes on
            self.trainer.extra["owed"] = {"epoch": data.epoch, "grad_norm": self.last_norm}
            evaluating = logging = False
        saving = bool(save_now or done or stop or due(self.config.checkpoint.every, step, data))
        copying = self.control.copies and bool(copy_now or due(self.config.checkpoint.memory, step, data))
        if not (logging or saving or stop or events or copying):
            return None
        line = self._line(data.epoch, logging)
        if evaluating:
            line.update(self._evaluate(step))
            if stops_early(self.config.train.early_stop, line, self.trainer) and status == "running":
                status, saving = "early_stop", True
            saving = is_best(self.config.checkpoint.best, line, self.trainer) or saving
        if saving or copying:
            self.trainer.share_buffers()
        if saving:
            self.saved_at = time.monotonic()
            self.trainer.spread.check_in_sync(f"checkpoint at step {step}")
        if copying:
            self.copied_at = time.monotonic()
        return self._result(line, status, logging, bool(evaluating), saving, bool(events) or status != "running", copying)

    def _pay(self, epoch: int, grad_norm: float) -> StepResult:
        """The line and the evaluation that were due when the run was stopped, as if it had not. Every rank must call it."""
        self.last_norm = grad_norm
        line = self._line(epoch, logging=True)
        if self.evaluation is None:  # taken out of the job meanwhile
            return self._result(line, "running", log=True)
        line.update(self._evaluate(self.trainer.counters.step))
        status: Status = "early_stop" if stops_early(self.config.train.early_stop, line, self.trainer) else "running"
        saving = is_best(self.config.checkpoint.best, line, self.trainer) or status != "running"
        return self._result(line, status, log=True, evaluated=True, checkpoint=saving, events=status != "running")

    def _line(self, epoch: int, logging: bool) -> dict[str, Any]:
        trainer = self.trainer
        line: dict[str, Any] = {"step": trainer.counters.step, "epoch": epoch}
        if not logging:  # a boundary for a checkpoint or events only
            trainer.meter.reduce(self.world)  # gathered on rank 0, so that a checkpoint holds the loss since the last line
            return line
        self.logged_at = time.monotonic()
        if not self.clock.samples:
            self.clock.sample(trainer.spread.reduce_wait, always=True)
        times = self.clock.read()
        line["train_loss"], everyone = trainer.meter.reduce_with(self.world, row_of(times, self.world.device))
        trainer.meter.reset()
        line |= {"lr": trainer.schedule.lr, "grad_norm": self.last_norm}
        line |= {"skipped": trainer.counters.skipped, "rows_seen": trainer.counters.rows_seen, **times}
        if trainer.precision.scale is not None:
            line["loss_scale"] = trainer.precision.scale
        return line | memory_of(everyone, self.world) | {"ranks": columns(everyone)}

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluation is not None
        self.evaluated_at = time.monotonic()
        began = time.perf_counter()
        self.trainer.share_buffers()
        trainer = self.trainer
        self.control.progress.enter("evaluation")
        self.control.fault("evaluation", step)
        tick = partial(self.control.progress.enter, "evaluation")
        values = evaluate(trainer.task, trainer.evaluated, self.evaluation, self.world, trainer.precision, step, tick)
        trainer.schedule.observe(values)
        return {**values, "eval_s": time.perf_counter() - began}

    def _bad(self, data: StepData, outcome: Outcome) -> None:
        """What `failure.bad_step` says about a step whose loss or gradient is not finite. Every rank must call it."""
        step, failure = self.trainer.counters.step, self.config.failure
        rank, words = self._culprit(data, outcome)
        message = f"step {step}, {words}"
        if failure.bad_step == "raise":
            raise TrainError(f"{message}. Mend these rows, lower optimizer.lr, or set failure.bad_step: skip or rollback")
        if self.trainer.counters.bad_in_a_row > failure.max_bad_steps:
            raise TrainError(
                f"{message}; it is bad step {self.trainer.counters.bad_in_a_row} in a row, "
                f"and failure.max_bad_steps is {failure.max_bad_steps}"
            )
        done = "skipped on all ranks"
        if failure.bad_step == "rollback" and self.control.reload is not None:
            state = self.control.reload()
            undone = 0 if state is None else self.trainer.roll_back(state)
            done = f"rolled back {undone} applied steps" if state is not None else "skipped (no checkpoint to roll back to yet)"
        if self.world.is_main:
            self.control.event("bad_step", step=step, rank=rank, reason=f"{message}; {done}")

    def _culprit(self, data: StepData, outcome: Outcome) -> tuple[int | None, str]:
        """The first rank with something that is not finite of its own, and words for it. Every rank must call it."""
        found = self.trainer.diagnose(data)
        mine = None
        if found is not None:
            what, start, stop = found
            mine = f"{what} in {self.train.name_rows(data.epoch, data.index, start, stop)}"
        for rank, words in enumerate(self.world.gather(mine)):
            if words is not None:
                return rank, f"rank {rank}: {words} (global batch {data.index} of epoch {data.epoch})"
        norm = f"the gradient norm is {outcome.grad_norm}"
        return (
            None,
            f"{norm} in global batch {data.index} of epoch {data.epoch}, though every rank's own gradient is finite: "
            "it overflowed in the sum",
        )

    def _result(
        self,
        line: dict[str, Any],
        status: Status,
        log: bool = False,
        evaluated: bool = False,
        checkpoint: bool = False,
        events: bool = False,
        copy: bool = False,
    ) -> StepResult:
        position = self.position
        return StepResult(
            step=line["step"],
            metrics=line,
            state=lambda: self.trainer.state(position, self.data_state),
            totals=lambda: {**asdict(self.trainer.counters), "epoch": position.epoch, "best": self.trainer.best},
            log=log,
            evaluated=evaluated,
            checkpoint=checkpoint,
            status=status,
            events=events,
            copy=copy,
        )


def _after(data: StepData) -> Position:
    return Position(data.epoch + 1, 0) if data.last_in_epoch else Position(data.epoch, data.index + 1)
