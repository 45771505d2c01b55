"""Which rank holds which stage of which replica, and the groups they talk in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from raydist.errors import ConfigError
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy


@dataclass(frozen=True)
class Grid:
    """Rank `replica * stages + stage`: the stages of a replica are neighbours, and so on one node where they fit.

    `line` joins the stages of this replica, `line_control` the same over gloo; `column` joins the replicas of this stage.
    `peers` is the world of these replicas: who shares a global batch.
    """

    stage: int
    stages: int
    replica: int
    replicas: int
    line: Any
    line_control: Any
    column: Any
    peers: World

    def global_rank(self, stage: int) -> int:
        """The rank that holds `stage` of this replica."""
        return self.replica * self.stages + stage


def make_grid(strategy: PipelineStrategy, world: World) -> Grid:
    """The grid of a pipeline, with new process groups. Every rank must call it."""
    stages, replicas = strategy.stages, strategy.replicas
    if world.world_size != strategy.workers:
        raise ConfigError(
            f"strategy pipeline: {stages} stages x {replicas} replicas are {strategy.workers} workers, "
            f"and {world.world_size} were started"
        )
    replica, stage = divmod(world.rank, stages)
    lines = [[r * stages + s for s in range(stages)] for r in range(replicas)]
    columns = [[r * stages + s for r in range(replicas)] for s in range(stages)]
    line = line_control = column = control = None
    if world.world_size > 1:
        made = [(dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in lines]
        line, line_control = made[replica]
        if replicas > 1:
            made = [(dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in columns]
            column, control = made[stage]
    peers = replace(world, rank=replica, world_size=replicas, control=control, owns_group=False)
    return Grid(stage, stages, replica, replicas, line, line_control, column, peers)
