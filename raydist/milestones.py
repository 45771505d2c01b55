"""Which steps are special: when to log, evaluate, save, stop early; and which evaluation is the best one so far.

All of it follows from the step, the position and numbers that every rank has alike, so that all ranks decide the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydist.data.source import StepData
from raydist.errors import TrainError

if TYPE_CHECKING:
    from raydist.config import Best, EarlyStop, Interval
    from raydist.trainer import Trainer


def due(interval: Interval | None, step: int, data: StepData) -> bool:
    """Whether `step`, which trained `data`, is one of every `interval` steps or epochs. Minutes are the loop's affair."""
    if interval is None:
        return False
    if interval.steps is not None:
        return step % interval.steps == 0
    if interval.epochs is not None:
        return data.last_in_epoch and (data.epoch + 1) % interval.epochs == 0
    return False


def better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` improves on `best` by more than `min_delta`. NaN never does; anything improves on None."""
    if value != value:
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def is_best(rule: Best | None, line: dict[str, Any], trainer: Trainer) -> bool:
    """Whether this evaluation is the best so far by `checkpoint.best`; then `trainer.best` remembers it."""
    if rule is None:
        return False
    value = _measured(rule.metric, line, "checkpoint.best.metric")
    if not better(value, None if trainer.best is None else trainer.best["value"], rule.mode):
        return False
    trainer.best = {"step": line["step"], "metric": rule.metric, "value": value}
    return True


def stops_early(rule: EarlyStop | None, line: dict[str, Any], trainer: Trainer) -> bool:
    """Whether `train.early_stop` has seen `patience` evaluations in a row without progress; counts in `trainer.extra`."""
    if rule is None:
        return False
    value = _measured(rule.metric, line, "train.early_stop.metric")
    seen = trainer.extra.get("early_stop", {"best": None, "waited": 0})
    if better(value, seen["best"], rule.mode, rule.min_delta):
        seen = {"best": value, "waited": 0}
    else:
        seen = {"best": seen["best"], "waited": seen["waited"] + 1}
    trainer.extra["early_stop"] = seen
    return bool(seen["waited"] >= rule.patience)


def _measured(metric: str, line: dict[str, Any], key: str) -> float:
    value = line.get(metric)
    if value is None:
        raise TrainError(f"{key}: {metric!r} is not measured; there is {', '.join(sorted(line))}")
    return float(value)
