"""Figures of one GPU: rows per second of the digits CNN at fp32, bf16 and fp16, and of a transformer, with peak memory.

    python jobs/bench/gpu.py [--steps N] [--json FILE]

Turns are taken (A B C A B C …) and medians printed, so a drifting clock rate meets all alike. Without a CUDA device it says so
and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from raydist.config import parse_config
from raydist.data.source import StepData
from raydist.task import build_task
from raydist.trainer import Trainer
from raydist.world import World, from_env

CASES: dict[str, dict[str, Any]] = {
    "cnn fp32": {"model": "cnn", "precision": "fp32"},
    "cnn bf16": {"model": "cnn", "precision": "bf16"},
    "cnn fp16": {"model": "cnn", "precision": "fp16"},
    "transformer fp32": {"model": "transformer", "precision": "fp32"},
    "transformer bf16": {"model": "transformer", "precision": "bf16"},
}
ROWS = {"cnn": 4096, "transformer": 64}


def job(case: dict[str, Any]) -> dict[str, Any]:
    """A job for one case; its data section is never opened, batches are made here."""
    cnn = case["model"] == "cnn"
    task: dict[str, Any] = {
        "model": {"target": "raydist.models:SmallCNN"},
        "loss": {"target": "torch.nn.functional:cross_entropy"},
    }
    if not cnn:
        task = {"target": "./text_task.py:TextTask", "args": {"dim": 512, "heads": 8, "layers": 6, "context": 256}}
    return {
        "name": "bench",
        "task": task,
        "data": {"train": {"target": "torch.utils.data:TensorDataset"}},
        "batch": {"global_size": ROWS[case["model"]]},
        "train": {"max_steps": 1},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "precision": case["precision"],
    }


def step_of(case: dict[str, Any], device: torch.device) -> StepData:
    """One global batch of random rows, on the device already: data loading is not measured here."""
    rows = ROWS[case["model"]]
    if case["model"] == "cnn":
        batch: Any = (torch.rand(rows, 64, device=device), torch.randint(0, 10, (rows,), device=device))
    else:
        ids = torch.randint(0, 96, (rows, 257), device=device)
        batch = (ids[:, :-1], ids[:, 1:])
    return StepData(0, 0, False, rows, rows, batch)


def measure(trainer: Trainer, data: StepData, steps: int) -> float:
    """Seconds a step, after a warm-up of three."""
    for _ in range(3):
        trainer.train_step(data)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.train_step(data)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def run(world: World, steps: int, turns: int) -> list[dict[str, Any]]:
    """All cases, `turns` times in turn."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    memory: dict[str, float] = {}
    for _ in range(turns):
        for name, case in CASES.items():
            config = parse_config(job(case), Path(__file__).parents[1])
            torch.cuda.reset_peak_memory_stats()
            trainer = Trainer(config, build_task(config.task), world, total_steps=None)
            times[name].append(measure(trainer, step_of(case, world.device), steps))
            memory[name] = torch.cuda.max_memory_allocated() / 2**20
            del trainer
            torch.cuda.empty_cache()
    return [
        {
            "case": name,
            "step_ms": 1e3 * statistics.median(found),
            "rows_per_s": ROWS[CASES[name]["model"]] / statistics.median(found),
            "peak_mb": memory[name],
        }
        for name, found in times.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("jobs/bench/gpu.py needs a CUDA device, and there is none here", file=sys.stderr)
        return 2
    found = run(from_env(), options.steps, options.turns)
    print(f"{'case':<20}{'ms a step':>12}{'rows/s':>14}{'peak MiB':>12}")
    for row in found:
        print(f"{row['case']:<20}{row['step_ms']:>12.2f}{row['rows_per_s']:>14.0f}{row['peak_mb']:>12.0f}")
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "cases": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
