"""Parameters and memory of one worker, by a pass over tensors that have shapes and no data (torch's FakeTensorMode)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from raydist.errors import ConfigError, RaydistError
from raydist.optim import build_optimizer
from raydist.precision import Precision
from raydist.task import Task, slice_rows
from raydist.trainer import build_model

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.config_parts import FsdpStrategy


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker; None is not known (`problem` says why). `buffers` counts with `weights` in `total`.

    `activations` is what forward and backward hold at their peak beyond weights and gradients, temporaries included.
    """

    parameters: int
    trainable: int
    weights: int
    buffers: int
    gradients: int
    reduction: int
    ema: int
    optimizer: int | None
    activations: int | None
    micro: int | None
    problem: str | None = None
    gathered: int = 0
    """Of fsdp: whole weights and gradients beside the shards, at their most."""

    @property
    def total(self) -> int | None:
        """The parts' sum: an upper bound, since gradients grow while activations shrink."""
        if self.optimizer is None or self.activations is None:
            return None
        fixed = self.weights + self.buffers + self.gradients + self.reduction + self.ema + self.gathered
        return fixed + self.optimizer + self.activations

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def measure(config: JobConfig, task: Task, batch: Any, micro: int | None, workers: int) -> Memory:
    """Memory of one worker that trains `micro` rows at a time; `batch` (real rows, at least `micro`) or None without data.

    Nothing of the model's size is allocated. A model, loss or optimizer that reads values on the way (`.item()`) cannot be
    followed: then what is known is given, with a `problem`. ConfigError when the task gives no model.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about a device or a kernel that only exists later
        model = _built(task)
        fixed = _fixed(config, model, workers)
        problem, optimizer, activations = None, None, None
        try:
            optimizer = _optimizer_bytes(config, model)
        except Exception as error:
            problem = f"the optimizer's memory is not known: {_words(error)}"
        if batch is not None and micro is not None:
            rows = tree_map_only(torch.Tensor, mode.from_tensor, slice_rows(batch, 0, micro))
            try:
                activations = _activation_bytes(config, task, model, rows)
            except Exception as error:
                problem = f"the activations are not known: {_words(error)}"
    if optimizer is not None and config.strategy.name == "fsdp":
        optimizer = -(-optimizer // workers)
    return Memory(**fixed, optimizer=optimizer, activations=activations, micro=micro, problem=problem)


def _built(task: Task) -> nn.Module:
    try:
        return build_model(task)
    except RaydistError:
        raise
    except Exception as error:
        raise ConfigError(
            f"task: the model cannot be built without data in its tensors: {_words(error)}. `raydist plan` builds it so, to "
            "need no memory; leave reading weights from files to a checkpoint"
        ) from error


def _gathered(strategy: FsdpStrategy, model: nn.Module) -> int:
    """Bytes that `fully_shard` holds beside the shards: the unit that runs and the one prefetched (torch gathers one ahead in
    backward), and the running unit's whole gradient. Without resharding after the forward: all weights, and that gradient."""
    from raydist.fsdp import units_of

    units = [_bytes(unit.parameters()) for unit in units_of(model, strategy.units).values()]
    everything = _bytes(model.parameters())
    rest = max(0, everything - sum(units))
    weights = min(everything, rest + sum(sorted(units, reverse=True)[:2])) if strategy.reshard_after_forward else everything
    gradients = max([*units, rest]) if strategy.reduce_each_micro_batch else everything
    return weights + gradients


def _fixed(config: JobConfig, model: nn.Module, workers: int) -> dict[str, int]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    weights, buffers = _bytes(model.parameters()), _bytes(model.buffers())
    gradients = _bytes(trainable)
    strategy = config.strategy
    ddp = strategy.name == "ddp" and workers > 1
    views = strategy.name == "ddp" and strategy.gradient_as_bucket_view
    parts = workers if strategy.name == "fsdp" else 1
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in trainable),
        "weights": -(-weights // parts),
        "buffers": buffers,
        "gradients": -(-gradients // parts),
        "reduction": gradients if ddp and not views else 0,
        "ema": weights + buffers if config.train.ema is not None else 0,
        "gathered": _gathered(strategy, model) if strategy.name == "fsdp" and workers > 1 else 0,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _optimizer_bytes(config: JobConfig, model: nn.Module) -> int:
    """Run one step on gradients of the right shapes, and count the state it made."""
    settings = config.optimizer
    if settings.name is not None:  # fused kernels hold the same state, and need real devices
        settings = settings.model_copy(update={"fused": False})
    optimizer = build_optimizer(settings, model.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return _bytes(v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def _activation_bytes(config: JobConfig, task: Task, model: nn.Module, batch: Any) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    model.train()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        with Precision(config.precision, torch.device("cpu")).forward():
            loss = task.loss(model, batch)
        loss.backward()
    peaks: list[dict[Any, int]] = list(tracker.get_tracker_snapshot("peak").values())
    return sum(
        count for peak in peaks for kind, count in peak.items() if getattr(kind, "name", "") in ("ACT", "TEMP", "INP", "OTH")
    )


def _words(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}".rstrip(": ")
