"""What a sweep costs beside plain Ray Tune: the same trials by `raydist sweep` and by Tune with a TorchTrainer in each trial.

    python jobs/bench/sweep.py [--trials N] [--check N] [--only raydist|tune] [--json FILE]

12 trials of 2 epochs of digits (learning rate × global batch × precision), 2 workers each, one at a time on 2 CPUs; both in one
call. The times are those of the whole commands. `--trials N` cuts the Tune side for a quick look: then no ratio is printed.
`--check N` trains N of the sweep's settings (all) by themselves, with 2 workers under torchrun, and compares the final losses.
Needs `python jobs/data/digits.py`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

JOBS = Path(__file__).resolve().parents[1]
SPACE: dict[str, list[Any]] = {
    "optimizer.lr": [1e-3, 3e-3, 1e-2],
    "batch.global_size": [32, 64],
    "precision": ["fp32", "bf16"],
}
WORKERS, EPOCHS = 2, 2
CLOSE = 1e-6
"""Relative difference of two final losses that are the same."""


def configs() -> list[dict[str, Any]]:
    """Every trial's settings, by dotted key."""
    return [dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values())]


def write_job(folder: Path) -> Path:
    """digits.yaml for 2 epochs, with a `sweep:` section over all of SPACE."""
    from raydist.config import load_config, to_plain

    settings = [f"train.epochs={EPOCHS}", f"scaling.workers={WORKERS}", f"storage={folder}", "name=job", "checkpoint.best=null"]
    job = to_plain(load_config(JOBS / "digits.yaml", settings))
    space = {key: {"grid": values} for key, values in SPACE.items()}
    job["sweep"] = {"space": space, "search": "grid", "concurrency": 1}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def timed(command: list[str], name: str) -> float:
    """Seconds of a command that must end well."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return seconds


# -- raydist -------------------------------------------------------------------------------------------------------------


def raydist_sweep(folder: Path) -> tuple[float, list[dict[str, str]]]:
    """Seconds of the whole sweep, and its trials.csv."""
    job = write_job(folder)
    seconds = timed([sys.executable, "-m", "raydist", "sweep", str(job), "name=sweep"], "raydist sweep")
    with (folder / "sweep" / "trials.csv").open() as file:
        return seconds, list(csv.DictReader(file))


def alone(folder: Path, trial: dict[str, str], number: int) -> float:
    """The final eval_loss of one trial's settings, trained by themselves with as many workers."""
    settings = [f"{key}={trial[key]}" for key in SPACE]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={WORKERS}", "-m", "raydist"]
    timed([*command, str(folder / "job.yaml"), f"name=alone{number}", "sweep=null", *settings], "raydist train")
    lines = (folder / f"alone{number}" / "metrics.jsonl").read_text().splitlines()
    return float([json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line][-1])


# -- Ray Tune ------------------------------------------------------------------------------------------------------------


def train_worker(config: dict[str, Any]) -> None:
    """One worker of a trial: digits in memory, DDP, AdamW, cosine with warm-up; eval loss of all rows after each epoch."""
    import pyarrow.parquet as pq
    import ray.train
    import ray.train.torch
    import torch
    from torch.nn.functional import cross_entropy
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
    from torch.utils.data import DataLoader, TensorDataset

    from raydist.models import MLP

    def rows(split: str) -> TensorDataset:
        table = pq.read_table(Path(config["data"]) / split)
        pixels = table.column("pixels").combine_chunks().flatten().to_numpy().reshape(-1, 64)
        return TensorDataset(torch.tensor(pixels), torch.tensor(table.column("label").to_numpy()))

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(MLP(in_features=64, hidden=[512], out_features=10))
    per_worker = config["batch.global_size"] // WORKERS
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows("train"), batch_size=per_worker, shuffle=True))
    held_out = rows("eval")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["optimizer.lr"], weight_decay=0.01)
    cosine = CosineAnnealingLR(optimizer, EPOCHS * len(loader) - 20)
    schedule = SequentialLR(optimizer, [LinearLR(optimizer, 1 / 21, total_iters=20), cosine], [20])
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=config["precision"] == "bf16"):
                loss = cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        with torch.no_grad():
            value = float(cross_entropy(model(held_out.tensors[0]), held_out.tensors[1]))
        ray.train.report({"eval_loss": value})


