"""What layers cost, remembered on this machine: a restart, a resume or the next run does not measure again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch

from raydist.pipeline.layers import Layer
from raydist.pipeline.measure import Cost, measure
from raydist.precision import Precision
from raydist.storage import write_bytes

VARIABLE = "RAYDIST_CACHE"
"""A folder to remember in, in place of `~/.cache/raydist`; empty: measure each time."""


def costs_of(layers: Sequence[Layer], inputs: tuple[torch.Tensor, ...], precision: Precision) -> tuple[list[Cost], bool]:
    """`measure`, or what it found before for the same fingerprint; and whether it was remembered."""
    path = _path(fingerprint(layers, inputs, precision))
    if path is not None:
        with suppress(OSError, ValueError, TypeError):
            found = [Cost(**cost) for cost in json.loads(path.read_text())]
            if [cost.name for cost in found] == [layer.name for layer in layers]:
                return found, True
    costs = measure(layers, inputs, precision)
    if path is not None:
        with suppress(OSError):  # a home that cannot be written to costs the measurement only
            write_bytes(str(path), json.dumps([asdict(cost) for cost in costs]).encode())
    return costs, False


def fingerprint(layers: Sequence[Layer], inputs: tuple[torch.Tensor, ...], precision: Precision) -> str:
    """Of all that the times depend on: modules, shapes and dtypes, which weights train, precision, device, threads, torch.

    Code inside a module's forward does not enter; change the layer's class name or the settings it shows when that changes.
    """
    device = inputs[0].device
    parameters = [[p for module in layer.modules for p in module.parameters()] for layer in layers]
    parts = [
        [(layer.name, [repr(module) for module in layer.modules]) for layer in layers],
        [[(tuple(p.shape), str(p.dtype), p.requires_grad) for p in held] for held in parameters],
        [(tuple(x.shape), str(x.dtype)) for x in inputs],
        precision.name,
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()}",
        torch.get_num_threads(),
        torch.__version__,
    ]
    return sha256(repr(parts).encode()).hexdigest()[:32]


def _path(name: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    if folder == "":
        return None
    try:
        base = Path(folder) if folder else Path.home() / ".cache" / "raydist"
    except RuntimeError:  # no home
        return None
    return base / "layers" / f"{name}.json"
