"""One run of layers as torch's schedules want it, and the shapes between runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.pipeline.layers import Layer
from raydist.pipeline.measure import as_tuple
from raydist.precision import Precision
from raydist.randomness import derive, seed_torch

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy
    from raydist.pipeline.grid import Grid

Meta = list[tuple[list[int], torch.dtype, bool]]
"""Of each tensor between two runs: shape, dtype, whether it needs a gradient."""


class Chunk(nn.Module):
    """Layers `first`, `first + 1`, … of a model, under autocast. Random numbers depend on step, micro-batch and layer alone."""

    def __init__(self, layers: Sequence[Layer], first: int, precision: Precision, recompute: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(module for layer in layers for module in layer.modules)
        self.layers, self.first, self.precision, self.recompute = list(layers), first, precision, recompute
        self.calls = 0
        self.seed: tuple[int, int, int] | None = None

    def start(self, seed: int, step: int, replica: int) -> None:
        """A new step begins: micro-batches count from 0."""
        self.calls, self.seed = 0, (seed, step, replica)

    def forward(self, *args: torch.Tensor) -> Any:
        """What the layers make of one micro-batch."""
        micro, self.calls = self.calls, self.calls + 1
        with self.precision.forward():
            for number, layer in enumerate(self.layers, self.first):
                if self.training and self.seed is not None:
                    seed_torch(derive(*self.seed[:1], "layer", *self.seed[1:], micro, number))
                if self.recompute and torch.is_grad_enabled():
                    args = as_tuple(checkpoint(layer.run, *args, use_reentrant=False))
                else:
                    args = as_tuple(layer.run(*args))
        return args[0] if len(args) == 1 else args


def blank(meta: Meta, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Zeros of these shapes: what stands for a tensor of which only the shape is known."""
    return tuple(torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad) for shape, dtype, grad in meta)


def meta_of(tensors: Sequence[torch.Tensor], needs_grad: bool) -> Meta:
    """The shapes of `tensors`; floating-point ones need a gradient if `needs_grad`."""
    return [(list(t.shape), t.dtype, needs_grad and t.is_floating_point()) for t in tensors]


def shapes(
    chunks: dict[int, Chunk], strategy: PipelineStrategy, grid: Grid, device: torch.device, inputs: Meta | None
) -> dict[int, tuple[Meta, Meta]]:
    """Shapes into and out of each run held here, found by one forward of zeros. Every stage of the replica must call it.

    In eval mode and without gradients, so that no BatchNorm statistic moves. `inputs` is what stage 0 got.
    """
    found = {}
    passed: Meta | None = inputs
    for run, chunk in sorted(chunks.items()):
        before = strategy.rank_of(run - 1) if run else grid.stage
        if before != grid.stage:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=grid.global_rank(before), group=grid.line_control)
            passed = box[0]
        assert passed is not None
        was = chunk.training
        chunk.eval()
        with torch.no_grad():
            out = as_tuple(chunk(*(t.detach() for t in blank(passed, device))))
        chunk.train(was)
        trains = any(grad for _, _, grad in passed) or any(p.requires_grad for p in chunk.parameters())
        found[run] = (passed, meta_of(out, trains))
        passed = found[run][1]
        if run + 1 < strategy.runs and (after := strategy.rank_of(run + 1)) != grid.stage:
            dist.send_object_list([passed], dst=grid.global_rank(after), group=grid.line_control)
    return found
