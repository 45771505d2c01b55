"""How a model is spread: DDP over workers, DataParallel over one worker's GPUs, layers over one worker's devices."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydist.errors import ConfigError, TrainError
from raydist.precision import Precision, total_norm
from raydist.state import TrainState, check_model_matches
from raydist.world import World, check_in_sync

if TYPE_CHECKING:
    from raydist.config_parts import DdpStrategy, ModelParallelStrategy, Strategy


_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""torch 2.13 renamed the option; older releases know the old name only."""


class Elsewhere(Exception):
    """Another rank scores this batch: the model's last stage is not here."""


class Spread:
    """A model as the strategy runs it: `module` is the plain one (state, evaluation), `forward` the one to train through."""

    def __init__(self, module: nn.Module, world: World, wrap: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self.module = module
        self.world = world
        self._wrap = wrap
        self._forward: nn.Module | None = None if wrap else module
        self._may_skip_sync = False

    @property
    def replicated(self) -> bool:
        """Whether DDP reduces the gradients over ranks."""
        return self.world.world_size > 1

    @property
    def forward(self) -> nn.Module:
        """The wrapped model; wrapped at the first use, which every rank must reach together."""
        if self._forward is None:
            assert self._wrap is not None
            self._forward = self._wrap(self.module)
        return self._forward

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer of this rank trains."""
        return list(self.module.parameters())

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """The norm of the whole model's gradient. Every rank must call it, after the reduction."""
        return total_norm([p.grad for p in parameters if p.grad is not None], self.world.device)

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank that holds the same tensors rank 0's. Every rank must call it."""
        self.world.broadcast_tensors(tensors)

    def scored(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` (this module or its moving average) as an evaluation calls it."""
        return model

    def whole(self, state: TrainState) -> TrainState:
        """On rank 0 the state of the whole model. Every rank must call it."""
        return state

    def own(self, state: TrainState) -> TrainState:
        """What this rank takes of a whole state. Raises CheckpointError when the model is another one."""
        check_model_matches(self.module.state_dict(), state.model)
        return state

    def where(self) -> str:
        """Words for the part of the model that this rank has; empty when it has all of it."""
        return ""

    def notes(self) -> list[tuple[str, dict[str, Any]]]:
        """Events (kind, fields) on how the model was spread, on rank 0."""
        return []

    def reduce_wait(self) -> float | None:
        """Seconds that this rank's last known backward waited for the others after its own gradients were ready.

        From DDP's own timers: the time of the reduction less what ran beside the backward. Of the step before
        the last, on the CPU by the clock and on a GPU by events; None when DDP does not reduce, or has measured nothing yet.
        Asking costs some 0.1 ms.
        """
        if not isinstance(self._forward, DistributedDataParallel):
            return None
        data = self._forward._get_ddp_logging_data()
        total, beside = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
        return None if total is None or beside is None else max(0.0, (total - beside) * 1e-9)

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Around every micro-batch; gradients are reduced in the `last` one only.

        A static graph is recorded in the first step, where DDP must see every backward: there each one reduces, which gives the
        same sum.
        """
        if not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        if last:
            self._may_skip_sync = True
            return nullcontext()
        return nullcontext() if self.forward.static_graph and not self._may_skip_sync else self.forward.no_sync()

    def check_in_sync(self, when: str) -> None:
        """Raise TrainError if a parameter differs between ranks. Every rank must call it."""
        check_in_sync(self.world, dict(self.module.named_parameters()), when)


def spread(
    strategy: Strategy,
    model: nn.Module,
    world: World,
    precision: Precision | None = None,
    sample: Callable[[nn.Module], tuple[torch.Tensor, ...]] | None = None,
) -> Spread:
    """Place `model` on the worker's device(s) and wrap it. Every rank must call it.

    A pipeline measures its layers on what `sample(model)` gives, the model's inputs.
    Raises TrainError when the ranks built different models, ConfigError when the strategy does not fit the workers.
    """
    if strategy.name in ("dp", "model_parallel") and world.world_size > 1:
        raise ConfigError(
            f"strategy: {strategy.name} runs in one worker, and scaling.workers gives {world.world_size}; use ddp"
        )
    if strategy.name == "model_parallel":
        placed = place_layers(strategy, model, world.device)
        return Spread(placed, world)
    if strategy.name == "pipeline" and strategy.stages == 1:
        strategy = _whole(world)
    if strategy.name == "pipeline":
        from raydist.config import Precision as Setting
        from raydist.pipeline.spread import PipelineSpread

        return PipelineSpread(strategy, model, world, sample, precision or Precision(Setting(), world.device))
    if strategy.name == "fsdp" and world.world_size > 1:
        from raydist.fsdp import FsdpSpread

        if strategy.cpu_offload and world.device.type != "cuda":
            raise ConfigError("strategy.cpu_offload: these workers have no GPU, so the weights are in host memory anyway")
        return FsdpSpread(strategy, model, world)
    model = model.to(world.device)
    if strategy.name == "fsdp":
        return Spread(model, world)
    if strategy.name == "dp":
        return Spread(model, world, _data_parallel)
    if strategy.name != "ddp":
        raise ConfigError(f"strategy: {strategy.name} is not a training-loop strategy")
    if strategy.sync_batchnorm and world.world_size > 1:
        if world.device.type != "cuda":
            raise ConfigError(
                "strategy.sync_batchnorm: torch's SyncBatchNorm runs on GPUs only, and these workers have none; set it to false"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if world.world_size == 1:
        return Spread(model, world)
    if strategy.comm_hook == "bf16_compress" and world.backend != "nccl":
        raise ConfigError(
            f"strategy.comm_hook: bf16_compress needs NCCL, and these workers use {world.backend}; use fp16_compress"
        )
    check_in_sync(world, dict(model.named_parameters()), "before the first step")
    return Spread(model, world, lambda module: _ddp(strategy, module, world))


def _whole(world: World) -> DdpStrategy:
    """What a pipeline of one stage is: replicas of the whole model."""
    from raydist.config_parts import DdpStrategy

    return DdpStrategy()


def _ddp(strategy: DdpStrategy, model: nn.Module, world: World) -> DistributedDataParallel:
    buffers: dict[str, Any] = {_SYNC_BUFFERS: strategy.broadcast_buffers}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=strategy.bucket_cap_mb,
        gradient_as_bucket_view=strategy.gradient_as_bucket_view,
        **buffers,
        find_unused_parameters=strategy.find_unused_parameters,
        static_graph=strategy.static_graph,
    )
    wrapped._set_ddp_runtime_logging_sample_rate(1)  # DDP's timers run in every step: `Spread.reduce_wait` reads them
    if strategy.comm_hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = {"fp16_compress": default_hooks.fp16_compress_hook, "bf16_compress": default_hooks.bf16_compress_hook}
        wrapped.register_comm_hook(None, hook[strategy.comm_hook])
    return wrapped


def _data_parallel(model: nn.Module) -> nn.Module:
    count = torch.cuda.device_count()
    why = "ddp is better: one process a GPU, no copy of the model and no gather at every step"
    if count < 2:
        warnings.warn(f"strategy dp: this worker sees {count} GPUs, so DataParallel changes nothing; {why}", stacklevel=2)
        return model
    warnings.warn(f"strategy dp: nn.DataParallel over {count} GPUs of one process, for comparison; {why}", stacklevel=2)
    return nn.DataParallel(model)


def place_layers(strategy: ModelParallelStrategy, model: nn.Module, device: torch.device) -> nn.Module:
    """Put the parts of a model on several devices; inputs of a part follow it there.

    `device_map` names submodules by prefix ("encoder", "layers.3"); `auto` cuts the top-level children into runs of about
    equal parameter bytes, in order. Every part with parameters must be covered; parameters and buffers of the model itself go
    where its first part goes.
    """
    devices = [_device(d, "strategy.devices") for d in strategy.devices] if strategy.devices else _all_devices(device)
    children = dict(model.named_children())
    placed: dict[str, torch.device] = (
        _even_cut(children, devices)
        if strategy.device_map == "auto"
        else {k: _device(v, f"strategy.device_map.{k}") for k, v in strategy.device_map.items()}
    )
    for name in placed:
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"strategy.device_map: the model has no part {name!r}; "
                f"its top-level parts are {', '.join(children) or '(none)'}"
            ) from error
    for name, _ in model.named_parameters():
        if "." in name and not any(name.startswith(part + ".") for part in placed):
            raise ConfigError(f"strategy.device_map: parameter {name!r} is on no device; name its part too")
    first = next(iter(placed.values()), device)
    model._apply(lambda tensor: tensor.to(first), recurse=False)
    for name, where in sorted(placed.items(), key=lambda item: item[0].count(".")):
        part = model.get_submodule(name)
        part.to(where)
        part.register_forward_pre_hook(_mover(where), with_kwargs=True)
    return model


def _device(name: str, key: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {name!r} is no device of this worker ({reason}); such as cpu or cuda:0") from error
    return device


def _all_devices(device: torch.device) -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]


def _even_cut(children: dict[str, nn.Module], devices: list[torch.device]) -> dict[str, torch.device]:
    sizes = {n: sum(p.numel() * p.element_size() for p in m.parameters()) for n, m in children.items()}
    total, seen, placed = sum(sizes.values()) or 1, 0, {}
    for name, size in sizes.items():
        middle = seen + size / 2
        placed[name] = devices[min(len(devices) - 1, int(middle * len(devices) / total))]
        seen += size
    return placed


def _mover(device: torch.device) -> Callable[..., Any]:
    from raydist.task import to_device

    def move(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return to_device(args, device), to_device(kwargs, device)

    return move


def check_used(spread: Spread, find_unused: bool, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
    """Run one forward and backward without talking to other ranks, and see which parameters get no gradient.

    DDP would wait for such a parameter for ever on the ranks that use it. Raises TrainError on all ranks, naming the first one,
    its rank and the option. Leaves weights, buffers and gradients as they were. Every rank must call it.
    """
    if not spread.replicated:
        return
    problem: str | None = None
    with kept_buffers(spread.module):
        try:
            loss_of(spread.module).backward()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    unused = [] if problem else [n for n, p in spread.module.named_parameters() if p.requires_grad and p.grad is None]
    for p in spread.module.parameters():
        p.grad = None
    everyone = spread.world.gather((problem, unused))
    for rank, (broken, _) in enumerate(everyone):
        if broken:
            raise TrainError(f"rank {rank}: the first forward and backward failed: {broken}")
    if not find_unused:
        refuse_unused(
            [names for _, names in everyone], "gets no gradient in the first step, and DDP would wait for it for ever"
        )


def refuse_unused(everyone: Sequence[Sequence[str]], why: str) -> None:
    """TrainError for the first rank's first parameter that gets no gradient, if there is one."""
    for rank, names in enumerate(everyone):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise TrainError(
                f"rank {rank}: parameter {names[0]!r}{more} {why}. Use it in the loss, freeze it (requires_grad = False), "
                "or set strategy.find_unused_parameters: true"
            )


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Passes within it leave the module's buffers as they were."""
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
