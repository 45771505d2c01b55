"""The numbers of the batch law, on real ranks: LIN is 1 -> 1 without bias from weight 0, y = 3x, SGD at 0.1, squared error.

One step from w on rows x: w - 0.1 * mean(2 x (w x - 3 x)) = w + 0.2 * mean(x^2) * (3 - w).
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydist.config import parse_config
from raydist.control import Control, StepResult
from raydist.data.torch_data import TorchSource, build_dataset
from raydist.errors import DataError, TrainError
from raydist.loop import fit
from raydist.task import build_task
from raydist.world import World
from tests.support import RankError, lin_job, run_ranks, train_here

WORLDS = [1, 2, 3, 4]


def weight(result: dict[str, Any]) -> float:
    return float(result["model"]["weight"].reshape(()))


def run(world_size: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Train on `world_size` ranks; all must end with the same weight."""
    results = [train_here(job)] if world_size == 1 else run_ranks(world_size, train_here, job)
    assert len({weight(r) for r in results}) == 1
    return results


@pytest.mark.parametrize("world_size", WORLDS)
def test_rows_weigh_equally_whatever_the_shares(world_size: int) -> None:
    # mean(x^2) = (4 * 1 + 4) / 5 = 1.6; w = 0.2 * 1.6 * 3 = 0.96
    (result, *_) = run(world_size, lin_job([1, 1, 1, 1, 2], 5))
    assert weight(result) == pytest.approx(0.96, abs=1e-6)
    assert result["state"].counters["step"] == 1


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 1), (1, 3), (1, "auto"), (2, 1), (2, 2), (2, "auto"), (3, 2), (4, 1), (4, 3)]
)
def test_a_short_last_batch_is_a_step_of_its_own(world_size: int, micro: int | str) -> None:
    # w1 = 0.6, w2 = 0.6 + 0.2 * 2.4 = 1.08
    (result, *_) = run(world_size, lin_job([1] * 7, 4, batch__micro_size=micro))
    assert weight(result) == pytest.approx(1.08, abs=1e-6)
    assert result["state"].counters["applied"] == 2
    assert result["state"].counters["rows_seen"] == 7


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_short_last_micro_batch_is_weighted_by_its_rows(world_size: int) -> None:
    (result, *_) = run(world_size, lin_job([1] * 6, 6, batch__micro_size=4))
    assert weight(result) == pytest.approx(0.6, abs=1e-6)
    assert result["state"].counters["step"] == 1
    # unequal rows show a plain mean over micro-batches: 4 rows of x=1 and 2 of x=2 make mean(x^2) = 2, not 2.5
    (result, *_) = run(world_size, lin_job([1, 1, 1, 1, 2, 2], 6, batch__micro_size=4))
    assert weight(result) == pytest.approx(0.2 * 2 * 3, abs=1e-6)


def test_one_row_on_two_workers() -> None:
    (result, *_) = run(2, lin_job([1], 4))
    assert weight(result) == pytest.approx(0.6, abs=1e-6)
    assert result["state"].counters["rows_seen"] == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_logged_loss_is_the_mean_over_the_rows_of_all_ranks(world_size: int) -> None:
    # loss before the step: mean((3x)^2) = 9 * 1.6
    (result, *_) = run(world_size, lin_job([1, 1, 1, 1, 2], 5))
    assert result["lines"][0]["train_loss"] == pytest.approx(14.4, abs=1e-5)


