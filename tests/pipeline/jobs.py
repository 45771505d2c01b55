"""Jobs of the pipeline's tests, and what they compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raydist.config import parse_config
from raydist.data.source import Position, StepData
from raydist.data.torch_data import TorchSource, build_dataset
from raydist.pipeline.grid import make_grid
from raydist.pipeline.orders import Action
from raydist.pipeline.sample import inputs_of
from raydist.task import build_task
from raydist.trainer import Trainer
from raydist.world import from_env
from tests.support import lin_job


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


def stages(count: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    """A pipeline of `count` stages, with twice as many micro-batches."""
    return {"name": "pipeline", "stages": count, "schedule": schedule, "micro_batches": 2 * count, **more}


@contextmanager
def trainer_of(job: dict[str, Any]) -> Iterator[tuple[Trainer, StepData]]:
    """This rank's trainer (world from the environment) and the first global batch."""
    config = parse_config(job, Path.cwd())
    world = peers = from_env(config.scaling.backend)
    sample = None
    try:
        strategy: Any = config.strategy
        if strategy.name == "pipeline" and strategy.stages > 1:
            world = replace(world, grid=make_grid(strategy, world))
            peers = world.grid.peers
        data = config.data.train
        size = config.batch.global_size
        source = TorchSource(build_dataset(data, "data.train"), data, size, config.seed, peers.rank, peers.world_size)
        task = build_task(config.task)
        if world is not peers:
            sample = partial(inputs_of, config, task, world, source)
        yield Trainer(config, task, world, 1, sample), next(iter(source.steps(Position(), 1)))
    finally:
        world.close()


def gradients(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradient of the first global batch by parameter name, of the layers that this rank holds."""
    with trainer_of(job) as (trainer, data):
        assert bool(trainer.passes.run(data, 0))
        return {name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}


def actions(job: dict[str, Any]) -> list[Action]:
    """What this rank's stage did in the second pass, in order."""
    with trainer_of(job) as (trainer, data):
        for done in range(2):
            trainer.passes.run(data, done)
        return [span.action for span in trainer.passes.clock.spans]  # type: ignore[attr-defined]
