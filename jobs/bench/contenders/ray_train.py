"""Ray Train by its own guide: `python ray_train.py CASE --workers 2 --stamps FILE --out FOLDER [--address HOST:PORT]`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from cases import case
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from raydist.benchmark.command import Stamps


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    work = case(config["case"], config["steps"], workers)
    stamp = Stamps(config["stamps"])

    model = prepare_model(work.model(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.01)
    loader = prepare_data_loader(DataLoader(work.data(), batch_size=work.rows // workers))

    step, losses, line = 0, torch.zeros(()), {}
    for epoch in range(work.epochs):
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            stamp()
            with torch.autocast("cpu", torch.bfloat16, enabled=work.bf16):
                loss = work.loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.detach()
            step += 1
            if step % work.log_every == 0:
                dist.all_reduce(losses)
                line = {"step": step, "loss": losses.item() / work.log_every / workers}
                losses.zero_()
                if step < work.steps:
                    ray.train.report(line)
            if step == work.steps:
                break
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            whole = getattr(model, "module", model)
            torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "checkpoint.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(line, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stamps")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(address="local", num_cpus=options.workers + 1, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"case": options.case, "steps": options.steps, "stamps": options.stamps},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(name="ray", storage_path=str(options.out)),
    )
    result = trainer.fit()
    (options.out / "metrics.jsonl").write_text(json.dumps(result.metrics) + "\n")


if __name__ == "__main__":
    main()
