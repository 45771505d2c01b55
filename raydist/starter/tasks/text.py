"""What job.yaml trains: a small transformer that predicts each next byte of a text. It is yours: change it as you like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from raydist.models import CharTransformer

Batch = tuple[Tensor, Tensor]


class Windows(Dataset[Batch]):
    """Windows of `context` bytes of the file and the same moved on by one, int64; the last tenth of the file is for "eval"."""

    def __init__(self, file: str, split: str, context: int) -> None:
        path = Path(__file__).parent / file  # a relative path starts beside this file
        text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        cut = len(text) * 9 // 10
        self.text, self.context = (text[:cut] if split == "train" else text[cut:]), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, row: int) -> Batch:
        start = row * self.context
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


class TextTask:
    """A causal transformer over bytes (256 of them: any language, any encoding)."""

    def __init__(self, context: int, dim: int = 96, heads: int = 4, layers: int = 2) -> None:
        self.context, self.dim, self.heads, self.layers = context, dim, heads, layers

    def build_model(self) -> nn.Module:
        return CharTransformer(256, self.dim, self.heads, self.layers, self.context)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of the next bytes, in nats."""
        ids, following = batch
        return functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())

    def weight(self, batch: Batch) -> float:
        """What the mean counts: bytes."""
        return float(batch[1].numel())
