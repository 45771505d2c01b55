"""A pipeline trains what the unsplit model trains: every schedule, tails, weights, clip, ties, replicas, resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import lin_job, run_ranks, train_here


def pp2(y: list[float], size: int, **changes: Any) -> dict[str, Any]:
    job = lin_job(
        [1.0],
        size,
        task__model={"target": "tests.pipeline.models:Pp2"},
        data__train={"target": "tests.pipeline.models:same", "args": {"rows": len(y), "y": y}},
        strategy={"name": "pipeline", "stages": 2, "micro_batches": 3},
    )
    job.update(changes)
    return job


def wide(
    strategy: Any, rows: int = 22, size: int = 11, steps: int = 4, task: dict[str, Any] | None = None, **changes: Any
) -> dict:
    job: dict[str, Any] = {
        "name": "wide",
        "task": {"target": "tests.pipeline.models:WideTask", "args": task or {}},
        "data": {
            "train": {"target": "tests.pipeline.models:wide", "args": {"rows": rows}, "shuffle": True},
            "eval": {"target": "tests.pipeline.models:wide", "args": {"rows": 9}},
        },
        "batch": {"global_size": size, "eval_size": 4},
        "train": {"max_steps": steps, "log_every": {"steps": 1}, "eval_every": {"steps": 2}},
        "optimizer": {"name": "adamw", "lr": 0.01, "fused": False},
        "clip_grad_norm": 0.5,
        "strategy": strategy,
    }
    job.update(changes)
    return job


def same_weights(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert list(one) == list(other)
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=0, atol=tolerance), (name, one[name] - other[name])


def test_the_mean_is_over_rows_not_micro_batches() -> None:
    for y, expected in ([5.0] * 7, 1.8), ([1.0] * 5 + [8.0] * 2, 1.4):
        found = run_ranks(2, train_here, pp2(y, 7))[0]["model"]
        assert [float(w) for w in found.values()] == pytest.approx([expected, expected], abs=1e-6)


def test_a_tail_smaller_than_the_micro_batches_and_an_evaluation_of_any_size() -> None:
    job = wide({"name": "pipeline", "stages": 2, "micro_batches": 4}, rows=13, size=11)
    plain = train_here({**job, "strategy": "ddp"})
    found = run_ranks(2, train_here, job)[0]
    same_weights(found["model"], plain["model"], 1e-10)
    for key in ("train_loss", "eval_loss", "grad_norm"):
        mine, theirs = ([line[key] for line in run["lines"] if key in line] for run in (found, plain))
        assert mine == pytest.approx(theirs, rel=1e-9)


CASES = [
    (1, 1, "gpipe"),
    (3, 1, "1f1b"),
    (2, 2, "zbv"),
    *[
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            (2, 1, "gpipe"),
            (2, 1, "interleaved"),
            (2, 1, "zero_bubble"),
            (4, 1, "1f1b"),
            (4, 1, "zbv"),
            (2, 2, "1f1b"),
            (2, 2, "interleaved"),
            (2, 2, "zero_bubble"),
        )
    ],
]


@pytest.mark.parametrize(("stages", "replicas", "schedule"), CASES)
def test_every_schedule_equals_the_unsplit_model(stages: int, replicas: int, schedule: str) -> None:
    strategy = {"name": "pipeline", "stages": stages, "replicas": replicas, "schedule": schedule, "micro_batches": 2 * stages}
    job = wide(strategy, steps=20, task={"weighted": True})
    plain = train_here({**job, "strategy": "ddp"})
    found = run_ranks(stages * replicas, train_here, job)[0]
    same_weights(found["model"], plain["model"], 1e-10)
    assert found["lines"][0]["grad_norm"] == pytest.approx(plain["lines"][0]["grad_norm"], rel=1e-12)
    assert found["state"].optimizer["param_groups"][0]["params"] == plain["state"].optimizer["param_groups"][0]["params"]


def test_accumulation_is_one_larger_batch() -> None:
    strategy = {"name": "pipeline", "stages": 2, "micro_batches": 2}
    once = run_ranks(2, train_here, wide(strategy, rows=12, size=12, batch={"global_size": 12}))[0]
    thrice = run_ranks(2, train_here, wide(strategy, rows=12, size=12, batch={"global_size": 12, "micro_size": 2}))[0]
    same_weights(once["model"], thrice["model"], 1e-12)


def test_tied_weights_stay_tied_and_right() -> None:
    job = wide({"name": "pipeline", "stages": 3, "micro_batches": 3}, task={"tied": True}, steps=10)
    plain = train_here({**job, "strategy": "ddp"})
    found = run_ranks(3, train_here, job)[0]
    same_weights(found["model"], plain["model"], 1e-10)
    assert torch.equal(found["model"]["inside.weight"], found["model"]["outside.weight"])
    mine, theirs = ([line["grad_norm"] for line in run["lines"]] for run in (found, plain))
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.nightly
def test_dropout_and_recomputed_activations_depend_on_neither_cut_nor_schedule() -> None:
    task = {"dropout": 0.4}
    runs = [
        run_ranks(stages, train_here, wide({"name": "pipeline", "stages": stages, "micro_batches": 4, **more}, task=task))[0]
        for stages, more in ((2, {}), (4, {"checkpoint_activations": True}), (2, {"schedule": "zbv", "cut": [1, 3, 2, 2]}))
    ]
    for run in runs[1:]:
        same_weights(run["model"], runs[0]["model"], 1e-12)


def test_four_stages_then_two_then_ddp_then_three() -> None:
    def job(strategy: Any) -> dict[str, Any]:
        train = {"max_steps": 12, "log_every": {"steps": 1}, "ema": {"decay": 0.5}}
        return wide(strategy, rows=40, size=8, train=train)

    def stages(count: int) -> dict[str, Any]:
        return {"name": "pipeline", "stages": count, "micro_batches": 4}

    whole = train_here(job("ddp"))
    lines = []
    state = None
    for ranks, strategy, stop in ((4, stages(4), 3), (2, stages(2), 6), (1, "ddp", 9), (3, stages(3), None)):
        found = run_ranks(ranks, train_here, job(strategy), state, stop)[0]
        state = found["state"]
        lines += [line["train_loss"] for line in found["lines"]]
    expected = [line["train_loss"] for line in whole["lines"]]
    assert lines == pytest.approx(expected, rel=1e-9)
    same_weights(state.model, whole["model"], 1e-10)
    same_weights(state.ema, whole["state"].ema, 1e-10)


def test_fp16_has_one_scaler_decision() -> None:
    """The scale starts so high that the first steps overflow in one stage or the other; every stage skips them."""
    job = wide({"name": "pipeline", "stages": 2, "micro_batches": 2})
    job |= {"precision": {"name": "fp16", "init_scale": 2.0**40}, "task": {"target": "tests.pipeline.models:NarrowTask"}}
    job |= {"train": {"max_steps": 40, "log_every": {"steps": 40}}, "data": {"train": job["data"]["train"]}}
    found = run_ranks(2, train_here, job)
    scales = [run["state"].scaler["scale"] for run in found]
    assert scales[0] == scales[1] < 2.0**40
    assert found[0]["state"].counters["skipped"] == found[1]["state"].counters["skipped"] > 0
