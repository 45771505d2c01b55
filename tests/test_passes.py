"""Steps that do not fit in memory or are not finite: all ranks agree, and the report names rank, parameter and rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist.errors import TrainError
from raydist.passes import average_gradients, describe, not_finite
from raydist.rundir import RunDir
from raydist.world import from_env
from tests.runs import local_run
from tests.support import RankError, lin_job, run_ranks, train_here


class RootLoss(nn.Module):
    """sqrt of the mean error: where the error is 0, the loss is finite and its gradient is not."""

    def forward(self, predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (predicted - target).square().sum().sqrt()


def weight(result: dict[str, Any]) -> float:
    return float(result["model"]["weight"])


# -- out of memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_halves_the_micro_batch_on_all_and_keeps_the_global_batch(tmp_path: Path, rank: int) -> None:
    job = lin_job([1] * 16, 8, batch__micro_size="auto")
    inject = (str(tmp_path), [{"kind": "oom", "rank": rank, "step": 2}])
    results = run_ranks(2, train_here, job, None, None, inject)
    for result in results:
        assert weight(result) == pytest.approx(3 * (1 - 0.8**2), abs=1e-6)
    events = [event for result in results for event in result["events"]]
    assert [(e["kind"], e["step"], e["reason"]) for e in events] == [
        ("out_of_memory", 2, "4 rows did not fit; from step 2 on micro-batches of 2")
    ]


def test_it_halves_until_it_fits_and_one_row_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    job = lin_job([1] * 4, 4, batch__micro_size="auto")
    twice = [{"kind": "oom", "rank": 0, "step": 1, "times": 2}]
    result = train_here(job, inject=(str(tmp_path / "two"), twice))
    assert weight(result) == pytest.approx(0.6, abs=1e-6)
    assert [event["reason"].partition(" ")[0] for event in result["events"]] == ["4", "2"]
    with pytest.raises(TrainError, match="step 1: out of memory with a micro-batch of one row"):
        train_here(job, inject=(str(tmp_path / "three"), [{**twice[0], "times": 3}]))


def test_a_size_that_the_user_set_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train_here(lin_job([1] * 4, 4, batch__micro_size=2), inject=(str(tmp_path), [{"kind": "oom", "rank": 0, "step": 1}]))


def _averaged() -> list[torch.Tensor]:
    world = from_env("gloo")
    try:
        parameters = [
            nn.Parameter(torch.zeros(2)),
            nn.Parameter(torch.zeros(1, 3, dtype=torch.float64)),
            nn.Parameter(torch.zeros(1)),
        ]
        for number, parameter in enumerate(parameters[:2]):
            parameter.grad = torch.full_like(parameter, 2.0 * (world.rank + 1) + number)
        average_gradients(world, parameters)
        assert parameters[2].grad is None
        return [p.grad for p in parameters if p.grad is not None]
    finally:
        world.close()


def test_gradients_are_averaged_whatever_their_dtype_and_absent_ones_stay_absent() -> None:
    for grads in run_ranks(2, _averaged):
        assert grads[0].tolist() == [3.0, 3.0]  # (2 + 4) / 2
        assert grads[1].tolist() == [[4.0, 4.0, 4.0]] and grads[1].dtype == torch.float64  # (3 + 5) / 2


# -- not finite -------------------------------------------------------------------------------------------------------------


def test_the_rank_whose_rows_are_bad_is_named_and_not_its_neighbour() -> None:
    xs = [1.0] * 6 + [math.inf] + [1.0]  # the second half of the only global batch, in the second micro-batch of rank 1
    with pytest.raises(RankError) as raised:
        run_ranks(2, train_here, lin_job(xs, 8, batch__micro_size=2))
    for rank in (0, 1):
        assert "step 1, rank 1: the loss is nan in rows 6, 7 of tests.support:line" in raised.value.ranks[rank]


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_named_by_its_parameter() -> None:
    job = lin_job([0.0, 0.0, 1.0], 1, task__loss={"target": "tests.test_passes:RootLoss"})
    with pytest.raises(TrainError, match=r"step 1, rank 0: the gradient of 'weight' is not finite in row 0 of"):
        train_here(job)


def test_as_many_bad_steps_in_a_row_as_allowed() -> None:
    def job(bad: int) -> dict[str, Any]:
        xs = [1.0] + [math.nan] * bad + [1.0] + [math.nan] * bad + [1.0]
        return lin_job(xs, 1, failure={"bad_step": "skip", "max_bad_steps": 2})

    result = train_here(job(2))
    assert weight(result) == pytest.approx(3 * (1 - 0.8**3), abs=1e-6)
    assert result["state"].counters["skipped"] == 4
    with pytest.raises(TrainError, match=r"step 4, .*; it is bad step 3 in a row, and failure.max_bad_steps is 2"):
        train_here(job(3))


def test_a_rollback_goes_back_to_the_last_checkpoint_and_leaves_the_bad_batch_out(tmp_path: Path) -> None:
    run = local_run(
        tmp_path,
        xs=[1.0] * 4 + [math.nan, 1.0],
        global_size=1,
        optimizer__lr=0.1,
        failure={"bad_step": "rollback"},
        checkpoint={"every": {"steps": 3}, "async": False},
    )
    (event,) = [event for event in RunDir(str(run)).read_events() if event["kind"] == "bad_step"]
    assert event["step"] == 5 and event["reason"].endswith("; rolled back 1 applied steps")
    summary = RunDir(str(run)).read_summary()
    assert summary is not None
    # steps 1, 2, 3 and 6 count: the fourth is undone, the fifth is left out
    assert summary["metrics"]["train_loss"] == pytest.approx(9 * 0.8**6, abs=1e-5)
    assert (summary["steps"], summary["applied"]) == (6, 4)


def test_without_a_checkpoint_a_rollback_is_a_skip(tmp_path: Path) -> None:
    run = local_run(
        tmp_path, xs=[1.0, math.nan, 1.0], global_size=1, failure={"bad_step": "rollback"}, checkpoint={"every": {"steps": 9}}
    )
    (event,) = [event for event in RunDir(str(run)).read_events() if event["kind"] == "bad_step"]
    assert event["reason"].endswith("; skipped (no checkpoint to roll back to yet)")
    summary = RunDir(str(run)).read_summary()
    assert summary is not None and (summary["applied"], summary["skipped"]) == (2, 1)


def test_what_is_not_finite_in_words() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    good = model(torch.ones(1, 1)).sum()
    assert not_finite(model, good) is None
    assert not_finite(model, good * math.inf) in ("the loss is inf", "the loss is -inf", "the loss is nan")
    second = model[1].weight.sum()
    assert not_finite(model, (second - second.detach()).sqrt()) == "the gradient of '1.weight' is not finite"


def test_a_batch_in_words() -> None:
    assert (
        describe({"x": torch.zeros(2, 3), "y": (torch.zeros(2, dtype=torch.int64), "text")})
        == "x float32[2, 3], y (int64[2], str)"
    )
    assert describe([torch.zeros(1)] * 7).endswith("…)")
