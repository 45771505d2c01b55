"""What job.yaml trains: numbers and categories of a table, into an MLP. It is yours: change it as you like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import R2Score


class TabularTask:
    """`numbers`: columns and how many numbers each holds; `categories`: columns and their number of values."""

    def __init__(
        self,
        numbers: Mapping[str, int],
        categories: Mapping[str, int],
        target: str,
        classes: int | None = None,
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.1,
    ) -> None:
        self.numbers, self.categories, self.target, self.classes = dict(numbers), dict(categories), target, classes
        self.hidden, self.dropout = list(hidden), dropout

    def build_model(self) -> nn.Module:
        return Net(sum(self.numbers.values()), list(self.categories.values()), self.hidden, self.classes or 1, self.dropout)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (rows, classes) and class numbers; or, for a number to predict, both (rows,)."""
        target = batch[self.target]
        numbers = torch.cat([batch[name].flatten(1) if batch[name].dim() > 1 else batch[name][:, None]
                             for name in self.numbers] or [target.new_zeros(len(target), 0)], dim=1)  # fmt: skip
        categories = [batch[name] for name in self.categories]
        out = model(numbers.float(), categories)
        return (out, target.long()) if self.classes else (out.squeeze(1), target.float())

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy in nats, or the mean squared error."""
        out, target = self.predict(model, batch)
        return functional.cross_entropy(out, target) if self.classes else functional.mse_loss(out, target)

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(self.classes, average="micro")} if self.classes else {"r2": R2Score()}


class Net(nn.Module):
    """An embedding for each category column, beside the numbers, into linear layers with GELU between them."""

    def __init__(self, numbers: int, categories: Sequence[int], hidden: Sequence[int], outputs: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, min(16, (count + 1) // 2 + 1)) for count in categories)
        width = numbers + sum(min(16, (count + 1) // 2 + 1) for count in categories)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.GELU(), nn.Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, numbers: Tensor, categories: Sequence[Tensor]) -> Tensor:
        parts = [embed(values) for embed, values in zip(self.embeddings, categories, strict=True)]
        out: Tensor = self.layers(torch.cat([numbers, *parts], dim=1))
        return out
