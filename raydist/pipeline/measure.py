"""What each layer costs: time forward and backward, and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raydist.pipeline.layers import Layer
from raydist.plain_table import size as size_of
from raydist.precision import Precision

_REPEATS = 4


@dataclass(frozen=True)
class Cost:
    """One layer: milliseconds of a micro-batch forward and backward; bytes of weights, of what training adds, of its output."""

    name: str
    ms: float
    weights: int
    trained: int
    activations: int


def measure(layers: Sequence[Layer], inputs: tuple[torch.Tensor, ...], precision: Precision) -> list[Cost]:
    """Each layer's cost on `inputs` of the first, each run alone between autograd leaves; the least of four runs.

    `trained` counts a gradient and two moments a weight, as Adam has. Weights, buffers and gradients stay as they were.
    """
    costs = []
    modules = [module for layer in layers for module in layer.modules]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    for layer in layers:
        took, outputs = [], inputs
        for _ in range(_REPEATS):
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
            _wait(leaves)
            began = time.perf_counter()
            with precision.forward():
                outputs = as_tuple(layer.run(*leaves))
            grown = [y for y in outputs if y.requires_grad]
            if grown:
                torch.autograd.backward(grown, [torch.ones_like(y) for y in grown])
            _wait(outputs)
            took.append(time.perf_counter() - began)
        weights = {id(p): p for module in layer.modules for p in module.parameters()}.values()
        size = sum(p.numel() * p.element_size() for p in weights)
        moving = sum(p.numel() * p.element_size() for p in weights if p.requires_grad)
        out = sum(y.numel() * y.element_size() for y in outputs)
        costs.append(Cost(layer.name, min(took) * 1e3, size, 3 * moving, out))
        inputs = tuple(y.detach() for y in outputs)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for module in modules:
        for p in module.parameters():
            p.grad = None
    return costs


def table(costs: Sequence[Cost], ranges: Sequence[tuple[int, int]], stage_of: Sequence[int]) -> list[list[str]]:
    """A row for each run, after the heads: stage, layers, ms of a micro-batch, memory, share of the time."""
    total = sum(cost.ms for cost in costs) or 1.0
    rows = [["stage", "layers", "ms", "memory", "share"]]
    for number, (start, stop) in enumerate(ranges):
        part = costs[start:stop]
        ms, held = sum(c.ms for c in part), sum(c.weights + c.trained + c.activations for c in part)
        names = part[0].name if len(part) == 1 else f"{part[0].name} … {part[-1].name} ({len(part)})"
        rows.append([str(stage_of[number]), names, f"{ms:.2f}", size_of(held), f"{ms / total:.0%}"])
    return rows


def slowest(costs: Sequence[Cost], runs: int) -> str:
    """Words on the layer that takes longest, and whether a single layer exceeds a fair share."""
    total = sum(cost.ms for cost in costs) or 1.0
    slow = max(costs, key=lambda cost: cost.ms)
    words = f"slowest layer: {slow.name}, {slow.ms:.2f} ms, {slow.ms / total:.0%} of all"
    fair = "" if slow.ms * runs <= total else f"; alone more than a fair share of {1 / runs:.0%}, so no cut is even"
    return words + fair


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """A layer's output as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _wait(tensors: Sequence[torch.Tensor]) -> None:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()
