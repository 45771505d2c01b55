"""Does resuming late in an epoch cost more than early? Command to first step, going on at 1 % and at 99 % of an epoch.

    python jobs/bench/resume.py [--rounds N] [--quick] [--json FILE]

One process reads parquet (2 million rows of 16 floats, 1,953 steps) without Ray, whose start would hide a difference; the
checkpoints come from two runs of this script. `data.py` shows the same for a Ray Data stream.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from starting import ENV
from torch import nn

from raydist.benchmark.command import Measured, Stamps, measure
from raydist.benchmark.rows import Row
from raydist.benchmark.turns import options, take_turns, write

ROWS, WIDTH, FILES, GLOBAL = 2_000_000, 16, 8, 1024


class Task:
    """A linear regression that notes its steps."""

    def __init__(self, stamps: str) -> None:
        self.stamp = Stamps(stamps)

    def build_model(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.stamp()
        return model(batch["x"]).square().mean()


def write_files(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(FILES):
        values = pa.array(rng.random(ROWS // FILES * WIDTH, dtype=np.float32))
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, WIDTH)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=32_768)


class Runs:
    """Runs of one job that stop at a step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def command(self, stop: int, more: list[str]) -> tuple[Path, list[str]]:
        """The run's folder, and the command that trains up to step `stop`."""
        self.count += 1
        name = f"run{self.count}"
        job = {
            "name": name,
            "task": {"target": f"{Path(__file__).resolve()}:Task", "args": {"stamps": str(self.folder / f"{name}.stamps")}},
            "data": {"train": {"path": str(self.folder / "data"), "format": "parquet", "shuffle": True}},
            "batch": {"global_size": GLOBAL},
            "train": {"max_steps": stop, "log_every": {"steps": 500}},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "scaling": {"workers": 1},
            "checkpoint": {"every": None},
            "storage": str(self.folder),
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job))
        return self.folder / name, [sys.executable, "-m", "raydist", "train", str(file), "--local", *more]

    def checkpoint(self, stop: int) -> Path:
        """The run's folder after `stop` steps."""
        run, command = self.command(stop, [])
        subprocess.run(command, check=True, capture_output=True)
        return run

    def resumed(self, start: Path, at: int) -> Measured:
        """Go on from `start`, which is at step `at`, for one step."""
        run, command = self.command(at + 1, ["--resume", str(start)])
        return measure(command, run.with_suffix(".stamps"), ENV)


def main() -> int:
    asked = options(__doc__, ("resume",), rounds=5, quick_rounds=3)
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch:
        runs = Runs(Path(scratch))
        write_files(Path(scratch) / "data")
        contenders: dict[str, Callable[[], Measured]] = {}
        for part in (1, 99):
            at = ROWS // GLOBAL * part // 100
            contenders[f"at {part} %"] = partial(runs.resumed, runs.checkpoint(at), at)
        found = take_turns(contenders, asked.rounds, "resume")
    write(
        [Row("resume", "parquet, one process", "s", {name: [m.start_s for m in ms] for name, ms in found.items()})], asked.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
