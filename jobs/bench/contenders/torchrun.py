"""Plain PyTorch: `torchrun --nproc_per_node=2 torchrun.py CASE --stamps FILE --out FOLDER`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from cases import case
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from raydist.benchmark.command import Stamps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stamps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    work = case(options.case, options.steps, workers)
    stamp = Stamps(options.stamps)

    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.01)
    sampler: DistributedSampler = DistributedSampler(work.data(), shuffle=False)
    loader = DataLoader(work.data(), batch_size=work.rows // workers, sampler=sampler)

    step, losses = 0, torch.zeros(())
    for epoch in range(work.epochs):
        sampler.set_epoch(epoch)
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
                if rank == 0:
                    with open(options.out / "metrics.jsonl", "a") as file:
                        file.write(json.dumps({"step": step, "loss": losses.item() / work.log_every / workers}) + "\n")
                losses.zero_()
            if step == work.steps:
                break
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, options.out / "checkpoint.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