def tune_driver(config: dict[str, Any]) -> None:
    """One trial: a TorchTrainer of its own, as Ray's guide on hyper-parameter tuning with Ray Train has it."""
    import ray.tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    config = config["pick"]
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 0.9}),
        run_config=RunConfig(
            name=ray.tune.get_context().get_trial_id(), storage_path=config["storage"], callbacks=[TuneReportCallback()]
        ),
    )
    trainer.fit()


def tune(folder: Path, trials: int) -> None:
    """The first `trials` of the same trials by Ray Tune, one at a time. Run in a process of its own."""
    import ray
    from ray import tune as ray_tune

    ray.init(address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    fixed = {"data": str(JOBS / "data" / "digits"), "storage": str(folder / "inner")}
    tuner = ray_tune.Tuner(
        # 2 CPUs for 2 workers and a driver that must not take a whole one: the workers ask for 0.9 each
        ray_tune.with_resources(tune_driver, {"CPU": 0.1}),
        param_space={"pick": ray_tune.grid_search([{**config, **fixed} for config in configs()[:trials]])},
        tune_config=ray_tune.TuneConfig(metric="eval_loss", mode="min", max_concurrent_trials=1),
        run_config=ray_tune.RunConfig(name="tune", storage_path=str(folder), verbose=0),
    )
    results = tuner.fit()
    if results.errors or len(results) != trials:
        raise SystemExit(f"{len(results.errors)} of {len(results)} trials failed: {results.errors[:1]}")
    (folder / "tune.json").write_text(json.dumps([result.metrics["eval_loss"] for result in results]))
    ray.shutdown()


# -- both ----------------------------------------------------------------------------------------------------------------


def compare(folder: Path, trials: list[dict[str, str]], count: int) -> float:
    """The largest relative difference between a trial's final loss and that of the same settings trained alone."""
    worst = 0.0
    for number, trial in enumerate(trials[:count]):
        swept, single = float(trial["eval_loss"]), alone(folder, trial, number)
        worst = max(worst, abs(swept - single) / abs(single))
        print(f"  trial {trial['trial']}: {swept:.9f} in the sweep, {single:.9f} alone", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = len(configs())
    parser.add_argument("--trials", type=int, default=every)
    parser.add_argument("--check", type=int, default=every)
    parser.add_argument("--only", choices=["raydist", "tune"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        tune(options.inside, options.trials)
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.only != "tune":
            found["raydist_s"], rows = raydist_sweep(folder)
            print(f"raydist sweep: {len(rows)} trials in {found['raydist_s']:.1f} s", flush=True)
            states = sorted({row["status"] for row in rows})
            if len(rows) != every or states != ["finished"]:
                raise SystemExit(f"{len(rows)} trials, {states}; {every} finished ones were expected")
        if options.only != "raydist":
            command = [sys.executable, __file__, "--inside", scratch, "--trials", str(options.trials)]
            found["tune_s"] = timed(command, "Ray Tune")
            losses = json.loads((folder / "tune.json").read_text())
            print(f"Ray Tune + TorchTrainer: {len(losses)} trials in {found['tune_s']:.1f} s", flush=True)
        if options.only != "tune" and options.check:
            found["difference"] = compare(folder, rows, options.check)
            print(f"final losses, sweep and alone: largest relative difference {found['difference']:.2g}")
    if options.only is None and options.trials == every:
        found["ratio"] = found["tune_s"] / found["raydist_s"]
        print(f"Ray Tune ÷ raydist: {found['ratio']:.1f}, {every} trials each")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(found.get("difference", 0.0) > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
