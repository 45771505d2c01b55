"""Weights out of a run, for use without raydist."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from raydist import storage
from raydist.checkpoint import load, load_latest
from raydist.errors import CheckpointError, ConfigError
from raydist.manifest import NAME, folder_name, list_checkpoints
from raydist.state import TrainState


def export_weights(run: str, out: Path, best: bool = False, ema: bool = False) -> str:
    """Write the weights of a run's newest (or best) good checkpoint to `out`; returns a sentence that says what was written.

    `out` is replaced as a whole. Raises CheckpointError when there is no such checkpoint, or no EMA in it, ConfigError when
    `out` is a folder.
    """
    from safetensors.torch import save_file

    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name the file to write, such as {out / 'weights.safetensors'}")
    uri, state = pick(run, best)
    weights = state.ema if ema else state.model
    if weights is None:
        raise CheckpointError(f"{uri} has no averaged weights: the job has no train.ema; leave out --ema")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(unshared(weights), part, metadata={"format": "pt", "step": str(state.counters["step"])})
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return f"{out}: {len(weights)} tensors of step {state.counters['step']} from {uri}"


def unshared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors of which no two share memory, as safetensors wants them: tied weights are written out twice."""
    seen: set[int] = set()
    result = {}
    for name, tensor in weights.items():
        storage_id = tensor.untyped_storage().data_ptr()
        result[name] = tensor.detach().clone().contiguous() if storage_id in seen else tensor.detach().contiguous()
        seen.add(storage_id)
    return result


def pick(run: str, best: bool = False) -> tuple[str, TrainState]:
    """The checkpoint that `run` names: itself, or the newest good (or the best) one of a run folder. Raises CheckpointError."""
    run = run if not storage.is_local(run) else str(storage.local_path(run).expanduser().absolute())
    if storage.exists(storage.join(run, NAME)):
        return run, load(run)[0]
    store = storage.join(run, "checkpoints")
    if not list_checkpoints(store):
        raise CheckpointError(
            f"{run} has no committed checkpoint; give a run folder or a checkpoint folder (…/checkpoints/step-00000042)"
        )
    if best:
        found = best_uri(store)
        return found, load(found)[0]
    latest = load_latest(store, lambda message: print(f"warning: {message}", file=sys.stderr))
    assert latest is not None
    return storage.join(store, folder_name(latest[1]["step"])), latest[0]


def best_uri(store: str) -> str:
    """The checkpoint that `best.json` of the store points to."""
    import json

    pointer = storage.join(store, "best.json")
    if not storage.exists(pointer):
        raise CheckpointError(f"{store} has no best checkpoint: the job has no checkpoint.best; leave out --best")
    return storage.join(store, folder_name(int(json.loads(storage.read_bytes(pointer))["step"])))
