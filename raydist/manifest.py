"""What makes a checkpoint complete: its manifest, and whether the files are what it says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from raydist import storage
from raydist.errors import CheckpointError

VERSION = 1
NAME = "manifest.json"
FILES = ("model.safetensors", "optimizer.pt", "state.json")
"""Files that every checkpoint has; `ema.safetensors` comes with an EMA, and other ranks may add theirs."""

_HASHES: dict[str, Any] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_FOLDER = re.compile(r"step-(\d{8,})")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")


class BestRule(Protocol):
    """What makes one checkpoint better than another (`checkpoint.best` of the job file)."""

    @property
    def metric(self) -> str: ...

    @property
    def mode(self) -> str: ...


@dataclass(frozen=True)
class Found:
    """A checkpoint's folder. `complete`: it has a manifest."""

    step: int
    uri: str
    complete: bool = True


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def find(store: str) -> list[Found]:
    """Every folder with a checkpoint's name, complete or not, ascending by step."""
    found = []
    for name in storage.names(store):
        if match := _FOLDER.fullmatch(name):
            uri = storage.join(store, name)
            found.append(Found(int(match[1]), uri, storage.exists(storage.join(uri, NAME))))
    return sorted(found, key=lambda f: f.step)


def list_checkpoints(store: str) -> list[Found]:
    """The complete checkpoints, ascending by step. Complete is not verified: see `verify`."""
    return [found for found in find(store) if found.complete]


def render(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's bytes. It ends with the sha256 of itself without that entry."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=2, allow_nan=False).encode() + b"\n"


def read_manifest(uri: str) -> dict[str, Any]:
    """The manifest of the checkpoint at `uri`. Raises CheckpointError when it is missing, changed or of another version."""
    where = storage.join(uri, NAME)
    try:
        data = storage.read_bytes(where)
    except OSError as error:
        raise CheckpointError(f"checkpoint {uri} is not complete: {NAME} cannot be read ({error})") from error
    try:
        manifest = json.loads(data)
        whole = isinstance(manifest, dict) and render(manifest) == data
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {uri} is damaged: {NAME} is not JSON ({error})") from error
    if not whole:
        raise CheckpointError(f"checkpoint {uri} is damaged: {NAME} is not as it was written (its own sha256 differs)")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {uri} has format version {manifest.get('version')!r}; this raydist reads version {VERSION}"
        )
    if problem := _structure(uri, manifest):
        raise CheckpointError(f"checkpoint {uri} is damaged: {NAME} {problem}")
    return dict(manifest)


def _structure(uri: str, manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with a manifest that was written by something else, in words."""
    kinds = {"step": int, "files": dict, "metrics": dict, "finite": bool}
    if absent := [key for key, kind in kinds.items() if not isinstance(manifest.get(key), kind)]:
        return f"lacks {', '.join(absent)}"
    if folder_name(manifest["step"]) != uri.rstrip("/").rsplit("/", 1)[-1]:
        return f"is that of step {manifest.get('step')}"
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("size"), int) or _hash_of(entry) is None:
            return f"has an entry without size or hash: {name!r}"
        if "/" in name or not _PLAIN.fullmatch(name) or not _PLAIN.fullmatch(str(entry.get("at", name))):
            return f"names a file outside the checkpoint: {name!r}"
    absent = [name for name in FILES if name not in manifest["files"]]
    return f"does not name {', '.join(absent)}" if absent else None


def problems_with(uri: str, manifest: Mapping[str, Any], *, hashes: bool = True) -> list[str]:
    """Files that are missing, of another size or (with `hashes`) of another content, one sentence each."""
    there = storage.sizes(uri)
    problems = []
    for name, entry in manifest["files"].items():
        at = entry.get("at", name)
        if at not in there:
            problems.append(f"{name} is missing")
        elif there[at] != entry["size"]:
            kind = "truncated" if there[at] < entry["size"] else "too long"
            problems.append(f"{name} is {kind}: {there[at]} bytes instead of {entry['size']}")
        elif hashes and (how := _hash_of(entry)) and digest(storage.join(uri, at), how) != entry[how]:
            problems.append(f"{name} has other content than was written ({how} differs)")
    return problems


def verify(uri: str) -> list[str]:
    """Everything wrong with one checkpoint, in words: a broken manifest, files missing, truncated, changed or stray."""
    try:
        manifest = read_manifest(uri)
    except CheckpointError as error:
        return [str(error)]
    listed = {NAME} | {entry.get("at", name) for name, entry in manifest["files"].items()}
    strays = [f"{name} is a stray file: the manifest does not name it" for name in storage.sizes(uri) if name not in listed]
    return problems_with(uri, manifest) + strays


def _hash_of(entry: Mapping[str, Any]) -> str | None:
    """The hash that an entry has: `xxh3_128`, or `sha256` in older checkpoints; None when it has none."""
    return next((kind for kind in _HASHES if isinstance(entry.get(kind), str)), None)


def digest(uri: str, kind: str) -> str:
    """A hash of a file, in hex."""
    total = _HASHES[kind]()
    for chunk in storage.read_chunks(uri):
        total.update(chunk)
    return str(total.hexdigest())
