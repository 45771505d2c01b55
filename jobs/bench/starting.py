"""How each contender's command is started, measured and held to the same loss."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from raydist.benchmark.command import Measured, measure
from raydist.errors import RaydistError

HERE = Path(__file__).resolve().parent
CONTENDERS = HERE / "contenders"
ROOT = HERE.parents[1]
sys.path.append(str(CONTENDERS))
os.environ.pop("RAY_ADDRESS", None)  # a cluster is used only where a script says so

from cases import Case, job  # noqa: E402

ENV = {
    "OMP_NUM_THREADS": "1",  # what torchrun sets, and Ray for a worker of one CPU
    "PYTHONPATH": f"{ROOT}:{CONTENDERS}",
    "RAY_DEDUP_LOGS": "0",
}
LOSS_TOLERANCE = 0.03
"""Losses of the same rows: BatchNorm sees other halves of a batch, and bf16 rounds in another order."""


class Runs:
    """Starts contenders on a case, each in a folder of its own, and keeps the loss that each ended with."""

    def __init__(self, folder: Path, workers: int = 2, address: str | None = None) -> None:
        self.folder, self.workers, self.address = folder, workers, address
        self.losses: dict[str, list[float]] = {}
        self.count = 0

    def contenders(self, case: Case, names: tuple[str, ...]) -> dict[str, Callable[..., Measured]]:
        """Those of `names` that are installed, as functions that run them once."""
        there = [name for name in names if name != "accelerate" or importlib.util.find_spec("accelerate")]
        return {name: partial(self.once, name, case) for name in there}

    def once(self, name: str, case: Case, memory: bool = False) -> Measured:
        """Run one contender to its end."""
        self.count += 1
        here = self.folder / f"{self.count:03d}"
        here.mkdir()
        found = measure(self.command(name, case, here), here / "run.stamps", ENV, memory)
        if (
            name == "raydist" and len(found.steps) == case.steps + 1
        ):  # DDP's first step is preceded by a trial on each rank by itself
            found = replace(found, steps=found.steps[1:])
        if len(found.steps) != case.steps:
            raise RaydistError(f"{name} took {len(found.steps)} steps of {case.name}, not {case.steps}")
        self.losses.setdefault(name, []).append(last_loss(here / "run" if name == "raydist" else here))
        return found

    def command(self, name: str, case: Case, here: Path) -> list[str]:
        """The command line of a contender."""
        if name == "raydist":
            file = here / "job.yaml"
            file.write_text(yaml.safe_dump(job(case, self.workers, here, "run")))
            at = ["--address", self.address] if self.address else []
            return [sys.executable, "-m", "raydist", "train", str(file), *at]
        shared = [case.name, "--steps", str(case.steps), "--stamps", str(here / "run.stamps"), "--out", str(here)]
        if name == "ray train":
            at = ["--address", self.address] if self.address else []
            return [sys.executable, str(CONTENDERS / "ray_train.py"), *shared, "--workers", str(self.workers), *at]
        script = {"torchrun": "torchrun.py", "accelerate": "accelerate_ddp.py"}[name]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.workers}"]
        return [sys.executable, *launch, str(CONTENDERS / script), *shared]


def last_loss(folder: Path) -> float:
    """The mean loss of the last log line."""
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return float(line["loss"] if "loss" in line else line["train_loss"])


def same_losses(losses: Mapping[str, list[float]], tolerance: float = LOSS_TOLERANCE) -> str:
    """Words on the losses. Raises RaydistError when the contenders did not do the same work."""
    ends = {name: sum(values) / len(values) for name, values in losses.items()}
    low, high = min(ends.values()), max(ends.values())
    told = ", ".join(f"{name} {loss:.4g}" for name, loss in ends.items())
    if high - low > tolerance * max(high, 0.1):
        raise RaydistError(f"the contenders' last losses differ by more than {tolerance:.0%}: {told}")
    return f"last loss: {told}"


def write_digits() -> None:
    """The digits as parquet, unless they are there."""
    subprocess.run([sys.executable, str(ROOT / "jobs" / "data" / "digits.py")], check=True, capture_output=True)
