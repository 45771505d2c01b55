"""When to log, evaluate, save, and stop early; what is best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raydist.config import Best, EarlyStop, Interval
from raydist.errors import TrainError
from raydist.milestones import better, due, is_best, stops_early


def ends(epoch: int, last: bool) -> Any:
    return SimpleNamespace(epoch=epoch, last_in_epoch=last)


def test_every_so_many_steps_or_epochs() -> None:
    assert [step for step in range(1, 10) if due(Interval(steps=3), step, ends(0, False))] == [3, 6, 9]
    every_second = Interval(epochs=2)
    assert [epoch for epoch in range(6) if due(every_second, 1, ends(epoch, True))] == [1, 3, 5]
    assert not due(every_second, 1, ends(1, False))
    assert not due(None, 1, ends(1, True)) and not due(Interval(minutes=1), 1, ends(1, True))


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_better_by_more_than_min_delta_and_never_nan(mode: str, sign: int) -> None:
    assert better(sign * 1.0, None, mode) and better(sign * 1.0, sign * 1.5, mode)
    assert not better(sign * 1.0, sign * 1.0, mode) and not better(sign * 2.0, sign * 1.0, mode)
    assert not better(sign * 1.0, sign * 1.5, mode, min_delta=0.5) and better(sign * 1.0, sign * 1.5, mode, min_delta=0.4)
    assert not better(float("nan"), None, mode)


def trainer(best: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(best=best, extra={})


def test_the_best_evaluation_is_remembered() -> None:
    rule, found, whole = Best(metric="eval_loss", mode="min"), [], trainer()
    for step, loss in enumerate([3.0, float("nan"), 4.0, 2.0, 2.0]):
        found.append(is_best(rule, {"step": step, "eval_loss": loss}, whole))
    assert found == [True, False, False, True, False]
    assert whole.best == {"step": 3, "metric": "eval_loss", "value": 2.0}
    assert not is_best(None, {"step": 9, "eval_loss": 0.0}, whole)


def test_patience_counts_evaluations_in_a_row_without_progress() -> None:
    rule, whole = EarlyStop(metric="eval_loss", mode="min", patience=2), trainer()
    losses = [3.0, 4.0, 2.0, 2.5, float("nan")]
    assert [stops_early(rule, {"step": i, "eval_loss": loss}, whole) for i, loss in enumerate(losses)] == [False] * 4 + [True]
    assert not stops_early(None, {}, whole)


def test_a_metric_that_is_not_measured_is_named_with_those_that_are() -> None:
    with pytest.raises(TrainError, match=r"checkpoint.best.metric: 'eval_f1' is not measured; there is eval_loss, step"):
        is_best(Best(metric="eval_f1", mode="max"), {"step": 1, "eval_loss": 1.0}, trainer())
    with pytest.raises(TrainError, match=r"train.early_stop.metric: 'eval_f1' is not measured"):
        stops_early(EarlyStop(metric="eval_f1", mode="max", patience=1), {"eval_loss": 1.0}, trainer())
