"""Every schedule, 1 to 4 stages, 1 and 2 replicas: float64 gradients and 20 steps are those of the unsplit model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.pipeline.jobs import gradients, same_weights, stages, wide
from tests.support import RankPool, train_here

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
SHORT = [(2, 1, "gpipe"), (3, 1, "1f1b"), (2, 1, "interleaved"), (2, 1, "zero_bubble"), (2, 2, "zbv")]
FULL = [(count, replicas, name) for count in (1, 2, 3, 4) for replicas in (1, 2) for name in SCHEDULES]


def job_of(strategy: Any) -> dict[str, Any]:
    """11 rows of unequal weights a step, which neither replicas nor micro-batches divide."""
    return wide(strategy, steps=20, task={"weighted": True})


@cache
def unsplit() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return gradients(job_of("ddp")), train_here(job_of("ddp"))


def check(pool: RankPool, count: int, replicas: int, schedule: str) -> None:
    expected, plain = unsplit()
    job = job_of(stages(count, schedule, replicas=replicas))
    seen = set()
    for found in pool(count * replicas, gradients, job):
        seen |= set(found)
        for name, grad in found.items():
            assert (grad - expected[name]).abs().max() <= 1e-12, name
    assert seen == set(expected)
    run = pool(count * replicas, train_here, job)[0]
    same_weights(run["model"], plain["model"], 1e-10)
    for key in ("train_loss", "eval_loss", "grad_norm"):
        mine, theirs = ([line[key] for line in lines if key in line] for lines in (run["lines"], plain["lines"]))
        assert mine == pytest.approx(theirs, rel=1e-9)
    groups, others = (result["state"].optimizer["param_groups"] for result in (run, plain))
    assert groups[0]["params"] == others[0]["params"]


@pytest.mark.parametrize(("count", "replicas", "schedule"), SHORT)
def test_each_schedule_equals_the_unsplit_model(ranks: RankPool, count: int, replicas: int, schedule: str) -> None:
    check(ranks, count, replicas, schedule)


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "replicas", "schedule"), FULL)
def test_the_full_product(more_ranks: RankPool, count: int, replicas: int, schedule: str) -> None:
    check(more_ranks, count, replicas, schedule)
