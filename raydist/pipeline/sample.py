"""One micro-batch of the job's data, to measure layers on."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raydist.batching import padded_share
from raydist.data.source import Position, TrainSource
from raydist.errors import TrainError
from raydist.pipeline.stand_in import Inputs, seeing
from raydist.task import Task, slice_rows, to_device
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig


def inputs_of(config: JobConfig, task: Task, world: World, train: TrainSource, model: nn.Module) -> tuple[torch.Tensor, ...]:
    """What the task gives `model` in the first micro-batch of the data."""
    strategy: Any = config.strategy
    asked = config.batch.micro_size
    with closing(train.steps(Position(), 1)) as steps:  # type: ignore[type-var]
        data = next(steps)
    rows = asked if isinstance(asked, int) else -(-padded_share(data.global_rows, strategy.replicas) // strategy.micro)
    return inputs_in(task, model, data.batch, rows, world.device)


def inputs_in(task: Task, model: nn.Module, batch: Any, rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What the task gives `model` for the first `rows` rows of `batch`."""
    try:
        task.loss(seeing(model), to_device(slice_rows(batch, 0, rows), device))
    except Inputs as seen:
        return tuple(seen.args)
    raise TrainError("strategy pipeline: the task's loss does not call the model")
