"""Handwritten digits with Hugging Face Accelerate. Nothing of raydist or Ray in it.

    raydist run --workers 2 jobs/scripts/accelerate_digits.py --epochs 5

Needs `pip install 'raydist[jobs]' accelerate`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, train, test = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        DataLoader(TensorDataset(x[~held_out], y[~held_out]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(x[held_out], y[held_out]), batch_size=32),
    )
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}")
    for epoch in range(given.epochs):
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    right, seen = 0, 0
    for inputs, targets in test:
        guess, truth = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
        right, seen = right + int((guess == truth).sum()), seen + len(truth)
    accelerator.print(f"accuracy {right / seen:.4f} of {seen}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
