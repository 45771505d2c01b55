"""One pass over all rows of all ranks: weighted, in evaluation mode, and failing together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from raydist.config import Precision as PrecisionConfig
from raydist.config import TaskConfig
from raydist.data.source import EvalData
from raydist.errors import DataError, RaydistError, TrainError
from raydist.evaluation import evaluate
from raydist.precision import Precision
from raydist.task import build_task
from raydist.world import World, from_env
from tests.support import lin_job, run_ranks, train_here

CPU = torch.device("cpu")


class Batches:
    """Evaluation data out of a list; an error in it is raised when its turn comes."""

    rows = None

    def __init__(self, *batches: Any) -> None:
        self.list = batches

    def batches(self) -> Iterator[EvalData]:
        for batch in self.list:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def close(self) -> None:
        pass


def pairs(*xs: float, rows: int | None = None) -> EvalData:
    """Rows (x, 3x), the first `rows` of which count."""
    x = torch.tensor(xs).reshape(-1, 1)
    return EvalData((x, 3 * x), len(xs) if rows is None else rows)


class Model(nn.Module):
    """2x, and something far off while training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight + 100 * self.training)


def task_of(loss: str = "torch.nn.functional:mse_loss", metrics: bool = True) -> Any:
    parts: dict[str, Any] = {"model": {"target": "tests.test_evaluation:Model"}, "loss": {"target": loss}}
    if metrics:
        parts["metrics"] = {
            "mae": {"target": "torchmetrics:MeanAbsoluteError"},
            "total": {"target": "tests.test_evaluation:Total"},
        }
    return build_task(TaskConfig.model_validate(parts))


class Total(torchmetrics.SumMetric):
    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        assert predictions.dtype == torch.float32
        super().update(targets)


def scored(source: Batches, world: World, task: Any = None, name: str = "fp32") -> Any:
    """The values, or the error as (type, words)."""
    model = Model()
    precision = Precision(PrecisionConfig(name=name), CPU)  # type: ignore[arg-type]
    try:
        return evaluate(task or task_of(), model, source, world, precision, step=4)
    except RaydistError as error:
        return type(error).__name__, str(error)
    finally:
        assert model.training and model.weight.grad is None


def row_wise(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions - targets).abs()


class Weighted:
    """A custom task with its own weight and metrics."""

    def build_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(*self.predict(model, batch))

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def weight(self, batch: Any) -> float:
        return float(batch[0].sum())

    def metrics(self) -> dict[str, Any]:
        return {"mae": torchmetrics.MeanAbsoluteError()}


# Errors are x: the squared error of rows 1, 2, 3, 4, 5 is 55 in sum, the absolute one 15, the targets 45.
FIVE = {"eval_loss": 11.0, "eval_mae": 3.0, "eval_total": 45.0}


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_loss_is_the_mean_over_rows_whatever_the_batches(name: str) -> None:
    for source in (Batches(pairs(1, 2, 3, 4, 5)), Batches(pairs(1, 2), pairs(3, 4), pairs(5, 9, 9, rows=1))):
        assert scored(source, World(), name=name) == pytest.approx(FIVE)


def test_without_metrics_there_is_the_loss_alone() -> None:
    assert scored(Batches(pairs(1, 2)), World(), task_of(metrics=False)) == {"eval_loss": 2.5}


def test_a_custom_task_weighs_and_measures_in_its_own_way() -> None:
    # batches of mean square 2.5 and weight 3, 9 and 3
    assert scored(Batches(pairs(1, 2), pairs(3)), World(), Weighted()) == pytest.approx({"eval_loss": 5.75, "eval_mae": 2.0})


def test_a_loss_that_is_not_finite_is_shown_as_it_is() -> None:
    assert math.isnan(scored(Batches(pairs(1, math.nan)), World(), task_of(metrics=False))["eval_loss"])