def test_no_rows_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match=r"no rows at all in tests\.support:line"):
        train_here(lin_job([], 4))
    with pytest.raises(DataError, match=r"fewer rows than batch\.global_size = 4, and drop_last"):
        train_here(lin_job([1], 4, data__train__drop_last=True))


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_counts_applied_and_skipped_and_the_schedule_moves_with_applied_only(world_size: int) -> None:
    job = lin_job(
        [1] * 4,
        4,
        train={"epochs": 8, "log_every": {"steps": 1}},
        precision={"name": "fp16", "init_scale": 2.0**20, "growth_interval": 1000},
        schedule={"name": "step", "step_size": 10**6},
    )
    (result, *_) = run(world_size, job)
    counters = result["state"].counters
    assert counters["applied"] + counters["skipped"] == counters["step"] == 8
    # the gradient of the scaled loss passes fp16: 2^20 * 2 * 3 overflows 65504 until the scale is 2^13, seven halvings on
    assert counters["skipped"] == 7
    assert result["state"].schedule["applied"] == counters["applied"]
    assert weight(result) == pytest.approx(3 * (1 - 0.8 ** counters["applied"]), rel=2e-3)


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", {"name": "fp16", "init_scale": 16.0}, {"name": "fp16", "init_scale": 1024.0}]
)
def test_clip_gives_the_same_step_at_any_precision_and_loss_scale(precision: Any) -> None:
    # the gradient is -6, clipped to norm 0.5: w = 0.1 * 0.5 a step, as long as the gradient stays above 0.5
    result = train_here(lin_job([1] * 4, 4, train={"epochs": 3}, precision=precision, clip_grad_norm=0.5))
    assert weight(result) == pytest.approx(0.15, abs=1e-5)


def test_a_clip_norm_above_the_gradient_changes_nothing() -> None:
    assert weight(train_here(lin_job([1] * 4, 4, clip_grad_norm=100.0))) == pytest.approx(0.6, abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------------


# 5 rows: ranks with as many, with fewer, with none; batches of one, with a short last one, of all
@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (1, 5), (2, 2), (3, 1), (3, 2), (4, 5), (5, 2)])
def test_evaluation_is_the_plain_mean_over_rows_and_metrics_come_from_global_totals(world_size: int, size: int) -> None:
    # after one step on x = 1, w = 0.6: errors are -2.4 x
    job = lin_job([1], 4, batch__eval_size=size)
    job["data"]["eval"] = {"target": "tests.support:line", "args": {"xs": [1, 2, 3, 4, 5]}}
    job["task"]["metrics"] = {
        "rmse": {"target": "torchmetrics:MeanSquaredError", "args": {"squared": False}},
        "mae": {"target": "torchmetrics:MeanAbsoluteError"},
    }
    (result, *_) = run(world_size, job)
    line = result["lines"][-1]
    assert line["eval_loss"] == pytest.approx(5.76 * 11, rel=1e-5)
    assert line["eval_rmse"] == pytest.approx(math.sqrt(5.76 * 11), rel=1e-5)
    assert line["eval_mae"] == pytest.approx(2.4 * 3, rel=1e-5)


# -- resume ---------------------------------------------------------------------------------------------------------------


def net_job(**changes: Any) -> dict[str, Any]:
    """A dropout net over 22 shuffled rows, 3 epochs of 6 steps."""
    job = lin_job(
        [0.1 * i for i in range(22)],
        4,
        data__train__shuffle=True,
        train={"epochs": 3, "log_every": {"steps": 1}},
        checkpoint={"every": {"steps": 1}},
    )
    job["task"]["model"] = {"target": "tests.test_loop:dropout_net"}
    for key, value in changes.items():
        job[key] = value
    return job


def dropout_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


