"""What job.yaml trains: a stand-in that runs as it is. Put your data, model and loss in the three marked places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.regression import R2Score

Batch = tuple[Tensor, Tensor]


class Rows(Dataset[Batch]):
    """1. Your data: any map-style torch Dataset. Here: y = sin(3 x0) + x1^2, without noise."""

    def __init__(self, rows: int, seed: int) -> None:
        self.x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.y = torch.sin(3 * self.x[:, 0]) + self.x[:, 1] ** 2

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Batch:
        return self.x[row], self.y[row]


class MyTask:
    """2. Your model, and 3. its loss. `args` of the job file are the arguments of __init__."""

    def __init__(self, hidden: int = 64) -> None:
        self.hidden = hidden

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, self.hidden), nn.GELU(), nn.Linear(self.hidden, self.hidden), nn.GELU(), nn.Linear(self.hidden, 1)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch: raydist weights it by rows (or by `weight(batch)`, if you write one: tokens, say)."""
        return functional.mse_loss(*self.predict(model, batch))

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the metrics compare. Without metrics() it is not needed."""
        x, y = batch
        return model(x).squeeze(1), y

    def metrics(self) -> dict[str, Metric]:
        return {"r2": R2Score()}
