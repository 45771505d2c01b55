"""Job files and runs in a folder, for the tests of start, export, the command line and the runners."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

from raydist.config import JobConfig, load_config
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from tests.support import lin_job


def write_job(folder: Path, **changes: Any) -> Path:
    """A job file like `lin_job(...)`: 6 rows in global batches of 2, three steps an epoch, `changes` as there."""
    xs, size = changes.pop("xs", [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]), changes.pop("global_size", 2)
    job = lin_job(xs, size, **{"optimizer__lr": 0.01, **changes})
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def config_of(folder: Path, *overrides: str, **changes: Any) -> JobConfig:
    return load_config(write_job(folder, **changes), overrides)


def local_run(folder: Path, *overrides: str, **changes: Any) -> Path:
    """Train the job in this process; the run's folder."""
    train_local(config_of(folder, *overrides, **changes))
    return folder / "runs" / "lin"


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    times = (
        "step_s",
        "data_wait_s",
        "sync_wait_s",
        "rows_per_s",
        "memory_mb",
        "eval_s",
        "compute_s",
        "memory_reserved_mb",
        "ranks",
    )
    return [{k: v for k, v in line.items() if k not in times} for line in RunDir(str(run)).read_metrics()]


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in RunDir(str(run)).read_events()]


class Signals(Dataset[Any]):
    """Rows (x, 3x) that send `number` to this process (by name), each time its row `at` is read while `file` does not exist."""

    def __init__(self, xs: list[float], at: int, number: str, file: str, times: int = 1) -> None:
        self.xs, self.at, self.number, self.file, self.times = xs, at, number, Path(file), times

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, row: int) -> Any:
        if row == self.at and not self.file.exists():
            self.file.touch()
            for _ in range(self.times):
                os.kill(os.getpid(), getattr(signal, self.number))
        x = torch.tensor([self.xs[row]])
        return x, 3 * x


class Breaks(Dataset[Any]):
    """Rows (x, 3x) of which row `at` raises, on one rank only when `rank` is given."""

    def __init__(self, xs: list[float], at: int, rank: int | None = None) -> None:
        self.xs, self.at, self.rank = xs, at, rank

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, row: int) -> Any:
        if row == self.at and (self.rank is None or os.environ.get("RANK") == str(self.rank)):
            raise FileNotFoundError(f"image {row}.png")
        x = torch.tensor([self.xs[row]])
        return x, 3 * x


class Slow(Dataset[Any]):
    """Rows (x, 3x), each of which takes 30 ms."""

    def __init__(self, xs: list[float]) -> None:
        self.xs = xs

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.03)
        x = torch.tensor([self.xs[row]])
        return x, 3 * x


class Tied(nn.Module):
    """Two layers that share their weight, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.second(self.first(x)))
        return normed
