"""One worker's training state, and what one optimizer step does to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raydist.batching import MicroBatch, loss_scale, micro_batches, padded_share, share
from raydist.config import to_plain
from raydist.data.source import Position, StepData
from raydist.errors import ConfigError, RaydistError, TrainError
from raydist.metrics import LossMeter
from raydist.optim import Schedule, build_optimizer
from raydist.precision import Precision
from raydist.randomness import seed_all
from raydist.state import TrainState, check_model_matches
from raydist.strategy import Spread, check_used, spread
from raydist.task import Task, checked_loss, slice_rows, to_device
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.faults import Place

_TRIAL_STEPS = 3
"""Steps in which a new micro-batch size of `auto` is on trial."""


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

    def __init__(self, config: JobConfig, task: Task, world: World, total_steps: int | None) -> None:
        self.config, self.task, self.world = config, task, world
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        seed_all(config.seed, "model")
        self.spread: Spread = spread(config.strategy, build_model(task), world)
        self.precision = Precision(config.precision, world.device)
        self.optimizer = build_optimizer(config.optimizer, self.module.parameters())
        self.schedule = Schedule(config.schedule, self.optimizer, total_steps)
        self.ema: AveragedModel | None = None
        if config.train.ema is not None:
            self.ema = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(config.train.ema.decay))
        if config.train.compile:
            compile_model(config, self.module)
        self.counters = Counters()
        self.meter = LossMeter()
        self.micro_size = config.batch.micro_size if isinstance(config.batch.micro_size, int) else None
        self.best: dict[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        self.notes: list[tuple[str, str]] = []
        """(kind, reason) of what happened in a step on all ranks alike; the loop makes events of them."""
        self.fault: Place | None = None
        self._weigh = getattr(task, "weight", None)
        self._weights: list[float] = []
        self._checked = False
        self._fits = 0

    @property
    def module(self) -> nn.Module:
        """The model without DDP around it."""
        return self.spread.module

    @property
    def evaluated(self) -> nn.Module:
        """The model that evaluation and export use: the EMA of the weights when there is one."""
        return self.ema.module if self.ema is not None else self.module

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, before an evaluation or a checkpoint. Every rank must call it."""
        modules = [self.module] if self.ema is None else [self.module, self.ema.module]
        self.world.broadcast_tensors([b for module in modules for b in module.buffers() if b.numel()])

    # -- one step ------------------------------------------------------------------------------------------------

    def cut(self, data: StepData) -> list[MicroBatch]:
        """This rank's micro-batches of a global batch, at the current micro-batch size."""
        size = self.micro_size or padded_share(data.global_rows, self.world.world_size)
        return micro_batches(data.global_rows, self.world.rank, self.world.world_size, size)

    def train_step(self, data: StepData) -> Outcome:
        """Forward and backward over this rank's micro-batches, one reduced gradient, one clip, one optimizer step.

        Every rank must call it with its share of the same global batch. All ranks return the same `Outcome`.
        """
        self.module.train()
        self._check_first(slice_rows(data.batch, 0, 2))
        before = (self.meter.total, self.meter.weight)
        while True:
            finite = self._careful_pass(data) if self._may_not_fit() else self._local_pass(data, self.spread.no_sync)
            if finite is not None:
                self._fits += 1
                return self._apply(data, finite, before)
            self._halve(data, before)

    def _prepare(self, data: StepData) -> list[tuple[Any, float]]:
        """Micro-batches with the factor on their mean loss; the generators seeded for this step and rank."""
        seed_all(self.config.seed, "step", self.counters.step, self.world.rank)
        pieces = self.cut(data)
        batches = [slice_rows(data.batch, piece.start, piece.stop) for piece in pieces]
        weights, global_weight = self.weigh(data, pieces, batches)
        self._weights = weights
        return [(batch, loss_scale(w, global_weight, self.world.world_size)) for batch, w in zip(batches, weights, strict=True)]

    def _local_pass(self, data: StepData, no_sync: Callable[[bool], AbstractContextManager[Any]]) -> torch.Tensor:
        """Forward and backward over all micro-batches; a scalar bool on the device: were all losses finite."""
        batches = self._prepare(data)
        if self.fault is not None:
            self.fault("step", self.counters.step + 1)
        finite = torch.ones((), dtype=torch.bool, device=self.world.device)
        for number, (batch, scale) in enumerate(batches):
            last = number == len(batches) - 1
            with no_sync(last):
                loss = self.loss(self.spread.forward, to_device(batch, self.world.device))
                finite = finite & torch.isfinite(loss.detach()).to(finite.device)
                self.meter.add(loss, self._weights[number])
                scaled = loss.float() * scale
                if (
                    last
                ):  # a loss that is not finite makes the reduced gradient NaN, so every rank sees it without another message
                    scaled = scaled * torch.where(finite, 1.0, float("nan")).to(scaled.device)
                self.precision.backward(scaled)
        return finite

    # -- out of memory -----------------------------------------------------------------------------------------------

    def _may_not_fit(self) -> bool:
        """Whether this micro-batch size is still on trial: then nothing is reduced before all ranks know that it fitted."""
        on_trial = self._fits < _TRIAL_STEPS and self.config.batch.micro_size == "auto"
        return on_trial and (self.world.device.type == "cuda" or self.fault is not None)

    def _careful_pass(self, data: StepData) -> torch.Tensor | None:
        """A local pass, an agreement whether it fitted everywhere, and the reduction; None when some rank ran out of memory."""
        finite: torch.Tensor | None = None
        if self.spread.replicated and getattr(self.config.strategy, "broadcast_buffers", False):
            self.world.broadcast_tensors([b for b in self.module.buffers() if b.numel()])
        try:
            finite = self._local_pass(data, lambda last: self.spread.no_sync(False))
        except torch.OutOfMemoryError:
            self._free()
        if self.world.sum([float(finite is None)])[0]:
            return None
        assert finite is not None
        average_gradients(self.world, self.module.parameters())
        return finite

    def _halve(self, data: StepData, before: tuple[torch.Tensor | None, float]) -> None:
        """Half the micro-batch on all ranks, after an out-of-memory that all know of. TrainError when one row does not fit."""
        size = self.micro_size or padded_share(data.global_rows, self.world.world_size)
        if size == 1:
            raise TrainError(
                f"step {self.counters.step + 1}: out of memory with a micro-batch of one row; use a smaller model, precision: bf16, "
                "or more memory"
            )
        self._free()
        self.meter.drop(*before)
        self.micro_size, self._fits = -(-size // 2), 0
        self.notes.append(
            (
                "out_of_memory",
                f"micro-batch of {size} rows did not fit; from step {self.counters.step + 1} on: {self.micro_size}",
            )
        )

    def _free(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- what became of it ---------------------------------------------------------------------------------------------

    def _apply(self, data: StepData, finite: torch.Tensor, before: tuple[torch.Tensor | None, float]) -> Outcome:
        norm = self.precision.gradient_norm(self.optimizer, self.config.clip_grad_norm)
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
        """What is not finite on this rank in the step just skipped, found before any reduction mixed it: the first micro-batch with
        such a loss or gradient, and the rows `[start, stop)` of the global batch in it. None when this rank is clean.

        Runs the step again alone, with the same random numbers and weights. Buffers stay as they were.
        """
        buffers = {name: b.detach().clone() for name, b in self.module.named_buffers()}
        seed_all(self.config.seed, "step", self.counters.step - 1, self.world.rank)
        found: tuple[str, int, int] | None = None
        start, _ = share(data.global_rows, self.world.rank, self.world.world_size)
        for piece in self.cut(data):
            if not piece.rows:
                continue
            batch = to_device(slice_rows(data.batch, piece.start, piece.stop), self.world.device)
            loss = self.loss(self.module, batch)
            what: str | None
            if not torch.isfinite(loss):
                what = f"the loss is {float(loss.detach())}"
            else:
                named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
                grads: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
                bad = [n for (n, _), g in zip(named, grads, strict=True) if g is not None and not torch.isfinite(g).all()]
                what = f"the gradient of {bad[0]!r} is not finite" if bad else None
            if what is not None:
                found = (what, start + piece.start, start + piece.stop)
                break
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])
        return found

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The task's loss under autocast; its own errors come back with the step and the shapes that went in."""
        try:
            with self.precision.forward():
                return checked_loss(self.task.loss(model, batch), self.counters.step + 1)
        except (RaydistError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise TrainError(
                f"rank {self.world.rank}, step {self.counters.step + 1}: the model or loss failed on a batch of {describe(batch)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def weigh(self, data: StepData, pieces: Sequence[MicroBatch], batches: Sequence[Any]) -> tuple[list[float], float]:
        """The weight of each micro-batch of this rank, and of the global batch. Every rank must call it."""
        if self._weigh is None:
            return [float(piece.rows) for piece in pieces], float(data.global_rows)
        weights = [float(self._weigh(batch)) if piece.rows else 0.0 for piece, batch in zip(pieces, batches, strict=True)]
        problem = next((w for w in weights if not (w >= 0 and math.isfinite(w))), None)
        total, broken = self.world.sum([0.0 if problem is not None else sum(weights), float(problem is not None)])
        if broken or total <= 0:
            raise TrainError(
                f"step {self.counters.step + 1}: task.weight gave "
                + (f"{problem} on rank {self.world.rank}" if broken else "0 for the whole global batch")
                + "; it must be finite, not negative, and positive in sum"
            )
        return weights, total

    def _check_first(self, batch: Any) -> None:
        if self._checked:
            return
        self._checked = True
        strategy = self.config.strategy
        seed_all(self.config.seed, "step", self.counters.step, self.world.rank)
        where = self.world.device
        check_used(
            self.spread,
            getattr(strategy, "find_unused_parameters", True),
            lambda model: self.loss(model, to_device(batch, where)),
        )
        seed_all(self.config.seed, "step", self.counters.step, self.world.rank)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self, position: Position, data: dict[str, Any]) -> TrainState:
        """All that resuming needs; tensors are references, so copy before the next step. Every rank must call it."""
        return TrainState(
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
                "micro_size": self.micro_size,
            },
        )

    def roll_back(self, state: TrainState) -> int:
        """Take weights, optimizer, schedule, scaler and EMA of an earlier `state`; steps and rows go on. Returns the steps undone."""
        now = self.counters
        self.load(state)
        undone = now.applied - self.counters.applied
        self.counters = Counters(
            now.step, self.counters.applied, now.step - self.counters.applied, now.rows_seen, now.bad_in_a_row
        )
        return undone

    def load(self, state: TrainState) -> Position:
        """Become what `state` says, and return where the data goes on. Raises CheckpointError when the model is another one."""
        check_model_matches(self.module.state_dict(), state.model)
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
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
            self.micro_size = state.extra.get("micro_size")
        return Position(**state.position)


def average_gradients(world: World, parameters: Iterable[torch.nn.Parameter]) -> None:
    """What DDP does in backward, done after it: the mean over ranks of each gradient, in place. Every rank must call it."""
    if world.world_size == 1:
        return
    by_kind: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_kind.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]) / world.world_size
        torch.distributed.all_reduce(flat)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def build_model(task: Task) -> nn.Module:
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"task: build_model() gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def compile_model(config: JobConfig, model: nn.Module) -> None:
    """`torch.compile` in place, so that parameter names stay."""
    options = config.train.compile
    settings: dict[str, Any] = (
        {} if isinstance(options, bool) else {k: v for k, v in options.model_dump().items() if v is not None}
    )
    model.compile(**settings)


def describe(batch: Any) -> str:
    """Shapes and dtypes of a batch, for an error message."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, dict):
        return ", ".join(f"{key} {describe(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(describe(value) for value in batch[:6]) + ("…" if len(batch) > 6 else "") + ")"
    return type(batch).__name__
