"""A custom task: predict each next character. Shows what the loop asks of one (README, "A task of your own")."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from raydist.models import CharTransformer

VOCABULARY = 256  # jobs/data/text.py gives UTF-8 bytes
Batch = tuple[torch.Tensor, torch.Tensor]


class TextTask:
    """A CharTransformer trained on windows `(ids, next_ids)`, each int64 `(rows, context)`."""

    def __init__(self, context: int, dim: int = 96, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        self.model_args = {"context": context, "dim": dim, "heads": heads, "layers": layers, "dropout": dropout}

    def build_model(self) -> nn.Module:
        return CharTransformer(VOCABULARY, **self.model_args)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross entropy over all characters of the batch, in nats."""
        ids, next_ids = batch
        return functional.cross_entropy(model(ids).flatten(0, 1), next_ids.flatten())

    def weight(self, batch: Batch) -> float:
        """Characters in the batch: what its mean loss counts when micro-batches are added up."""
        return float(batch[1].numel())
