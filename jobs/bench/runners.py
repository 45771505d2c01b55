"""What Ray costs a step: the same job on Ray and under torchrun, in turn, median step time of each and their ratio.

    python jobs/bench/runners.py [--job jobs/digits_cnn.yaml] [--turns 5] [--epochs 8] [--workers 2] [--json FILE]

A turn is one run of each; a run's figure is the median `step_s` of its metrics lines without the first, which holds the
warm-up.
Both use the same data, seed and threads a worker. `python jobs/data/digits.py` must have run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def commands(job: Path, workers: int) -> dict[str, list[str]]:
    """How each contender starts the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={workers}", "-m", "raydist", str(job)]
    return {"torchrun": torchrun, "ray": [sys.executable, "-m", "raydist", "train", str(job)]}


def run_once(command: list[str], settings: list[str], folder: Path) -> dict[str, float]:
    """Run to the end; median seconds a step, and seconds of the whole command."""
    began = time.perf_counter()
    name = f"run{len(list(folder.iterdir()))}"
    done = subprocess.run(
        [*command, f"storage={folder}", f"name={name}", *settings], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {"step_s": statistics.median(line["step_s"] for line in lines[1:]), "total_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path(__file__).parents[1] / "digits_cnn.yaml")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = [f"train.epochs={options.epochs}", f"scaling.workers={options.workers}", "train.log_every.steps=5"]
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for contender, command in commands(options.job, options.workers).items():
                found.setdefault(contender, []).append(run_once(command, settings, Path(folder)))
    result: dict[str, Any] = {
        contender: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for contender, runs in found.items()
    }
    ratios = [r["step_s"] / t["step_s"] for r, t in zip(found["ray"], found["torchrun"], strict=True)]
    result["step_ratio"] = statistics.median(ratios)
    print(f"{'':<10}{'ms a step':>12}{'s in all':>12}")
    for contender in found:
        print(f"{contender:<10}{1e3 * result[contender]['step_s']:>12.2f}{result[contender]['total_s']:>12.1f}")
    print(f"ray ÷ torchrun, a step: {result['step_ratio']:.3f} (median of {', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    if options.json:
        options.json.write_text(json.dumps({**result, "runs": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
