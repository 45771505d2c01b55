"""Hugging Face Accelerate: `torchrun --nproc_per_node=2 accelerate_ddp.py CASE --stamps FILE --out FOLDER`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedDataParallelKwargs
from cases import case
from torch.utils.data import DataLoader

from raydist.benchmark.command import Stamps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stamps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    probe = case(options.case)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if probe.bf16 else "no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # batch_size is that of all workers together
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    work = case(options.case, options.steps, accelerator.num_processes)
    stamp = Stamps(options.stamps)

    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.01)
    loader = DataLoader(work.data(), batch_size=work.rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, losses = 0, torch.zeros((), device=accelerator.device)
    for _ in range(work.epochs):
        for batch in loader:
            stamp()
            with accelerator.autocast():
                loss = work.loss(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.detach()
            step += 1
            if step % work.log_every == 0:
                mean = accelerator.reduce(losses, reduction="mean").item() / work.log_every
                if accelerator.is_main_process:
                    with open(options.out / "metrics.jsonl", "a") as file:
                        file.write(json.dumps({"step": step, "loss": mean}) + "\n")
                losses.zero_()
            if step == work.steps:
                break
    state = accelerator.get_state_dict(model)
    accelerator.save({"model": state, "optimizer": optimizer.state_dict()}, str(options.out / "checkpoint.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
