"""What the chaos runs train: a small model that counts, in its own weights, how often each row was used."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

LR = 2.0**-4


class Rows(Dataset[Any]):
    """Rows (x of shape (4,), y of shape (), row number), each the same whenever it is read. A row takes `delay` seconds."""

    def __init__(self, rows: int, delay: float = 0.0) -> None:
        self.x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sum(1).sin()
        self.delay = delay

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.delay)
        return self.x[row], self.y[row], row


class Net(nn.Module):
    """An MLP with dropout, and `uses` of shape (rows,): a weight a row, which each use of the row lowers by the same amount."""

    def __init__(self, rows: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.uses = nn.Parameter(torch.zeros(rows))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x).squeeze(1), self.uses[row]


class Task:
    """Mean squared error plus the mean of `uses` over the batch's rows: d loss / d uses[row] is 1 / rows."""

    def __init__(self, rows: int, dropout: float = 0.0) -> None:
        self.rows, self.dropout = rows, dropout

    def build_model(self) -> Net:
        return Net(self.rows, self.dropout)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, row = batch
        predicted, uses = model(x, row)
        return nn.functional.mse_loss(predicted, y) + uses.mean()


class Momentum(torch.optim.SGD):
    """SGD with momentum, but plain SGD for `uses` (the one vector), so that its values count."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        every = list(params)
        rows = max(every, key=lambda p: p.numel() if p.dim() == 1 else 0)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in every if p is not rows], "momentum": 0.9},
            {"params": [rows], "momentum": 0.0},
        ]
        super().__init__(groups, lr=lr)


def times_used(model: dict[str, torch.Tensor], global_size: int) -> list[float]:
    """How often each row has gone into an applied step: exact, all factors are powers of two."""
    return [float(v) for v in (-model["uses"] * global_size / LR)]
