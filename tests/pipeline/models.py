"""Models and data of the pipeline's tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from raydist.pipeline import Layer


class Pp2(nn.Sequential):
    """pred = b·(a·x), a = b = 1."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for layer in self:
            nn.init.ones_(layer.weight)


class Deep(nn.Sequential):
    """Eight layers of float64."""

    def __init__(self, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(6, 6), nn.Sequential(nn.GELU(), nn.Dropout(dropout))]
        super().__init__(*layers)
        self.double()


class Tied(nn.Module):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.outside = nn.Linear(6, 6)
        self.outside.weight = self.inside.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.pipeline_layers():
            x = layer.run(x)
        return x

    def pipeline_layers(self) -> list[Layer]:
        first = [Layer("inside", lambda x: torch.tanh(self.inside(x)), [self.inside])]
        middle = [Layer(f"middle.{i}", lambda x, m=m: torch.tanh(m(x)), [m]) for i, m in enumerate(self.middle)]
        return [*first, *middle, Layer("outside", self.outside, [self.outside])]


def same(rows: int, y: list[float]) -> TensorDataset:
    """x = 1 and the given y, each of shape (1,)."""
    assert len(y) == rows
    return TensorDataset(torch.ones(rows, 1), torch.tensor(y).reshape(-1, 1))


def wide(rows: int) -> TensorDataset:
    """`rows` rows of 6 numbers to 6 numbers, float64."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.flip(1)))


class WideTask:
    """Mean squared error in float64 on `model(x)`, over rows of different weights if asked."""

    def __init__(self, tied: bool = False, dropout: float = 0.0, weighted: bool = False) -> None:
        self.tied, self.dropout = tied, dropout
        self.weighted = weighted

    def weight(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(self.weights(batch).sum())

    def weights(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Of each row: 1, or 0.5 and 1.5 by the sign of its first number."""
        return (batch[0][:, 0] > 0) + 0.5 if self.weighted else torch.ones(len(batch[0]), dtype=torch.float64)

    def build_model(self) -> nn.Module:
        return Tied() if self.tied else Deep(self.dropout)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        weights = self.weights(batch)
        errors = (model(batch[0]) - batch[1]).square().mean(1)
        return (weights * errors).sum() / weights.sum()


class NarrowTask(WideTask):
    """The same in float32, for mixed precision."""

    def build_model(self) -> nn.Module:
        return Deep().float()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0].float()), batch[1].float())


class NormTask(WideTask):
    """With a BatchNorm between two layers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).double()
