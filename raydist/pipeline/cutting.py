"""The cut of a model: measured, made, and told as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raydist.pipeline.known import costs_of
from raydist.pipeline.layers import Layer
from raydist.pipeline.measure import Cost, slowest, table
from raydist.pipeline.orders import limit
from raydist.pipeline.partition import cut, cut_as_asked
from raydist.plain_table import aligned
from raydist.precision import Precision

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy


@dataclass(frozen=True)
class Cutting:
    """Half-open ranges of layers, one a run, and what was measured (empty where nothing was)."""

    strategy: PipelineStrategy
    ranges: list[tuple[int, int]]
    costs: list[Cost]
    remembered: bool = False
    """Whether the costs were measured by an earlier run on this machine."""

    @property
    def bubble(self) -> float | None:
        """The bubble that the schedule has with these runs, sending aside."""
        if not self.costs:
            return None
        return limit(self.strategy, [sum(cost.ms for cost in self.costs[a:b]) for a, b in self.ranges])

    def lines(self) -> list[str]:
        """The table for people."""
        strategy = self.strategy
        head = f"{strategy.stages} stages x {strategy.replicas} replicas, {strategy.schedule}, {strategy.micro} micro-batches"
        if not self.costs:
            return [head]
        rows = table(self.costs, self.ranges, [strategy.rank_of(run) for run in range(strategy.runs)])
        before = "; times as measured before" if self.remembered else ""
        return [head, *aligned(rows), slowest(self.costs, strategy.runs), f"expected bubble: {self.bubble:.0%}{before}"]

    def plain(self) -> dict[str, Any]:
        """As JSON: layers of each run, in ms and bytes."""
        runs = [
            {
                "stage": self.strategy.rank_of(run),
                "layers": [cost.name for cost in self.costs[a:b]],
                "ms": sum(cost.ms for cost in self.costs[a:b]),
                "bytes": sum(cost.weights + cost.trained + cost.activations for cost in self.costs[a:b]),
            }
            for run, (a, b) in enumerate(self.ranges)
        ]
        return {"runs": runs if self.costs else [], "bubble": self.bubble}


def make_cut(
    strategy: PipelineStrategy, layers: Sequence[Layer], inputs: tuple[torch.Tensor, ...] | None, precision: Precision
) -> Cutting:
    """The cut that the job file asks for. ConfigError if none fits.

    `inputs` are the model's for one micro-batch; without them nothing is measured, and `auto` goes by parameters.
    """
    names = [layer.name for layer in layers]
    asked = cut_as_asked(strategy.cut, names) if isinstance(strategy.cut, list) else None
    costs, remembered = ([], False) if inputs is None else costs_of(layers, inputs, precision)
    if asked is not None:
        return Cutting(strategy, asked, costs, remembered)
    if not costs:
        sizes = [float(1 + sum(p.numel() for m in layer.modules for p in m.parameters())) for layer in layers]
        return Cutting(strategy, cut(sizes, strategy.runs), costs)
    most = None if strategy.memory_gb is None else strategy.memory_gb * 2**30
    ranges = cut([c.ms for c in costs], strategy.runs, [float(c.weights + c.trained) for c in costs], most)
    return Cutting(strategy, ranges, costs, remembered)
