"""What saving every 10 steps a 100 MB state costs a step: no saving, in the background, and waiting for it, in turn.

    python jobs/bench/checkpoint.py [--turns 5] [--steps 120] [--workers 2] [--rows 256] [--json FILE]

The state is an MLP of 8.3 million parameters with Adam's two moments, 100 MB in float32. A run's figure is the mean wall time
of its steps from the fortieth on, by the clock of rank 0 at each call of the loss; the save at the run's end is not in it.
By then `keep` + 1 checkpoints were saved: from the next on a save writes over the files of one that was pruned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, EVERY, FIRST = 1660, 10, 40
CONTENDERS: dict[str, dict[str, Any]] = {
    "no saving": {"every": None},
    "in the background": {"every": {"steps": EVERY}, "async": True},
    "waiting for it": {"every": {"steps": EVERY}, "async": False},
}


class Task:
    """A regression that notes in the file `times` when each step of rank 0 begins."""

    def __init__(self, times: str) -> None:
        self.times = times

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if os.environ.get("RANK", "0") == "0":
            with open(self.times, "a") as file:
                file.write(f"{time.monotonic()}\n")
        return model(batch[0]).square().mean()


def rows(number: int) -> TensorDataset:
    """`number` rows of shape (WIDTH,), the same for each rank."""
    return TensorDataset(torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(0)))


def run_once(checkpoint: dict[str, Any], options: argparse.Namespace, folder: Path) -> float:
    """Train once; mean seconds a step."""
    name = f"run{len(list(folder.glob('run*.yaml')))}"
    here, times = Path(__file__).resolve(), folder / f"{name}.times"
    job = {
        "name": name,
        "task": {"target": f"{here}:Task", "args": {"times": str(times)}},
        "data": {"train": {"target": f"{here}:rows", "args": {"number": options.rows}}},
        "batch": {"global_size": options.rows},
        "train": {"max_steps": options.steps, "log_every": {"steps": options.steps}},
        "optimizer": {"name": "adam", "lr": 1e-4},
        "scaling": {"workers": options.workers},
        "checkpoint": {"keep": 2, **checkpoint},
        "storage": str(folder),
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job))
    done = subprocess.run([sys.executable, "-m", "raydist", "train", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}:\n{done.stderr[-2000:]}")
    moments = [float(line) for line in times.read_text().splitlines()][FIRST:]
    return (moments[-1] - moments[0]) / (len(moments) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name, checkpoint in CONTENDERS.items():
                found[name].append(run_once(checkpoint, options, Path(folder)))
    base = found["no saving"]
    ratios = {name: [mine / other for mine, other in zip(times, base, strict=True)] for name, times in found.items()}
    print(f"{'':<20}{'ms a step':>12}{'÷ no saving':>14}   of each turn")
    for name, times in found.items():
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios[name])
        print(f"{name:<20}{1e3 * statistics.median(times):>12.1f}{statistics.median(ratios[name]):>14.3f}   {each}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": found, "ratios": ratios}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