SETTINGS = {
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.02}},
    "halving": {
        "optimizer": {"name": "adamw", "lr": 0.02},
        "schedule": {"name": "step", "step_size": 4, "gamma": 0.5, "warmup_steps": 3},
    },
    "fp16": {
        "optimizer": {"name": "adam", "lr": 0.02},
        "precision": {"name": "fp16", "init_scale": 2.0**22, "growth_interval": 3},
    },
    "ema": {
        "optimizer": {"name": "adam", "lr": 0.02},
        "train": {"epochs": 3, "log_every": {"steps": 1}, "ema": {"decay": 0.9}},
    },
    "import path": {
        "optimizer": {"target": "torch.optim:RMSprop", "lr": 0.01},
        "schedule": {"target": "torch.optim.lr_scheduler:ExponentialLR", "args": {"gamma": 0.9}},
    },
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resume_after_any_step_is_bit_identical_to_the_run_that_was_not_interrupted(setting: str) -> None:
    job = net_job(**SETTINGS[setting])
    whole = train_here(job)
    assert whole["state"].counters["step"] == 18
    for step in (1, 2, 6, 8, 11, 17):
        first = train_here(job, stop_after=step)
        assert first["state"].counters["step"] == step
        rest = train_here(job, state=first["state"])
        for part in ("model", "optimizer", "schedule", "scaler", "ema", "counters", "position"):
            assert equal(getattr(rest["state"], part), getattr(whole["state"], part)), (step, part)
        losses = [line["train_loss"] for line in first["lines"] + rest["lines"]]
        assert losses == [line["train_loss"] for line in whole["lines"]]


def test_a_resume_in_the_middle_of_an_epoch_is_bit_identical_on_two_ranks() -> None:
    job = net_job(**SETTINGS["adam"])
    (whole, _) = run_ranks(2, train_here, job)
    (first, _) = run_ranks(2, train_here, job, None, 8)
    (rest, _) = run_ranks(2, train_here, job, first["state"])
    assert first["state"].position == {"epoch": 1, "index": 2}
    assert equal(rest["model"], whole["model"])


def test_a_run_repeats_itself_bit_for_bit_and_another_seed_does_not() -> None:
    job = net_job(**SETTINGS["adam"])
    assert equal(train_here(job)["model"], train_here(job)["model"])
    assert not equal(train_here(job)["model"], train_here({**job, "seed": 1})["model"])


# -- strategies -----------------------------------------------------------------------------------------------------------


class HalfUsed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def rank_dependent() -> torch.nn.Module:
    import os

    model = torch.nn.Linear(1, 1)
    if os.environ.get("RANK") == "1":
        model.weight.data += 1
    return model


def rank_shaped() -> torch.nn.Module:
    import os

    return torch.nn.Sequential(torch.nn.Linear(1, 1 + int(os.environ.get("RANK", "0"))), torch.nn.LazyLinear(1))


def test_an_unused_parameter_is_named_with_the_option_not_a_hang() -> None:
    job = lin_job([1] * 8, 4)
    job["task"]["model"] = {"target": "tests.test_loop:HalfUsed"}
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_here, job, timeout=60)
    for text in caught.value.ranks.values():
        assert "parameter 'spare.weight' and 1 more gets no gradient" in text
        assert "strategy.find_unused_parameters: true" in text
    job["strategy"] = {"name": "ddp", "find_unused_parameters": True}
    run_ranks(2, train_here, job)


def test_models_that_differ_between_ranks_are_named() -> None:
    job = lin_job([1] * 8, 4)
    job["task"]["model"] = {"target": "tests.test_loop:rank_dependent"}
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_here, job, timeout=60)
    assert all("parameter 'weight' has other values on rank 1 than on rank 0" in text for text in caught.value.ranks.values())


