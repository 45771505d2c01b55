"""What `pipeline.py` trains: a transformer in 2 or 4 stages, and stages that sleep. Under torchrun, it is the plain contender:

torchrun --nproc_per_node=2 stages.py --steps 60 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import text
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from raydist.models import CharTransformer

ROWS, LOG_EVERY, LR, MICRO = 32, 5, 3e-4, 8
CUTS = {2: [5, 5], 4: [3, 3, 2, 2]}
"""Layers of each stage: the embedding, eight blocks, the output."""
FORWARD_S, BACKWARD_S = 0.010, 0.020


def model() -> CharTransformer:
    """The same weights in every process."""
    torch.manual_seed(0)
    return CharTransformer(256, dim=192, heads=6, layers=8, context=32)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all characters."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Task:
    """The transformer as raydist's task."""

    def build_model(self) -> nn.Module:
        return model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model(batch[0]), batch[1])


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return grad


class Sleeper(nn.Module):
    """A layer that does nothing for 10 ms forward and 20 ms backward, and leaves the CPU to others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * self.weight)  # type: ignore[no-any-return]


class SleepTask:
    """Four stages that sleep."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Sleeper() for _ in range(4)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()


def numbers(rows: int) -> Dataset[Any]:
    """`rows` rows of two numbers."""
    return TensorDataset(torch.ones(rows, 2), torch.ones(rows, 2))


class Part(nn.Module):
    """Some of the transformer's layers."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.held = nn.ModuleList(module for layer in layers for module in layer.modules)
        self.runs = [layer.run for layer in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for run in self.runs:
            x = run(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    start = sum(CUTS[stages][:rank])
    part = Part(model().pipeline_layers()[start : start + CUTS[stages][rank]])
    size = ROWS // MICRO
    ids, wide, logits = torch.zeros(size, 32, dtype=torch.long), torch.zeros(size, 32, 192), torch.zeros(size, 32, 256)
    stage = pipelining.PipelineStage(
        part,
        rank,
        stages,
        torch.device("cpu"),
        input_args=ids if rank == 0 else wide.requires_grad_(),
        output_args=logits.requires_grad_() if rank == stages - 1 else wide.requires_grad_(),
    )
    schedule = pipelining.Schedule1F1B(stage, MICRO, loss_fn=loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LR, weight_decay=0.01)
    data: Any = text(ROWS * options.steps)
    total, began = torch.zeros(()), time.perf_counter()
    for step in range(options.steps):
        inputs, targets = data[step * ROWS : (step + 1) * ROWS]
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets if rank == stages - 1 else None, losses=losses)
        squares = torch.stack([p.grad.square().sum() for p in part.parameters() if p.grad is not None]).sum()
        dist.all_reduce(squares)
        if (norm := float(squares.sqrt())) > 1.0:
            for p in part.parameters():
                if p.grad is not None:
                    p.grad.mul_(1.0 / norm)
        optimizer.step()
        optimizer.zero_grad()
        total += torch.stack(losses).mean().detach() if losses else 0.0
        if (step + 1) % LOG_EVERY == 0:
            dist.all_reduce(total)
            now = time.perf_counter()
            if rank == 0:
                line = {"step": step + 1, "train_loss": float(total) / LOG_EVERY, "step_s": (now - began) / LOG_EVERY}
                with open(options.out / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
            total, began = torch.zeros(()), time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
