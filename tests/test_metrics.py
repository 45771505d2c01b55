"""Metrics merged over ranks equal those of one process that saw every row; losses are weighted means."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import Metric, classification, regression

from raydist.errors import ConfigError
from raydist.metrics import Clock, LossMeter, merge_metrics, peak_memory_mb
from raydist.world import World, from_env
from tests.support import run_ranks


class Spread(Metric):
    """max - min of the targets: a user's own metric with torchmetrics' defaults (no full_state_update)."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("low", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("high", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.low = torch.minimum(self.low, targets.min())
        self.high = torch.maximum(self.high, targets.max())

    def compute(self) -> torch.Tensor:
        return self.high - self.low


class RunningMean(Metric):
    """A state that is a mean by itself cannot be merged exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.mean = targets.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


class Total(torchmetrics.SumMetric):
    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        super().update(targets)


def some_metrics() -> dict[str, Metric]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all targets")  # Spearman's, which is why it is here
        spearman = regression.SpearmanCorrCoef()
    return {
        "rmse": torchmetrics.MeanSquaredError(squared=False),  # sums
        "mae": torchmetrics.MeanAbsoluteError(),
        "total": Total(),  # a plain sum, which a second gathering would double
        "r2": torchmetrics.R2Score(),
        "spearman": spearman,  # cat
        "pearson": regression.PearsonCorrCoef(),  # moments of each rank, not reduced before compute
        "spread": Spread(),  # min and max
        "both": torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(),  # a metric of metrics
    }


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randn(11, generator=generator)
    return targets + 0.3 * torch.randn(11, generator=generator), targets


def merged(world: World, cuts: list[list[int]]) -> dict[str, float]:
    """Each rank updates with its slices of the rows, `cuts[rank]` being the borders."""
    metrics = some_metrics()
    predictions, targets = rows()
    found = []
    for _ in range(2):  # a second evaluation starts anew
        for start, stop in itertools.pairwise(cuts[world.rank]):
            for metric in metrics.values():
                metric.update(predictions[start:stop], targets[start:stop])
        found.append(merge_metrics(world, metrics))
    assert found[0] == found[1]
    return found[0]


def of_one_process() -> dict[str, float]:
    metrics = some_metrics()
    for metric in metrics.values():
        metric.update(*rows())
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def on_ranks(cuts: list[list[int]]) -> dict[str, Any]:
    """Everything that these tests ask of real ranks, in one start of them."""
    world = from_env()
    try:
        found: dict[str, Any] = {"merged": merged(world, cuts)}
        if world.world_size == 2:
            found |= {"classified": classified(world), "losses": losses(world), "refused": unmergeable(world)}
        return found
    finally:
        world.close()


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_ranks, [[0, 4, 6], [6, 11]])


def test_metrics_of_any_kind_equal_those_of_one_process(two_ranks: list[dict[str, Any]]) -> None:
    expected = pytest.approx(of_one_process(), rel=1e-5)
    assert merged(World(), [[0, 3, 11]]) == expected
    for result in two_ranks:
        assert result["merged"] == expected


def test_a_rank_that_saw_no_rows_changes_nothing() -> None:
    for result in run_ranks(3, on_ranks, [[0, 5, 9], [], [9, 11]]):
        assert result["merged"] == pytest.approx(of_one_process(), rel=1e-5)


def scores() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(40, 3, generator=generator).softmax(1), torch.randint(0, 3, (40,), generator=generator)


def classified(world: World) -> dict[str, float]:
    metrics: dict[str, Metric] = {
        "auroc": classification.MulticlassAUROC(num_classes=3),
        "f1": classification.MulticlassF1Score(num_classes=3, average="macro"),
        "accuracy": classification.MulticlassAccuracy(num_classes=3, average="micro"),
    }
    p, t = (x[:13] if world.rank == 0 else x[13:] for x in scores())
    for metric in metrics.values():
        metric.update(p, t)
    return merge_metrics(world, metrics)


def test_classification_metrics_over_ranks_equal_scikit_learn(two_ranks: list[dict[str, Any]]) -> None:
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    p, t = scores()
    expected = {
        "auroc": roc_auc_score(t, p, multi_class="ovr", average="macro"),
        "f1": f1_score(t, p.argmax(1), average="macro"),
        "accuracy": accuracy_score(t, p.argmax(1)),
    }
    for result in two_ranks:
        assert result["classified"] == pytest.approx(expected, abs=1e-6)


def unmergeable(world: World) -> str:
    metric = RunningMean()
    metric.update(torch.zeros(2), torch.full((2,), float(world.rank)))
    with pytest.raises(ConfigError) as caught:
        merge_metrics(world, {"mine": metric})
    return str(caught.value)


def test_a_metric_that_keeps_a_mean_is_refused_over_workers_and_fine_with_one(two_ranks: list[dict[str, Any]]) -> None:
    metric = RunningMean()
    metric.update(torch.zeros(2), torch.tensor([1.0, 2.0]))
    assert merge_metrics(World(), {"mine": metric}) == {"mine": 1.5}
    for result in two_ranks:
        assert result["refused"].startswith("task.metrics.mine: RunningMean cannot be merged over workers (it keeps a mean")
        assert result["refused"].endswith("choose another metric or one worker")


def test_a_metric_that_is_no_single_number_is_named_with_what_to_do() -> None:
    per_class = classification.MulticlassAccuracy(num_classes=3, average=None)
    per_class.update(*scores())
    with pytest.raises(ConfigError, match=r"task.metrics.acc: gives shape \[3\], not one number; choose an average"):
        merge_metrics(World(), {"acc": per_class})


def test_no_metrics_and_metrics_without_rows_give_no_values() -> None:
    assert merge_metrics(World(), {}) == {}
    assert merge_metrics(World(), {"mae": torchmetrics.MeanAbsoluteError()}) == {}


# -- the loss between two log lines ---------------------------------------------------------------------------------------


def losses(world: World) -> list[Any]:
    meter = LossMeter()
    found = [meter.reduce(world)]  # nothing yet
    if world.rank == 0:
        meter.add(torch.tensor(1.0), 3)
        meter.add(torch.tensor(5.0), 1)
    else:
        meter.add(torch.tensor(torch.nan), 0)  # a borrowed row counts nothing
        meter.add(torch.tensor(2.0), 2)
    found.append(meter.reduce(world))
    found.append(meter.reduce(world))  # asking twice counts nothing twice
    meter.add(torch.tensor(9.0), 1)
    found.append(meter.reduce(world))
    before = (meter.total, meter.weight)
    meter.add(torch.tensor(1e9), 4)
    meter.drop(*before)  # a skipped step
    found.append(meter.reduce(world))
    meter.reset()
    found.append(meter.reduce(world))
    return found


def test_the_loss_is_the_weighted_mean_over_ranks_and_steps(two_ranks: list[dict[str, Any]]) -> None:
    first = (3 * 1 + 5 + 2 * 2) / 6
    then = (12 + 9 + 9) / 8
    expected = [None, *(pytest.approx(value) for value in (first, first, then, then)), None]
    for result in two_ranks:
        assert result["losses"] == expected


def test_a_loss_is_summed_in_float64() -> None:
    meter = LossMeter()
    for _ in range(1000):
        meter.add(torch.tensor(0.1, dtype=torch.bfloat16), 1)
    assert meter.reduce(World()) == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-12)


# -- times ------------------------------------------------------------------------------------------------------------------


def test_the_clock_gives_times_a_step_without_pauses() -> None:
    clock = Clock()
    time.sleep(0.05)
    clock.pause(0.04)
    clock.steps, clock.rows, clock.data_wait, clock.sync_wait = 2, 10, 0.004, 0.002
    read = clock.read()
    assert 0.005 <= read["step_s"] < 0.02 + 0.5  # half of the 10 ms that were no pause; the machine may be busy
    assert read["data_wait_s"] == 0.002 and read["sync_wait_s"] == 0.001
    assert read["compute_s"] == pytest.approx(read["step_s"] - 0.003)
    assert read["rows_per_s"] == pytest.approx(10 / (2 * read["step_s"]))
    clock.reset()
    assert (clock.steps, clock.rows, clock.data_wait, clock.paused) == (0, 0, 0.0, 0.0)


def test_memory_is_the_peak_of_this_process_in_mib() -> None:
    before, _ = peak_memory_mb(torch.device("cpu"))
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    allocated, reserved = peak_memory_mb(torch.device("cpu"))
    assert allocated >= before and 64 < allocated < 64 * 1024
    assert reserved == allocated  # the CPU knows no difference
    del block
