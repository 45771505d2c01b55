"""Optimizers and learning-rate schedules, built from the job file and counted in applied optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from raydist.errors import ConfigError
from raydist.task import build

if TYPE_CHECKING:
    from raydist.config import OptimizerConfig, ScheduleConfig

_NAMED = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_OPTIONS = ("momentum", "nesterov", "weight_decay", "betas", "eps")


def build_optimizer(config: OptimizerConfig, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over the parameters that need gradients. ConfigError when there are none, or it refuses its arguments."""
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that needs a gradient: there is nothing to train")
    if config.name is None:
        optimizer = build(config.target or "", {"params": trainable, "lr": config.lr, **config.args}, "optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer.target: {config.target} made a {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
        return optimizer
    options = {k: v for k in _OPTIONS if (v := getattr(config, k)) is not None}
    options["fused"] = _can_fuse(trainable) if config.fused == "auto" else config.fused
    named: torch.optim.Optimizer = _NAMED[config.name](trainable, lr=config.lr, **options)
    return named


def _can_fuse(params: list[torch.nn.Parameter]) -> bool:
    """Fused kernels run on CPU and CUDA for floating-point parameters: one pass over memory instead of a pass an operation."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)


class Schedule:
    """The learning rate after each *applied* step; skipped steps do not move it.

    Warm-up multiplies the rate by `(t + 1) / (warmup_steps + 1)` while `t < warmup_steps`, so the first step is not wasted on
    a rate of zero. A schedule by import path starts when the warm-up is over.
    """

    def __init__(self, config: ScheduleConfig, optimizer: torch.optim.Optimizer, total_steps: int | None) -> None:
        self.optimizer = optimizer
        self.warmup = config.warmup_steps
        self.metric: str | None = None
        self.applied = 0
        self._plateau: ReduceLROnPlateau | None = None
        self._scheduler: LRScheduler | None = None
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._named = config.target is None
        if config.target is not None:
            self._scheduler = build(config.target, {"optimizer": optimizer, **config.args}, "schedule")
            if isinstance(self._scheduler, ReduceLROnPlateau):
                raise ConfigError("schedule.target: use `name: plateau` instead, so that the metric it follows is known")
            if not (hasattr(self._scheduler, "step") and hasattr(self._scheduler, "state_dict")):
                raise ConfigError(
                    f"schedule.target: {config.target} made a {type(self._scheduler).__name__}, "
                    "not a torch learning-rate scheduler"
                )
            self._base = [float(group["lr"]) for group in optimizer.param_groups]  # a schedule may set its own first rate
            self._warm_up()
        elif config.name == "plateau":
            self.metric = config.metric
            self._plateau = ReduceLROnPlateau(
                optimizer, mode=config.mode, factor=config.factor, patience=config.patience, min_lr=config.min_lr
            )
            self._warm_up()
        else:
            floors = [min(1.0, config.min_lr / base) for base in self._base]
            total = config.total_steps or total_steps
            self._scheduler = LambdaLR(optimizer, [_shape(config, total, floor) for floor in floors])

    def _warm_up(self) -> None:
        in_curve = self._named and self._plateau is None
        if not in_curve and self.applied <= self.warmup and self.warmup:
            factor = min(1.0, (self.applied + 1) / (self.warmup + 1))
            for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor

    def step(self) -> None:
        """Call once after each applied optimizer step."""
        self.applied += 1
        if self._scheduler is not None and (self._named or self.applied > self.warmup):
            self._scheduler.step()
        self._warm_up()

    def observe(self, metrics: dict[str, float]) -> None:
        """Show an evaluation to a plateau schedule. Every rank must pass the same numbers."""
        if self._plateau is None or self.metric is None or self.applied < self.warmup:
            return
        if self.metric not in metrics:
            raise ConfigError(
                f"schedule.metric: {self.metric!r} is not measured; the evaluation gives {', '.join(sorted(metrics))}"
            )
        self._plateau.step(metrics[self.metric])

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        inner = self._scheduler or self._plateau
        state = {} if inner is None else dict(inner.state_dict())
        state.pop("lr_lambdas", None)
        return {"applied": self.applied, "inner": {k: v for k, v in state.items() if _plain(v)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.applied = state["applied"]
        inner = self._scheduler or self._plateau
        if isinstance(inner, LambdaLR):
            own = {key: value for key, value in state["inner"].items() if key in ("last_epoch", "_step_count")}
            inner.__dict__.update(own)
            curves = zip(self.optimizer.param_groups, inner.base_lrs, inner.lr_lambdas, strict=True)
            for group, base, curve in curves:  # those of this job's settings, which may be others than the checkpoint's
                group["lr"] = base * curve(inner.last_epoch)
            inner._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        elif inner is not None:
            inner.load_state_dict(state["inner"])


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def _shape(config: ScheduleConfig, total: int | None, floor: float) -> Callable[[int], float]:
    """The factor on the base rate as a function of applied steps: warm-up, then the named curve down to `floor`."""
    warmup, name = config.warmup_steps, config.name

    def progress(step: int) -> float:
        if total is None:
            raise ConfigError(f"schedule.name: {name} needs the run's length: set schedule.total_steps or train.max_steps")
        return min(1.0, max(0.0, (step - warmup) / max(1, total - warmup)))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if name == "linear":
            return 1.0 - (1.0 - floor) * progress(step)
        if name == "cosine":  # Loshchilov & Hutter 2017, eq. 5, one cycle
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress(step)))
        if name == "step":
            return max(floor, float(config.gamma) ** ((step - warmup) // (config.step_size or 1)))
        return 1.0

    return factor
