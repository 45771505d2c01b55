"""One worker's training state, and what one optimizer step does to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raydist.config import to_plain
from raydist.data.source import Position, StepData
from raydist.errors import ConfigError
from raydist.optim import Schedule, build_optimizer
from raydist.passes import Passes
from raydist.precision import Precision
from raydist.randomness import seed_all
from raydist.state import TrainState
from raydist.strategy import Spread, spread
from raydist.task import Task
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig

Sample = Callable[[nn.Module], tuple[torch.Tensor, ...]]
"""Gives the model's inputs of one micro-batch, for a strategy that measures the model."""

_RATES = ("params", "lr", "initial_lr")
"""What an optimizer's group keeps from a checkpoint; everything else is a setting of the job file."""


@dataclass(frozen=True)
class Outcome:
    """What one step did. `grad_norm` is the global norm before clipping; inf or nan when the step was not applied."""

    applied: bool
    grad_norm: float
    bad: str | None = None


@dataclass
class Counters:
    """Totals of the run so far. `step` counts applied and skipped steps."""

    step: int = 0
    applied: int = 0
    skipped: int = 0
    rows_seen: int = 0
    bad_in_a_row: int = 0


class Trainer:
    """Model, optimizer, schedule, scaler and EMA of one worker. Every rank builds one and steps it in lockstep."""

    def __init__(
        self, config: JobConfig, task: Task, world: World, total_steps: int | None, sample: Sample | None = None
    ) -> None:
        self.config, self.task, self.world = config, task, world
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        seed_all(config.seed, "model")
        self.precision = Precision(config.precision, world.device)
        self.spread: Spread = spread(config.strategy, build_model(task), world, self.precision, sample)
        self.optimizer = build_optimizer(config.optimizer, self.spread.parameters())
        self.schedule = Schedule(config.schedule, self.optimizer, total_steps)
        self.ema: AveragedModel | None = None
        if config.train.ema is not None:
            self.ema = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(config.train.ema.decay))
        if config.train.compile:
            compile_model(config, self.module)
        self.counters = Counters()
        self.passes: Passes = passes(config, task, world, self.spread, self.precision)
        self.meter = self.passes.meter
        self.best: dict[str, Any] | None = None
        self.extra: dict[str, Any] = {}

    @property
    def module(self) -> nn.Module:
        """The model without DDP around it."""
        return self.spread.module

    @property
    def evaluated(self) -> nn.Module:
        """The model that evaluation and export use: the EMA of the weights when there is one."""
        return self.spread.scored(self.ema.module if self.ema is not None else self.module, self.precision)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, before an evaluation or a checkpoint. Every rank must call it."""
        modules = [self.module] if self.ema is None else [self.module, self.ema.module]
        self.spread.share([b for module in modules for b in module.buffers() if b.numel()])

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self, data: StepData) -> Outcome:
        """Forward and backward over this rank's micro-batches, one reduced gradient, one clip, one optimizer step.

        Every rank must call it with its share of the same global batch. All ranks return the same `Outcome`.
        """
        before = (self.meter.total, self.meter.weight)
        finite = self.passes.run(data, self.counters.step)
        return self._apply(data, finite, before)

    def _apply(self, data: StepData, finite: torch.Tensor, before: tuple[torch.Tensor | None, float]) -> Outcome:
        norm = self.precision.gradient_norm(self.optimizer, self.config.clip_grad_norm, self.spread.norm)
        applied = math.isfinite(norm)
        bad = None if applied else self._verdict(finite)
        self.precision.step(self.optimizer, apply=applied)
        self.optimizer.zero_grad(set_to_none=True)
        self.counters.step += 1
        self.counters.rows_seen += data.global_rows
        if applied:
            self.counters.applied += 1
            self.schedule.step()
            if self.ema is not None:
                self.ema.update_parameters(self.module)
        else:
            self.counters.skipped += 1
            self.meter.drop(*before)
        self.counters.bad_in_a_row = self.counters.bad_in_a_row + 1 if bad else 0
        return Outcome(applied, norm, bad)

    def _verdict(self, finite: torch.Tensor) -> str | None:
        """Why the gradient is not finite, agreed by all ranks: None when the fp16 scaler merely overshot."""
        lost = self.world.sum([0.0 if bool(finite) else 1.0])[0]
        if lost:
            return "loss"
        scale = self.precision.scale
        return None if scale is not None and scale > 1.0 else "gradient"

    def diagnose(self, data: StepData) -> tuple[str, int, int] | None:
        """What was not finite on this rank in the step just skipped: see `Passes.diagnose`."""
        return self.passes.diagnose(data, self.counters.step - 1)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self, position: Position, data: dict[str, Any]) -> TrainState:
        """All that resuming needs; tensors are references, so copy before the next step. Every rank must call it."""
        state = TrainState(
            model=dict(self.module.state_dict()),
            optimizer=self.optimizer.state_dict(),
            schedule=self.schedule.state_dict(),
            scaler=self.precision.state_dict(),
            ema=None if self.ema is None else dict(self.ema.module.state_dict()),
            position=asdict(position),
            counters={**asdict(self.counters), "loss_total": float(self.meter.total or 0.0), "loss_weight": self.meter.weight},
            best=self.best,
            rng={"seed": self.config.seed, "scheme": "per step, rank and row"},
            data=data,
            config=to_plain(self.config),
            buffers=[name for name, _ in self.module.named_buffers()],
            extra={
                **self.extra,
                "ema_updates": 0 if self.ema is None else int(self.ema.n_averaged),
                "micro_size": self.passes.micro_size,
            },
        )
        return self.spread.whole(state)

    def roll_back(self, state: TrainState) -> int:
        """Take weights, optimizer, schedule, scaler and EMA of `state`; steps and rows go on. Returns the steps undone."""
        now = self.counters
        self.load(state)
        undone = now.applied - self.counters.applied
        self.counters = Counters(
            now.step, self.counters.applied, now.step - self.counters.applied, now.rows_seen, now.bad_in_a_row
        )
        return undone

    def load(self, state: TrainState) -> Position:
        """Become what `state` says, and return where the data goes on. Raises CheckpointError when the model is another one."""
        state = self.spread.own(state)
        self.module.load_state_dict(state.model)
        options = [{k: v for k, v in group.items() if k not in _RATES} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state.optimizer)
        if self.config.schedule.target is None:  # a schedule of the user's own may move more than the rate
            for group, now in zip(self.optimizer.param_groups, options, strict=True):
                group.update(now)  # what the job file says now, not what it said then
        self.schedule.load_state_dict(state.schedule)
        self.precision.load_state_dict(state.scaler)
        if self.ema is not None:
            self.ema.module.load_state_dict(state.ema if state.ema is not None else state.model)
            self.ema.n_averaged.fill_(state.extra.get("ema_updates", 0))
        counters = dict(state.counters)
        if self.world.is_main and counters.get("loss_weight"):
            self.meter.total = torch.tensor(counters["loss_total"], dtype=torch.float64, device=self.world.device)
            self.meter.weight = counters["loss_weight"]
        self.counters = Counters(**{k: int(counters[k]) for k in asdict(Counters())})
        self.best = state.best
        self.extra = {k: v for k, v in state.extra.items() if k not in ("ema_updates", "micro_size")}
        if self.config.batch.micro_size == "auto":
            self.passes.micro_size = state.extra.get("micro_size")
        return Position(**state.position)


def build_model(task: Task) -> nn.Module:
    """The task's model; ConfigError when it is none."""
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"task: build_model() gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def passes(config: JobConfig, task: Task, world: World, spread: Spread, precision: Precision) -> Passes:
    """What turns a batch into gradients under this strategy."""
    if config.strategy.name == "fsdp" and world.world_size > 1:
        from raydist.fsdp import FsdpPasses, FsdpSpread

        assert isinstance(spread, FsdpSpread)
        return FsdpPasses(config, task, world, spread, precision)
    if config.strategy.name != "pipeline" or config.strategy.stages == 1:
        return Passes(config, task, world, spread, precision)
    from raydist.pipeline.passes import PipelinePasses
    from raydist.pipeline.spread import PipelineSpread

    assert isinstance(spread, PipelineSpread)
    return PipelinePasses(config, task, world, spread, precision)


def compile_model(config: JobConfig, model: nn.Module) -> None:
    """`torch.compile` in place, so that parameter names stay."""
    options = config.train.compile
    settings: dict[str, Any] = (
        {} if isinstance(options, bool) else {k: v for k, v in options.model_dump().items() if v is not None}
    )
    model.compile(**settings)
