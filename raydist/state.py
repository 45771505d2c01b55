"""TrainState: all that a run needs to go on, and its two plain forms (files' content, and back).

Packing sorts a state into what each file takes: named tensors (safetensors), other tensors and primitives (`optimizer.pt`,
loaded with `weights_only=True`), and JSON. A value that could not be read back is refused here, while its name is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydist.errors import CheckpointError


@dataclass
class TrainState:
    """A run between two steps. Model keys carry no `module.` prefix."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The torch optimizer's `state_dict()`."""
    schedule: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    ema: dict[str, Tensor] | None = None
    position: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "index": 0})
    """Where the next step reads: epoch and global batch in it."""
    counters: dict[str, Any] = field(default_factory=dict)
    """step, applied, skipped, rows_seen, ...: ints and floats."""
    best: dict[str, Any] | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Fingerprint of the data and statistics fitted on it."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved job config as JSON."""
    extra: dict[str, Any] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    """Names in `model` that are buffers: there an infinity is a value (an attention mask), in a weight it is a failure."""


JSON_PARTS = ("position", "counters", "best", "data", "config", "extra", "buffers")
TORCH_PARTS = ("optimizer", "schedule", "scaler", "rng")
TENSOR_PARTS = ("model", "ema")

Copy = Callable[[str, Tensor], Tensor]
"""`(where, tensor) -> tensor`: a detached, contiguous CPU tensor of the same values; `where` names the tensor in the state."""


@dataclass
class Packed:
    """A state in the form its files take."""

    tensors: dict[str, dict[str, Tensor]]
    """Part (`model`, `ema`) -> name -> tensor; no two share memory."""
    other: dict[str, Any]
    document: dict[str, Any]


def pack(state: TrainState, copy: Copy | None = None) -> Packed:
    """Sort `state` into files' content.

    Raises CheckpointError for a value that a checkpoint cannot hold, naming its place. Without `copy` the tensors may still
    share memory with the live state: write them before the next step.
    """
    take = copy or _plain_copy
    tensors: dict[str, dict[str, Tensor]] = {}
    names: dict[str, dict[str, str]] = {}
    for part in TENSOR_PARTS:
        named = getattr(state, part)
        if named is not None:
            tensors[part], names[part] = _untie(part, named, take)
    other = {part: _plain(getattr(state, part), part, take) for part in TORCH_PARTS}
    document = {part: _json(getattr(state, part), part) for part in JSON_PARTS}
    return Packed(tensors, other, {**document, "names": names})


def unpack(tensors: dict[str, dict[str, Tensor]], other: Mapping[str, Any], document: Mapping[str, Any]) -> TrainState:
    """The state that was packed; tied tensors are one object again. Raises KeyError when a part is missing."""
    parts: dict[str, dict[str, Tensor] | None] = {"model": {}, "ema": None}
    for part, named in tensors.items():
        parts[part] = {name: named[kept] for name, kept in document["names"][part].items()}
    return TrainState(
        **parts,  # type: ignore[arg-type]
        **{part: other[part] for part in TORCH_PARTS},
        **{part: document[part] for part in JSON_PARTS},
    )


def _plain_copy(where: str, tensor: Tensor) -> Tensor:
    """The tensor itself where it is alone in its storage, else a copy (a file would hold the whole storage)."""
    tensor = tensor.cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def _checked(where: str, tensor: Tensor) -> Tensor:
    """The tensor, detached; refused when it is not an ordinary dense one."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(f"{where} is a {kind} tensor; a checkpoint holds dense tensors only")
    return tensor.detach().resolve_conj().resolve_neg()


def _untie(part: str, named: Mapping[str, Tensor], take: Copy) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each distinct tensor once, and every name in order with the name its tensor is kept under."""
    kept: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, value in named.items():
        tensor = _checked(where := f"{part}[{name!r}]", value)
        if tensor.dtype == torch.complex128:
            raise CheckpointError(f"{where} is complex128, which safetensors cannot hold; complex64 is its widest complex type")
        names[name] = name
        if tensor.numel():
            same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
            names[name] = first.setdefault(same, name)
            if names[name] != name:
                continue
        copied = take(f"{part}.{name}", tensor)
        memory = copied.untyped_storage().data_ptr()
        if memory in storages and tensor.numel():
            copied = copied.clone()
        storages.add(memory)
        kept[name] = copied
    return kept, names


def _plain(value: Any, where: str, take: Copy) -> Any:
    """`value` with tensors copied and everything else as `torch.load(weights_only=True)` reads it back."""
    if isinstance(value, Tensor):
        return take(where, _checked(where, value))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, torch.dtype | torch.device | torch.Size):
        return value
    if type(value) in (bool, int, float, complex, str, bytes):
        return value
    for kind in (int, float, str):  # an enum member or other subclass: its plain value
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]", take) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{i}]", take) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    hint = "; keep it as a tensor (torch.from_numpy)" if isinstance(value, np.ndarray) else ""
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        f"only tensors, numbers, strings, None, and lists, tuples and dicts of these are read back without running code{hint}"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (str, int, float, bool):
        return key
    raise CheckpointError(f"{where} has the key {key!r} ({type(key).__name__}); keys in a checkpoint are strings or numbers")


def _json(value: Any, where: str) -> Any:
    """`value` as JSON gives it back (tuples become lists)."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; this part of a checkpoint is JSON, whose keys are strings")
        return {key: _json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; this part of a checkpoint is JSON: "
        f"numbers, strings, booleans, None, lists and dicts"
    )


def finite(packed: Packed, buffers: Iterable[str]) -> bool:
    """Whether no weight is NaN or infinite. Buffers may hold infinities, not NaN."""
    free = set(buffers)
    return all(_finite(tensor, allow_inf=name in free) for named in packed.tensors.values() for name, tensor in named.items())


def _finite(tensor: Tensor, allow_inf: bool) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()  # float8 has no aminmax
    low, high = (float(x) for x in torch.aminmax(tensor))  # one pass, no temporary; NaN comes through
    return low == low and (allow_inf or (low > -torch.inf and high < torch.inf))


def check_model_matches(model_state_dict: Mapping[str, Tensor], saved: Mapping[str, Tensor], limit: int = 5) -> None:
    """Raise CheckpointError unless the model and the checkpoint have the same names and shapes.

    The message names up to `limit` keys, with both shapes.
    """
    problems = []
    for name in [*model_state_dict, *(n for n in saved if n not in model_state_dict)]:
        here, there = model_state_dict.get(name), saved.get(name)
        if there is None:
            problems.append(f"{name}: model has {_shape(here)}, checkpoint has no such key")
        elif here is None:
            problems.append(f"{name}: checkpoint has {_shape(there)}, model has no such key")
        elif here.shape != there.shape:
            problems.append(f"{name}: model has {_shape(here)}, checkpoint has {_shape(there)}")
    if problems:
        more = f"\n  and {len(problems) - limit} more" if len(problems) > limit else ""
        raise CheckpointError(
            "the checkpoint belongs to a different model:\n  "
            + "\n  ".join(problems[:limit])
            + more
            + "\nuse the task this run was started with, or another name or storage for a new run"
        )


def _shape(tensor: Tensor | None) -> str:
    return str(list(tensor.shape)) if tensor is not None else "nothing"
