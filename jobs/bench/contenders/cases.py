"""What every contender trains: the same model from the same seed, the same rows in the same global batches, the same recipe.

Rows are in a random order once and for all and no contender shuffles them, so that the k-th global batch is the same set of
rows whoever splits it, and the losses can be compared.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from raydist.benchmark.command import Stamps
from raydist.models import CharTransformer, SmallCNN

Batch = tuple[torch.Tensor, torch.Tensor]
SLEEP_S = 0.05


@dataclass(frozen=True)
class Case:
    """`rows` make a global batch; `log_every` steps make a log line; AdamW at `lr`, clipping at 1."""

    name: str
    rows: int
    steps: int
    log_every: int
    lr: float
    bf16: bool

    @property
    def epochs(self) -> int:
        """Times that the data is gone through."""
        return -(-self.steps * self.rows // len(self.data()))

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        if self.name == "digits_cnn":
            return SmallCNN(classes=10, width=32)
        if self.name == "transformer":
            return CharTransformer(256, dim=320, heads=8, layers=8, context=32)  # 9.9 million parameters
        return nn.Linear(8, 1)

    def data(self) -> Dataset[Any]:
        """A whole number of global batches."""
        if self.name == "digits_cnn":
            return digits(self.rows)
        if self.name == "transformer":
            return text(self.rows * self.steps)
        count = self.rows * self.steps
        inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, torch.zeros(count, 1))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the batch."""
        inputs, targets = batch
        if self.name == "digits_cnn":
            return functional.cross_entropy(model(inputs), targets)
        if self.name == "transformer":
            return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        time.sleep(SLEEP_S)
        return functional.mse_loss(model(inputs), targets)


def case(name: str, steps: int | None = None, workers: int = 2) -> Case:
    """A case by name; `sleep` has 4 rows a worker."""
    made = {
        "digits_cnn": Case("digits_cnn", rows=64, steps=steps or 330, log_every=22, lr=3e-3, bf16=True),
        "transformer": Case("transformer", rows=8, steps=steps or 40, log_every=10, lr=3e-4, bf16=False),
        "sleep": Case("sleep", rows=4 * workers, steps=steps or 60, log_every=10, lr=1e-3, bf16=False),
    }
    return made[name]


def digits(rows: int) -> TensorDataset:
    """The handwritten digits of `jobs/data/digits.py`, mixed, cut to a whole number of global batches of `rows`."""
    import pyarrow.parquet as pq

    table = pq.read_table(Path(__file__).parents[2] / "data" / "digits" / "train")
    order = np.random.default_rng(0).permutation(table.num_rows)[: table.num_rows // rows * rows]
    pixels = np.stack(table["pixels"].to_numpy()).astype(np.float32)[order]
    return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(table["label"].to_numpy()[order].copy()))


def text(rows: int) -> TensorDataset:
    """`rows` windows of 32 characters of Python's documentation, mixed."""
    sys.path.append(str(Path(__file__).parents[2] / "data"))
    from text import TopicText

    windows = TopicText("train", 32)
    order = np.random.default_rng(0).permutation(len(windows))
    pairs = [windows[int(order[row % len(order)])] for row in range(rows)]
    return TensorDataset(torch.stack([ids for ids, _ in pairs]), torch.stack([following for _, following in pairs]))


class Task:
    """A case as raydist's task."""

    def __init__(self, name: str, steps: int, workers: int, stamps: str) -> None:
        self.case, self.stamp = case(name, steps, workers), Stamps(stamps)

    def build_model(self) -> nn.Module:
        return self.case.model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.stamp()
        return self.case.loss(model, batch)


def rows(name: str, steps: int, workers: int) -> Dataset[Any]:
    """A case's rows as raydist's data."""
    return case(name, steps, workers).data()


def job(made: Case, workers: int, folder: Path, name: str) -> dict[str, Any]:
    """A case as raydist's job. It saves once, at the end, as the others do."""
    here = Path(__file__).resolve()
    args = {"name": made.name, "steps": made.steps, "workers": workers}
    return {
        "name": name,
        "task": {"target": f"{here}:Task", "args": {**args, "stamps": str(folder / f"{name}.stamps")}},
        "data": {"train": {"target": f"{here}:rows", "args": args}},
        "batch": {"global_size": made.rows},
        "train": {"max_steps": made.steps, "log_every": {"steps": made.log_every}},
        "optimizer": {"name": "adamw", "lr": made.lr, "weight_decay": 0.01},
        "clip_grad_norm": 1.0,
        "precision": "bf16" if made.bf16 else "fp32",
        "scaling": {"workers": workers},
        "checkpoint": {"every": None},
        "storage": str(folder),
    }
