"""A pipeline's step, and its bubble.

    python jobs/bench/pipeline.py [--only pipeline bubble] [--rounds N] [--quick] [--json FILE]

`pipeline`: a transformer in 2 and 4 stages, 1F1B, on Ray by raydist and under torchrun by torch.distributed.pipelining, in
turn; the same weights, rows, cut and micro-batches. `bubble`: four stages that sleep 10 ms forward and 20 ms backward, 4, 8 and
16 micro-batches, beside the schedule's limit of (M + 3) · 30 ms. A run's figure is the median over its log lines of a
step's mean time, without the first lines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from starting import CONTENDERS, ENV, same_losses

from raydist.benchmark.rows import Row
from raydist.benchmark.turns import options, take_turns, write
from raydist.errors import RaydistError

WARM_LINES = 2


class Runs:
    """Starts the contenders, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.losses: dict[str, list[float]] = {}

    def raydist(self, name: str, job: dict[str, Any]) -> float:
        """Train a job on Ray; ms of a step."""
        here = self._new()
        (here / "job.yaml").write_text(yaml.safe_dump({**job, "name": "run", "storage": str(here)}))
        self._run([sys.executable, "-m", "raydist", "train", str(here / "job.yaml")])
        return self._read(name, here / "run")

    def torchrun(self, stages: int, steps: int) -> float:
        """Train the transformer under torchrun; ms of a step."""
        here = self._new()
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={stages}"]
        self._run([sys.executable, *launch, str(CONTENDERS / "stages.py"), "--steps", str(steps), "--out", str(here)])
        return self._read("torchrun", here)

    def _new(self) -> Path:
        self.count += 1
        here = self.folder / f"{self.count:03d}"
        here.mkdir()
        return here

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RaydistError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")

    def _read(self, name: str, folder: Path) -> float:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.losses.setdefault(name, []).append(lines[-1]["train_loss"])
        return 1e3 * statistics.median(line["step_s"] for line in lines[WARM_LINES:])


def transformer(stages: int, steps: int) -> dict[str, Any]:
    """The transformer as raydist's job."""
    from stages import CUTS, LOG_EVERY, LR, MICRO, ROWS

    file = CONTENDERS / "stages.py"
    return {
        "task": {"target": f"{file}:Task"},
        "data": {"train": {"target": f"{CONTENDERS / 'cases.py'}:text", "args": {"rows": ROWS * steps}}},
        "batch": {"global_size": ROWS},
        "train": {"max_steps": steps, "log_every": {"steps": LOG_EVERY}},
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": 0.01},
        "clip_grad_norm": 1.0,
        "strategy": {"name": "pipeline", "stages": stages, "micro_batches": MICRO, "cut": CUTS[stages]},
        "checkpoint": {"every": None},
    }


def sleeping(micro: int, steps: int) -> dict[str, Any]:
    """The sleeping stages as raydist's job."""
    file = CONTENDERS / "stages.py"
    return {
        "task": {"target": f"{file}:SleepTask"},
        "data": {"train": {"target": f"{file}:numbers", "args": {"rows": micro * steps}}},
        "batch": {"global_size": micro},
        "train": {"max_steps": steps, "log_every": {"steps": 5}},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "strategy": {"name": "pipeline", "stages": 4, "micro_batches": micro, "cut": [1, 1, 1, 1]},
        "checkpoint": {"every": None},
    }


def pipeline_rows(folder: Path, rounds: int, quick: bool) -> list[Row]:
    rows = []
    for stages in (2, 4):
        steps = 40 if quick else 80
        runs = Runs(folder / f"stages-{stages}")
        runs.folder.mkdir()
        contenders = {
            "raydist": lambda stages=stages, steps=steps, runs=runs: runs.raydist("raydist", transformer(stages, steps)),
            "torchrun": lambda stages=stages, steps=steps, runs=runs: runs.torchrun(stages, steps),
        }
        found = take_turns(contenders, rounds, f"{stages} stages")
        rows.append(Row("pipeline", f"{stages} stages", "ms", found, same_losses(runs.losses)))
    return rows


def bubble_rows(folder: Path, rounds: int, quick: bool) -> list[Row]:
    from stages import BACKWARD_S, FORWARD_S

    rows = []
    runs = Runs(folder / "sleep")
    runs.folder.mkdir()
    for micro in (4, 8, 16):
        job = sleeping(micro, 20 if quick else 40)
        found = take_turns({"raydist": lambda job=job: runs.raydist("raydist", job)}, rounds, f"{micro} micro-batches")
        limit = 1e3 * (micro + 3) * (FORWARD_S + BACKWARD_S)
        rows.append(Row("bubble", f"{micro} micro-batches", "ms", {**found, "limit": [limit] * rounds}))
    return rows


def main() -> int:
    asked = options(__doc__, ("pipeline", "bubble"), rounds=3, quick_rounds=2)
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch:
        rows = []
        for name, measure in (("pipeline", pipeline_rows), ("bubble", bubble_rows)):
            if name in asked.only:
                rows += measure(Path(scratch), asked.rounds, asked.quick)
    write(rows, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