def test_what_goes_wrong_is_named() -> None:
    assert scored(Batches(), World()) == (
        "DataError",
        "data.eval has no rows: nothing to evaluate; give it rows, or leave out data.eval",
    )
    kind, words = scored(Batches(pairs(1, 2)), World(), task_of("tests.test_evaluation:row_wise"))
    assert kind == "TrainError" and words.startswith("step 4: the loss has shape [2, 1], not one number")
    kind, words = scored(
        Batches(EvalData((torch.ones(2, 3, 4, dtype=torch.int64),) * 2, 2)), World(), task_of("torch.nn:NLLLoss")
    )
    assert kind == "TrainError" and words.startswith("rank 0, evaluation after step 4: RuntimeError: ")


def ticked() -> int:
    count = [0]

    def tick() -> None:
        count[0] += 1

    evaluate(task_of(), Model(), Batches(pairs(1), pairs(2)), World(), Precision(PrecisionConfig(), CPU), 1, tick)
    return count[0]


def test_every_batch_is_a_sign_of_life() -> None:
    assert ticked() == 2


def on_ranks() -> dict[str, Any]:
    world = from_env()
    first = world.rank == 0
    try:
        return {
            "uneven": scored(Batches(pairs(1, 2), pairs(3), pairs(4)) if first else Batches(pairs(5)), world),
            "one without": scored(Batches(pairs(1, 2, 3, 4, 5)) if first else Batches(), world),
            "none": scored(Batches(), world),
            "data error": scored(Batches(pairs(1)) if first else Batches(pairs(1), DataError("row 7 of x.csv")), world),
            "user error": scored(Batches(pairs(1), AttributeError("no such thing")) if first else Batches(pairs(1)), world),
            "afterwards": scored(Batches(pairs(1, 2)) if first else Batches(pairs(3, 4, 5)), world),
        }
    finally:
        world.close()


def test_ranks_with_other_numbers_of_batches_score_and_fail_together() -> None:
    first, second = run_ranks(2, on_ranks)
    for found in (first, second):
        for case in ("uneven", "one without", "afterwards"):
            assert found[case] == pytest.approx(FIVE), case
        assert found["none"][0] == "DataError" and "has no rows" in found["none"][1]
    assert second["data error"] == ("DataError", "row 7 of x.csv")
    assert first["data error"] == ("TrainError", "rank 1 failed in evaluation after the same step: row 7 of x.csv")
    words = "rank 0, evaluation after step 4: AttributeError: no such thing"
    assert first["user error"] == ("TrainError", words)
    assert second["user error"] == ("TrainError", f"rank 0 failed in evaluation after the same step: {words}")


def test_the_cause_is_kept() -> None:
    with pytest.raises(TrainError) as caught:
        evaluate(task_of(), Model(), Batches(KeyError("x")), World(), Precision(PrecisionConfig(), CPU), 4)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("step", [2, 3, 6])
def test_an_evaluation_that_was_due_when_the_run_stopped_is_done_when_it_goes_on(step: int) -> None:
    plateau = {"name": "plateau", "patience": 0, "factor": 0.5, "mode": "max"}  # eval_loss falls: each one halves the rate
    job = lin_job([1.0, 2.0, 3.0] * 3, 1, train={"epochs": 1, "log_every": {"steps": 1}, "eval_every": {"steps": 3}})
    job["optimizer"]["lr"] = 0.01
    job |= {"schedule": plateau, "checkpoint": {"every": {"steps": 1}, "best": {"metric": "eval_loss"}}}
    job["data"]["eval"] = {"target": "tests.support:line", "args": {"xs": [1.0, 2.0]}}

    def told(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: line.get(k) for k in ("step", "epoch", "train_loss", "eval_loss", "lr", "grad_norm")} for line in lines]

    whole = train_here(job)
    first = train_here(job, stop_after=step)
    assert first["state"].counters["step"] == step
    rest = train_here(job, state=first["state"])
    assert told(first["lines"] + rest["lines"]) == told(whole["lines"])
    assert rest["state"].best == whole["state"].best and "owed" not in rest["state"].extra
    assert torch.equal(rest["model"]["weight"], whole["model"]["weight"])
