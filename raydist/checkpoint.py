"""Checkpoints that are committed or absent: save, list, verify, load, prune.

A checkpoint is the folder `step-00000042` of the store, complete when it has a `manifest.json`, which is written last and
holds size and hash of every file. Locally the folder is written under a hidden `.tmp-` name and renamed; in an object store
the files come first and the manifest after them.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from raydist import storage
from raydist.commit import commit, discard, dispose_stale
from raydist.errors import CheckpointError
from raydist.manifest import BestRule, Found, find, folder_name, list_checkpoints, problems_with, read_manifest, verify
from raydist.state import TrainState, check_model_matches, pack, unpack

__all__ = [
    "BestRule", "CheckpointError", "Found", "TrainState", "best_of", "check_model_matches", "list_checkpoints",
    "load", "load_latest", "prune", "save", "tidy", "verify",
]  # fmt: skip


def save(
    store: str,
    state: TrainState,
    step: int,
    *,
    metrics: Mapping[str, Any] | None = None,
    keep: int = 2,
    best: BestRule | None = None,
    protect: AbstractSet[int] = frozenset(),
) -> str:
    """Write and commit `state` as the checkpoint of `step`, then drop what is no longer kept. Returns the checkpoint's URI.

    Raises CheckpointError when it cannot be written: the earlier checkpoints are then as they were.
    """
    commit(store, pack(state), step, metrics or {})
    tidy(store, step, keep=keep, best=best, protect=protect)
    return storage.join(store, folder_name(step))


def tidy(
    store: str,
    step: int,
    *,
    keep: int,
    best: BestRule | None = None,
    protect: AbstractSet[int] = frozenset(),
    recycle: bool = False,
) -> bool:
    """After the commit of `step`: point `best.json` at the best checkpoint and remove those that are no longer kept.

    With `recycle` one removed checkpoint's files stay, hidden, for the next commit. Returns whether `step` is the best one.
    """
    kept = set(protect) | {step}
    top = None
    if best is not None and (top := best_of(store, best)) is not None:
        kept.add(top[0])
        pointer = {"step": top[0], "value": top[1], "metric": best.metric, "mode": best.mode}
        storage.write_bytes(storage.join(store, "best.json"), json.dumps(pointer).encode() + b"\n")
    prune(store, keep, kept, recycle)
    return top is not None and top[0] == step


def best_of(store: str, rule: BestRule) -> tuple[int, float] | None:
    """Step and value of the best checkpoint by its manifest: finite weights, finite metric; the earliest of equals."""
    top: tuple[int, float] | None = None
    for found in list_checkpoints(store):
        try:
            manifest = read_manifest(found.uri)
        except CheckpointError:
            continue  # a damaged checkpoint is never best; load_latest names it
        value = manifest["metrics"].get(rule.metric)
        if not manifest["finite"] or not isinstance(value, int | float):
            continue
        if top is None or (value < top[1] if rule.mode == "min" else value > top[1]):
            top = (found.step, float(value))
    return top


_UNREADABLE = (
    *(OSError, EOFError, SafetensorError, pickle.UnpicklingError),
    *(LookupError, AttributeError, TypeError, ValueError, RuntimeError),
)
"""What files raise that are not what their manifest says, by mistake or on purpose."""


def load(uri: str) -> tuple[TrainState, dict[str, Any]]:
    """The state and the manifest of one checkpoint, tensors on the CPU.

    Everything is verified first; files that the manifest does not name are ignored. Raises CheckpointError. No code that a
    file might carry is run.
    """
    manifest = read_manifest(uri)
    if problems := problems_with(uri, manifest):
        raise CheckpointError(f"checkpoint {uri} is damaged: {'; '.join(problems)}")
    try:
        if storage.is_local(uri):
            return _load_folder(storage.local_path(uri), manifest), manifest
        with tempfile.TemporaryDirectory(prefix="raydist-") as folder:
            for name, entry in manifest["files"].items():
                storage.download(storage.join(uri, entry.get("at", name)), Path(folder) / name)
            return _load_folder(Path(folder), manifest), manifest
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {uri} cannot be read: {type(error).__name__}: {error}") from error


def _load_folder(folder: Path, manifest: Mapping[str, Any]) -> TrainState:
    # pread: tensors own their memory, so nothing that happens to the file later can reach a running job
    tensors = {
        part: load_file(folder / f"{part}.safetensors", backend="pread")
        for part in ("model", "ema")
        if f"{part}.safetensors" in manifest["files"]
    }
    other = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    document = json.loads((folder / "state.json").read_bytes())
    return unpack(tensors, other, document)


def load_latest(store: str, warn: Callable[[str], None]) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest good checkpoint, or None when the store has none at all.

    Each newer one that is bad is named through `warn`. When there are checkpoints and none is good: CheckpointError, so that
    a run never starts from scratch unnoticed.
    """
    dispose_stale(store)
    bad = []
    for found in reversed(find(store)):
        try:
            manifest = read_manifest(found.uri)
            if not manifest["finite"]:
                raise CheckpointError(f"checkpoint {found.uri} holds weights that are not finite")
            loaded = load(found.uri)
        except CheckpointError as error:
            if not found.complete and not storage.is_local(store):
                warn(f"{found.uri} was never finished (it has no manifest.json), so it is left out")
                continue
            bad.append(str(error))
            warn(f"{error}; falling back to the one before it")
            continue
        return loaded
    if bad:
        raise CheckpointError(
            f"{store} has checkpoints, but none is good:\n  " + "\n  ".join(bad) + "\nrestore one of them from a copy, or move "
            "the folder away to start from scratch"
        )
    return None


def prune(store: str, keep: int, protect: AbstractSet[int] = frozenset(), recycle: bool = False) -> list[int]:
    """Remove all but the newest `keep` good checkpoints and those in `protect`; returns the steps removed.

    Good: the manifest reads, files have their sizes, weights are finite. Bad ones go only when a good one stays. Temporary
    folders whose writer is dead go too.
    """
    dispose_stale(store)
    everything = find(store)
    good = [found.step for found in everything if found.complete and _looks_good(found.uri)]
    if not good:
        return []
    kept = set(good[-keep:]) | protect
    removed = [found for found in everything if found.step not in kept]
    for found in removed:
        discard(store, found.uri, recycle)
    return [found.step for found in removed]


def _looks_good(uri: str) -> bool:
    try:
        manifest = read_manifest(uri)
    except CheckpointError:
        return False
    return bool(manifest["finite"]) and not problems_with(uri, manifest, hashes=False)
