"""Fully sharded data parallel: every worker keeps a shard of each weight, and gathers one unit of layers at a time.

torch's `fully_shard` (FSDP2). What a checkpoint holds is the whole model under plain names, as with ddp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from raydist.batching import share
from raydist.data.source import StepData
from raydist.errors import ConfigError
from raydist.passes import Passes
from raydist.precision import Precision, total_norm
from raydist.state import TrainState, check_model_matches
from raydist.strategy import Spread, kept_buffers, refuse_unused
from raydist.task import slice_rows, to_device
from raydist.world import World, check_in_sync

if TYPE_CHECKING:
    from raydist.config_parts import FsdpStrategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


def units_of(model: nn.Module, asked: list[str] | None = None) -> dict[str, nn.Module]:
    """The modules whose weights are gathered together, by name; what lies in none of them is one unit more, the root's.

    Without `asked`, the entries of the outermost ModuleLists and Sequentials, and where there are none the top-level children.
    One that shares a weight with a module outside is left to the root. Raises ConfigError for an asked name that cannot be one.
    """
    found = _asked(model, asked) if asked is not None else _entries(model, "") or dict(model.named_children())
    found = {name: m for name, m in found.items() if any(True for _ in m.parameters())}
    chosen = {}
    for name, module in found.items():
        tied = _tied_outside(model, name, module)
        if tied is None:
            chosen[name] = module
        elif asked is not None:
            raise ConfigError(f"strategy.units: {name!r} shares the weight {tied!r} with a module outside it; leave it out")
    return chosen


def _entries(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not _is_container(child):
            found[path] = child
        else:
            found |= _entries(child, f"{path}.")
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _asked(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    found = {}
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"strategy.units: the model has no part {name!r}; it has {', '.join(known[:8])}…")
        found[name] = model.get_submodule(name)
        if isinstance(found[name], nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"strategy.units: {name!r} is a list of modules, which is never called; name its entries")
    return found


def _tied_outside(model: nn.Module, name: str, module: nn.Module) -> str | None:
    inside = {id(p) for p in module.parameters()}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not path.startswith(f"{name}."):
            return path
    return None


class FsdpSpread(Spread):
    """A model whose parameters are shards, but while their unit runs. Every rank must make the same calls of it."""

    def __init__(self, strategy: FsdpStrategy, model: nn.Module, world: World) -> None:
        """Raises TrainError when the ranks built different models, ConfigError for a model that cannot be sharded."""
        units = units_of(model, strategy.units)
        check_shardable(model, units)
        check_in_sync(world, dict(model.named_parameters()), "before the first step")
        self.strategy = strategy
        self.shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model.state_dict().items()}
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=_DTYPES[strategy.param_dtype], reduce_dtype=_DTYPES[strategy.reduce_dtype]
            ),
            "offload_policy": CPUOffloadPolicy() if strategy.cpu_offload else OffloadPolicy(),
        }
        for name in sorted(units, key=lambda name: -name.count(".")):
            fully_shard(units[name], reshard_after_forward=strategy.reshard_after_forward, **options)
        fully_shard(model, **options)
        if strategy.find_unused_parameters:
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        model.register_forward_hook(_close_after_scoring)
        super().__init__(model, world)
        self._fresh = True

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Around every micro-batch: rank 0's buffers before the first, gradients reduced in each or in the `last` one."""
        if self._fresh and self.strategy.broadcast_buffers:
            self.share([b for b in self.module.buffers() if b.numel()])
        self._fresh = last
        reduce = last or self.strategy.reduce_each_micro_batch
        self.module.set_requires_gradient_sync(reduce)  # type: ignore[operator]
        return nullcontext()

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """The norm of the whole model's gradient: squares summed over the shards. Every rank must call it."""
        shards = [_local(p.grad) for p in parameters if p.grad is not None]
        return float(self.world.sum([total_norm(shards, self.world.device) ** 2])[0] ** 0.5)

    def check_in_sync(self, when: str) -> None:
        """Nothing to compare: no rank holds what another holds."""

    def scored(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model`, marked as one that all ranks must call equally often."""
        model.lockstep = True  # type: ignore[assignment]
        return model

    def whole(self, state: TrainState) -> TrainState:
        """On rank 0 the state of the whole model, in host memory; one tensor at a time is gathered. Every rank must call it."""
        main = self.world.is_main
        return replace(state, model=_gathered(state.model, main), optimizer=_gathered(state.optimizer, main))

    def own(self, state: TrainState) -> TrainState:
        """This rank's shards of a whole state. CheckpointError when it belongs to another model."""
        check_model_matches(self.shapes, state.model)
        here = self.module.state_dict()
        model = {name: _shard(tensor, here[name]) for name, tensor in state.model.items()}
        trained = [p for p in self.module.parameters() if p.requires_grad]
        moments = {
            at: {key: _shard(value, trained[at]) for key, value in entry.items()}
            for at, entry in state.optimizer["state"].items()
        }
        return replace(state, model=model, optimizer={**state.optimizer, "state": moments})

    @contextmanager
    def watched(self) -> Iterator[dict[str, bool]]:
        """Within it, a backward reduces nothing and leaves no gradient: the dict gets the name of each parameter that this
        rank's own backward reached, and whether that gradient is finite. Every rank must run the same backwards."""
        seen: dict[str, bool] = {}
        groups = [g for m in self.module.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups]
        for group in groups:
            group.post_backward = _watching(group, group.post_backward, seen)  # type: ignore[method-assign]
        self.module.set_requires_gradient_sync(True)  # type: ignore[operator]
        try:
            yield seen
        finally:
            for group in groups:
                del group.post_backward


class FsdpPasses(Passes):
    """`Passes` in which no rank runs the model alone."""

    spread: FsdpSpread

    def _check_used(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
        """As `check_used`: a parameter that one rank uses and another does not would break the reduction."""
        module = self.spread.module
        with kept_buffers(module), self.spread.watched() as seen:
            loss_of(module).backward()
        unused = [n for n, p in module.named_parameters() if p.requires_grad and n not in seen]
        everyone = self.world.gather(unused)
        if not self.spread.strategy.find_unused_parameters:
            refuse_unused(everyone, "gets no gradient in the first step")

    def _may_not_fit(self) -> bool:
        """Ranks wait for each other in every unit, so one out of memory cannot go on: a restart halves the micro-batch."""
        return False

    def diagnose(self, data: StepData, done: int) -> tuple[str, int, int] | None:
        """As `Passes.diagnose`; all ranks run all of their micro-batches."""
        self._seed(done)
        found: tuple[str, int, int] | None = None
        first, _ = share(data.global_rows, self.world.rank, self.world.world_size)
        with kept_buffers(self.spread.module):
            for piece in self.cut(data):
                batch = to_device(slice_rows(data.batch, piece.start, piece.stop), self.world.device)
                with self.spread.watched() as seen:
                    loss = self.loss(self.spread.module, batch, done + 1)
                    loss.backward()
                what = None if torch.isfinite(loss) else f"the loss is {float(loss.detach())}"
                bad = [n for n, _ in self.spread.module.named_parameters() if not seen.get(n, True)]
                if what is None and bad:
                    what = f"the gradient of {bad[0]!r} is not finite"
                if what is not None and piece.rows and found is None:
                    found = (what, first + piece.start, first + piece.stop)
        return found


def check_shardable(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Raises ConfigError for a parameter without dimensions, and for a unit of mixed dtypes."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"strategy fsdp: parameter {name!r} has no dimension to shard; give it the shape [1], or use ddp")
    held: set[int] = set()
    for name, module in [*sorted(units.items(), key=lambda item: -item[0].count(".")), ("the rest", model)]:
        mine = [p for p in module.parameters() if id(p) not in held]
        held |= {id(p) for p in mine}
        if len(kinds := {str(p.dtype) for p in mine if p.requires_grad}) > 1:
            raise ConfigError(
                f"strategy fsdp: the trained weights of unit {name!r} are {' and '.join(sorted(kinds))}; "
                "a unit needs one kind: convert them, or choose other strategy.units"
            )


def _close_after_scoring(module: nn.Module, _args: Any, _output: Any) -> None:
    """Without a backward to come the root's weights need not stay gathered."""
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def _watching(group: Any, original: Any, seen: dict[str, bool]) -> Any:
    def post_backward(*_args: Any) -> None:
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                seen[held._param_fqn] = bool(torch.isfinite(whole.grad).all()) and seen.get(held._param_fqn, True)
                whole.grad = None
        keep, group.reduce_scatter_unused_params = group.reduce_scatter_unused_params, False
        original()
        group.reduce_scatter_unused_params = keep

    return post_backward


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(value: Any, keep: bool) -> Any:
    """`value` with whole tensors in host memory instead of shards; where not `keep`, empty ones."""
    if isinstance(value, DTensor):
        whole = _moved(value, value.device_mesh.device_type).full_tensor()
        return whole.cpu() if keep else whole.new_empty(0)
    if isinstance(value, dict):
        return {key: _gathered(item, keep) for key, item in value.items()}
    return value


def _shard(value: Any, like: torch.Tensor) -> Any:
    """This rank's part of `value`, if `like` is sharded and of the same shape. Nothing is sent."""
    if not isinstance(value, torch.Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    device = like.to_local().device
    mesh = like.device_mesh
    shard = distribute_tensor(value.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return _moved(shard, device)


def _moved(tensor: DTensor, device: torch.device | str) -> DTensor:
    """The shards of `tensor` on `device`; under CPU offload that is not where the ranks talk."""
    moved = tensor.detach().to(device)
    assert isinstance(moved, DTensor)
    return moved
