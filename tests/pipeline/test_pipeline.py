"""A pipeline trains what the unsplit model trains: tails, accumulation, ties, BatchNorm, dropout, bf16, fp16, resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipeline.jobs import same_weights, stages, wide
from tests.support import RankPool, train_here


def test_a_tail_smaller_than_the_micro_batches_and_an_evaluation_of_any_size(ranks: RankPool) -> None:
    job = wide({"name": "pipeline", "stages": 2, "micro_batches": 4}, rows=13, size=11)
    plain = train_here({**job, "strategy": "ddp"})
    found = ranks(2, train_here, job)[0]
    same_weights(found["model"], plain["model"], 1e-10)
    for key in ("train_loss", "eval_loss", "grad_norm"):
        mine, theirs = ([line[key] for line in run["lines"] if key in line] for run in (found, plain))
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_accumulation_is_one_larger_batch(ranks: RankPool) -> None:
    strategy = {"name": "pipeline", "stages": 2, "micro_batches": 2}
    once = ranks(2, train_here, wide(strategy, rows=12, size=12, batch={"global_size": 12}))[0]
    thrice = ranks(2, train_here, wide(strategy, rows=12, size=12, batch={"global_size": 12, "micro_size": 2}))[0]
    same_weights(once["model"], thrice["model"], 1e-12)


def test_tied_weights_stay_tied_and_right(ranks: RankPool) -> None:
    job = wide({"name": "pipeline", "stages": 3, "micro_batches": 3}, task={"tied": True}, steps=10)
    plain = train_here({**job, "strategy": "ddp"})
    found = ranks(3, train_here, job)[0]
    same_weights(found["model"], plain["model"], 1e-10)
    assert torch.equal(found["model"]["inside.weight"], found["model"]["outside.weight"])
    mine, theirs = ([line["grad_norm"] for line in run["lines"]] for run in (found, plain))
    assert mine == pytest.approx(theirs, rel=1e-9)


def test_dropout_and_recomputed_activations_depend_on_neither_cut_nor_schedule(ranks: RankPool) -> None:
    task = {"dropout": 0.4}
    runs = [
        ranks(count, train_here, wide({**stages(count), "micro_batches": 4, **more}, task=task))[0]
        for count, more in ((2, {}), (4, {"checkpoint_activations": True}), (2, {"schedule": "zbv", "cut": [1, 3, 2, 2]}))
    ]
    for run in runs[1:]:
        same_weights(run["model"], runs[0]["model"], 1e-12)


def test_four_stages_then_two_then_ddp_then_three(ranks: RankPool) -> None:
    def job(strategy: Any) -> dict[str, Any]:
        train = {"max_steps": 12, "log_every": {"steps": 1}, "ema": {"decay": 0.5}}
        return wide(strategy, rows=40, size=8, train=train)

    whole = train_here(job("ddp"))
    lines = []
    state = None
    for count, strategy, stop in ((4, stages(4), 3), (2, stages(2), 6), (1, "ddp", 9), (3, stages(3), None)):
        found = ranks(count, train_here, job(strategy), state, stop)[0]
        state = found["state"]
        lines += [line["train_loss"] for line in found["lines"]]
    expected = [line["train_loss"] for line in whole["lines"]]
    assert lines == pytest.approx(expected, rel=1e-9)
    same_weights(state.model, whole["model"], 1e-10)
    same_weights(state.ema, whole["state"].ema, 1e-10)


def test_fp16_has_one_scaler_decision(ranks: RankPool) -> None:
    """The scale starts so high that the first steps overflow in one stage or the other; every stage skips them."""
    job = wide({"name": "pipeline", "stages": 2, "micro_batches": 2})
    job |= {"precision": {"name": "fp16", "init_scale": 2.0**40}, "task": {"target": "tests.pipeline.models:NarrowTask"}}
    job |= {"train": {"max_steps": 40, "log_every": {"steps": 40}}, "data": {"train": job["data"]["train"]}}
    found = ranks(2, train_here, job)
    scales = [run["state"].scaler["scale"] for run in found]
    assert scales[0] == scales[1] < 2.0**40
    assert found[0]["state"].counters["skipped"] == found[1]["state"].counters["skipped"] > 0


def test_batchnorm_normalises_within_a_micro_batch_as_accumulation_does(ranks: RankPool) -> None:
    job = wide(stages(2), rows=24, size=12, steps=6, batch={"global_size": 12, "eval_size": 4})
    job["task"] = {"target": "tests.pipeline.models:NormTask"}
    found = ranks(2, train_here, job)[0]
    alone = {**job, "strategy": "ddp", "batch": {"global_size": 12, "micro_size": 3, "eval_size": 4}}
    plain = train_here(alone)
    same_weights(found["model"], plain["model"], 1e-10)  # running statistics included
    assert found["state"].buffers == plain["state"].buffers == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    mine, theirs = ([line["eval_loss"] for line in run["lines"] if "eval_loss" in line] for run in (found, plain))
    assert mine == pytest.approx(theirs, rel=1e-9)


def test_bf16_is_that_of_the_unsplit_model(ranks: RankPool) -> None:
    """The same micro-batches go through the same kernels: only the order in which float32 gradients are added may differ."""
    job = wide(stages(2), rows=24, size=12, steps=6, precision="bf16", batch={"global_size": 12})
    job |= {"task": {"target": "tests.pipeline.models:NarrowTask"}, "data": {"train": job["data"]["train"]}}
    job["train"] = {"max_steps": 6, "log_every": {"steps": 1}}
    found = ranks(2, train_here, job)[0]
    plain = train_here({**job, "strategy": "ddp", "batch": {"global_size": 12, "micro_size": 3}})
    same_weights(found["model"], plain["model"], 1e-6)
    full = train_here({**job, "strategy": "ddp", "precision": "fp32"})
    assert any((found["model"][name] - full["model"][name]).abs().max() > 1e-6 for name in full["model"])