@pytest.mark.parametrize(
    "strategy",
    [
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": False},
        {"broadcast_buffers": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_every_ddp_option_gives_the_same_step(strategy: dict[str, Any]) -> None:
    (result, *_) = run(2, lin_job([1, 1, 1, 1, 2], 5, batch__micro_size=2, strategy={"name": "ddp", **strategy}))
    assert weight(result) == pytest.approx(0.96, abs=1e-6)


def test_a_comm_hook_rounds_the_gradient_only() -> None:
    (result, *_) = run(2, lin_job([1, 1, 1, 1, 2], 5, strategy={"name": "ddp", "comm_hook": "fp16_compress"}))
    assert weight(result) == pytest.approx(0.96, rel=1e-3)


def test_a_comm_hook_that_gloo_cannot_do_is_refused() -> None:
    with pytest.raises(RankError, match="bf16_compress needs NCCL, and these workers use gloo"):
        run_ranks(2, train_here, lin_job([1] * 4, 4, strategy={"name": "ddp", "comm_hook": "bf16_compress"}))


def test_dp_and_model_parallel_run_in_one_worker() -> None:
    with pytest.warns(UserWarning, match="ddp is better: one process a GPU"):
        assert weight(train_here(lin_job([1, 1, 1, 1, 2], 5, strategy="dp"))) == pytest.approx(0.96, abs=1e-6)
    job = net_job(**SETTINGS["adam"])
    plain = train_here(job)
    spread = train_here({**job, "strategy": {"name": "model_parallel", "devices": ["cpu", "cpu:0"]}})
    assert equal(plain["model"], spread["model"])


# -- stopping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_early_stop_after_patience_evaluations_without_progress(world_size: int) -> None:
    job = lin_job([1] * 4, 4, train={"epochs": 50, "log_every": {"steps": 1}, "early_stop": {"patience": 2, "min_delta": 1.0}})
    job["data"]["eval"] = {"target": "tests.support:line", "args": {"xs": [1.0]}}
    (result, *_) = run(world_size, job)
    # eval loss after step k is 9 * 0.64^k: 5.76, 3.69, 2.36, 1.51, 0.97...; improvements by 1.0 end with 2.36
    # (1.51 is 0.85 better, 0.97 is 1.39 better than 2.36, then 0.62, 0.40 are not)
    assert [round(line["eval_loss"], 2) for line in result["lines"]] == [5.76, 3.69, 2.36, 1.51, 0.97, 0.62, 0.4]


def test_max_steps_ends_in_the_middle_of_an_epoch() -> None:
    result = train_here(lin_job([1] * 12, 4, train={"max_steps": 5}))
    assert result["state"].counters["step"] == 5
    assert result["state"].position == {"epoch": 1, "index": 2}


def test_a_loss_that_is_not_finite_stops_with_step_and_batch() -> None:
    with pytest.raises(
        TrainError,
        match=r"step 2, rank 0: the loss is nan in rows 4, 5, 6, 7 of tests\.support:line \(global batch 1 of epoch 0\)",
    ):
        train_here(lin_job([1] * 4 + [math.nan] + [1] * 3, 4))


def test_a_bad_step_can_be_skipped_by_all_ranks() -> None:
    job = lin_job([1] * 4 + [math.nan] + [1] * 3, 4, failure={"bad_step": "skip"})
    (result, _) = run(2, job)
    assert weight(result) == pytest.approx(0.6, abs=1e-6)
    assert result["state"].counters["skipped"] == 1
    assert result["events"][0]["kind"] == "bad_step"


def results_of(copies: bool, **checkpoint: Any) -> list[StepResult]:
    """All results of four steps in this process; `copies`: somebody takes copies of the state."""
    config = parse_config(lin_job([1] * 8, 2, train__log_every={"steps": 100}, checkpoint=checkpoint), Path.cwd())
    dataset = build_dataset(config.data.train, "data.train")
    source = TorchSource(dataset, config.data.train, 2, config.seed, 0, 1)
    return list(fit(config, build_task(config.task), World(), source, control=Control(copies=copies)))


@pytest.mark.parametrize(("takes", "copied"), [(True, [2, 4]), (False, [])])
def test_copies_are_handed_out_only_where_somebody_takes_them(takes: bool, copied: list[int]) -> None:
    results = results_of(takes, every={"steps": 3}, memory={"steps": 2})
    assert [result.step for result in results if result.copy] == copied
    assert [result.step for result in results if result.checkpoint] == [3, 4]


def test_copies_by_minutes_go_by_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=10.0)  # each look at the clock is ten seconds later
    faked = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr("raydist.loop.time", faked)
    copied = [result.step for result in results_of(True, every=None, memory={"minutes": 0.1}) if result.copy]
    assert copied == [1, 2, 3, 4]  # six seconds have always passed
    assert not any(result.copy for result in results_of(True, every=None, memory={"minutes": 100}))
