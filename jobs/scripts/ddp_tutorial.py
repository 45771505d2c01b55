"""Handwritten digits with DistributedDataParallel, as torch's tutorial on torchrun does it. Nothing of raydist or Ray in it.

    torchrun --nproc_per_node=2 jobs/scripts/ddp_tutorial.py --epochs 5
    raydist run --workers 2 jobs/scripts/ddp_tutorial.py --epochs 5

A checkpoint after each epoch (`--snapshot`); a restart goes on from it. Needs `pip install 'raydist[jobs]'`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one worker's step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--snapshot", type=Path)
    given = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")  # rank, world size and address from the environment
    rank = dist.get_rank()

    torch.manual_seed(0)
    train, test = data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    first = 0
    if given.snapshot is not None and given.snapshot.exists():
        saved = torch.load(given.snapshot, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    ddp = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=given.lr)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=given.batch_size, sampler=sampler)
    for epoch in range(first, given.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            if given.snapshot is not None:
                torch.save({"model": model.state_dict(), "epoch": epoch}, given.snapshot)
    if rank == 0:
        x, y = test.tensors
        right = (model(x.to(device)).argmax(1) == y.to(device)).float().mean().item()
        print(f"accuracy {right:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
