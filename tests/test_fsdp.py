"""Sharded training: the numbers, checkpoints and errors of ddp, with a shard on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist.config import parse_config
from raydist.errors import ConfigError
from raydist.fsdp import check_shardable, units_of
from raydist.planning.memory import measure
from raydist.task import build_task
from tests.pipeline.jobs import same_weights, stages, wide
from tests.support import RankPool, lin_job, train_here


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def job_of(strategy: Any, **changes: Any) -> dict[str, Any]:
    """11 rows of unequal weights a step, in micro-batches of 2: uneven shares and tails on 2 and 3 ranks."""
    return wide(
        strategy, rows=26, task={"weighted": True}, batch={"global_size": 11, "micro_size": 2, "eval_size": 4}, **changes
    )


def check_same(run: dict[str, Any], plain: dict[str, Any], tolerance: float = 1e-10) -> None:
    same_weights(run["model"], plain["model"], tolerance)
    for key in ("train_loss", "eval_loss", "grad_norm"):
        mine, theirs = ([line[key] for line in lines if key in line] for lines in (run["lines"], plain["lines"]))
        assert mine == pytest.approx(theirs, rel=max(1e-9, tolerance))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("more", [{}, {"reduce_each_micro_batch": False, "reshard_after_forward": False}])
def test_numbers_are_those_of_one_worker(ranks: RankPool, workers: int, more: dict[str, Any]) -> None:
    plain = train_here(job_of("ddp"))
    found = ranks(workers, train_here, job_of({"name": "fsdp", **more}))
    check_same(found[0], plain)
    mine, theirs = (run["state"].optimizer for run in (found[0], plain))
    for at, moments in theirs["state"].items():
        assert torch.allclose(mine["state"][at]["exp_avg_sq"], moments["exp_avg_sq"], atol=1e-12)
    assert all(t.numel() == 0 for name, t in found[1]["model"].items() if "weight" in name)  # rank 0 alone has it whole


def test_a_run_goes_on_as_anything_else(ranks: RankPool) -> None:
    """fsdp on 2 -> ddp on 1 -> fsdp on 3 -> pipeline of 2 stages -> fsdp on 2, two steps each."""
    plain = train_here(job_of("ddp", steps=10))
    state = None
    order = [(2, "fsdp"), (1, "ddp"), (3, "fsdp"), (2, stages(2)), (2, "fsdp")]
    for number, (workers, strategy) in enumerate(order, start=1):
        run = ranks(workers, train_here, job_of(strategy, steps=10), state, 2 * number)[0]
        state = run["state"]
        assert state.counters["step"] == 2 * number
    same_weights(state.model, plain["model"], 1e-10)


@pytest.mark.parametrize("precision", ["bf16", {"name": "fp16", "init_scale": 1024.0}])
def test_autocast_follows_ddp(ranks: RankPool, precision: Any) -> None:
    runs = [ranks(2, train_here, job_of(name, precision=precision))[0] for name in ("ddp", "fsdp")]
    check_same(runs[1], runs[0], 1e-3)
    assert runs[0]["state"].scaler == runs[1]["state"].scaler


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_bad_row_is_skipped_on_all_ranks_and_named(ranks: RankPool, tmp_path: Any, precision: str) -> None:
    job = job_of("fsdp", failure={"bad_step": "skip"}, precision=precision)
    poison = (str(tmp_path), [{"kind": "nan", "rank": 1, "step": 2}])
    found = ranks(2, train_here, job, None, None, poison)
    assert [r["state"].counters["skipped"] for r in found] == [1, 1]
    reasons = [e["reason"] for e in found[0]["events"] if e["kind"] == "bad_step"]
    assert len(reasons) == 1
    assert "step 2, rank 1: the loss is nan in rows" in reasons[0]
    assert all(math.isfinite(line["eval_loss"]) for line in found[0]["lines"] if "eval_loss" in line)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Identity()])
        self.head = nn.ModuleList([nn.Linear(4, 5, bias=False)])
        self.head[0].weight = self.embed.weight


def test_units_are_the_entries_of_lists_but_for_tied_ones() -> None:
    assert list(units_of(Tied())) == ["blocks.0", "blocks.1.0"]
    assert list(units_of(Tied(), ["blocks.1"])) == ["blocks.1"]
    with pytest.raises(ConfigError, match=r"'head\.0' shares the weight 'embed\.weight' with a module outside"):
        units_of(Tied(), ["head.0"])
    with pytest.raises(ConfigError, match="no part 'block'"):
        units_of(Tied(), ["block"])
    with pytest.raises(ConfigError, match="'blocks' is a list of modules"):
        units_of(Tied(), ["blocks"])


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


def test_gathering_in_bf16_stays_close(ranks: RankPool) -> None:
    """Weights of float64 gathered with 8 bits of mantissa: losses within 1 %, and the kept weights stay float64."""
    plain = train_here(job_of("ddp"))
    found = ranks(
        2, train_here, job_of({"name": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32"}, scaling={"workers": 2})
    )[0]
    assert [a["train_loss"] for a in found["lines"]] == pytest.approx([b["train_loss"] for b in plain["lines"]], rel=0.02)
    assert {t.dtype for t in found["model"].values()} == {torch.float64}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"max_steps": 1, "ema": {}}}, "train.ema"),
        ({"train": {"max_steps": 1, "compile": True}}, "train.compile"),
        ({"strategy": {"name": "fsdp", "param_dtype": "fp16"}, "scaling": {"workers": 2}}, "strategy.param_dtype"),
        ({"strategy": {"name": "fsdp", "cpu_offload": True}}, "at least 2 workers"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**job_of("fsdp"), **changes}, Path.cwd())


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'factor' has no dimension to shard; give it the shape \[1\]"):
        check_shardable(Scalar(), {})
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    check_shardable(mixed, units_of(mixed))
    with pytest.raises(ConfigError, match=r"unit 'the rest' are torch\.float32 and torch\.float64"):
        check_shardable(mixed, {})


class Four(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(4)))


def test_plan_counts_shards_and_the_largest_units() -> None:
    """Four layers of 42 float32 numbers, 168 bytes each; AdamW keeps two more of each, and a step count of 4 bytes a tensor."""
    job = lin_job(
        [1.0], 1, task__model={"target": "tests.test_fsdp:Four"}, strategy="fsdp", optimizer={"name": "adamw", "lr": 0.1}
    )
    config = parse_config({**job, "scaling": {"workers": 2}}, Path.cwd())
    memory = measure(config, build_task(config.task), None, None, 2)
    assert (memory.weights, memory.gradients) == (4 * 168 // 2, 4 * 168 // 2)
    assert memory.gathered == 2 * 168 + 168  # the unit that runs and the next one; the gradient of one
    assert memory.optimizer is not None
    assert 4 * 168 <= memory.optimizer <= 4 * 168 + 8 * 4
