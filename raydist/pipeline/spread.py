"""A model of which this rank holds one stage: what it owns, what it shares, and the whole state of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from raydist.pipeline.chain import Chain
from raydist.pipeline.chunk import Chunk
from raydist.pipeline.cutting import Cutting, make_cut
from raydist.pipeline.grid import make_grid
from raydist.pipeline.layers import Layer, layers_of
from raydist.precision import Precision, total_norm
from raydist.state import TrainState, check_model_matches
from raydist.strategy import Spread
from raydist.world import World, check_in_sync

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy

Sample = Callable[[nn.Module], tuple[torch.Tensor, ...]]
"""Gives the model's inputs of one micro-batch, to measure with. Called on rank 0 only."""


class PipelineSpread(Spread):
    """The whole model's object, in which the parameters and buffers of other stages are None: names stay as they are."""

    def __init__(
        self, strategy: PipelineStrategy, model: nn.Module, world: World, sample: Sample | None, precision: Precision
    ) -> None:
        self.strategy = strategy
        self.grid = world.grid or make_grid(strategy, world)
        layers = layers_of(model)
        self.names = [layer.name for layer in layers]
        self.cutting: Cutting | None = None
        self.ranges = world.broadcast(self._cut(model, layers, world, sample, precision) if world.is_main else None)
        self.runs = [run for run in range(strategy.runs) if strategy.rank_of(run) == self.grid.stage]
        self.bad_gradient: str | None = None
        self.order = list(model.state_dict())
        self.shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model.state_dict().items()}
        self._number = {id(p): at for at, p in enumerate(p for p in model.parameters() if p.requires_grad)}
        holders: dict[int, set[int]] = {}
        for run, (start, stop) in enumerate(self.ranges):
            for layer in layers[start:stop]:
                for module in layer.modules:
                    for tensor in (*module.parameters(), *module.buffers()):
                        holders.setdefault(id(tensor), set()).add(strategy.rank_of(run))
        own = {key for key, stages in holders.items() if self.grid.stage in stages}
        self._tie(model, holders, world)
        _free(model, own)
        super().__init__(model.to(world.device), world)
        self._nothing = nn.Parameter(torch.zeros(1, device=world.device))

    def _cut(
        self, model: nn.Module, layers: list[Layer], world: World, sample: Sample | None, precision: Precision
    ) -> list[tuple[int, int]]:
        inputs = None
        if sample is not None:
            model.to(world.device)
            inputs = sample(model)
        self.cutting = make_cut(self.strategy, layers, inputs, precision)
        return self.cutting.ranges

    def _tie(self, model: nn.Module, holders: dict[int, set[int]], world: World) -> None:
        """Groups of the stages that share a parameter. Every rank makes all groups, in the same order."""
        self._tied: list[tuple[nn.Parameter, Any]] = []
        self._counted_elsewhere: set[int] = set()
        stages, mine = self.strategy.stages, self.grid.stage
        made: dict[tuple[int, ...], Any] = {}
        for parameter in model.parameters():
            shared = tuple(sorted(holders[id(parameter)]))
            if len(shared) < 2 or not parameter.requires_grad:
                continue
            for replica in range(self.strategy.replicas):
                ranks = tuple(replica * stages + stage for stage in shared)
                if ranks not in made:
                    made[ranks] = dist.new_group(ranks)
                if world.rank in ranks:
                    self._tied.append((parameter, made[ranks]))
            if mine != shared[0]:
                self._counted_elsewhere.add(id(parameter))

    # -- what the trainer asks ------------------------------------------------------------------------------------------

    @property
    def replicated(self) -> bool:
        """Whether gradients are reduced over replicas."""
        return self.strategy.replicas > 1

    def parameters(self) -> list[nn.Parameter]:
        """This stage's parameters; one that is never used where it has none to train."""
        found = list(self.module.parameters())
        return found if any(p.requires_grad for p in found) else [self._nothing]

    def where(self) -> str:
        """Words for this rank's place."""
        parts = [f"{self.names[a]} … {self.names[b - 1]}" for a, b in (self.ranges[run] for run in self.runs)]
        replica = f", replica {self.grid.replica}" if self.strategy.replicas > 1 else ""
        return f"stage {self.grid.stage} (layers {' and '.join(parts)}{replica})"

    def notes(self) -> list[tuple[str, dict[str, Any]]]:
        """The cut as a table."""
        if self.cutting is None:
            return []
        return [("pipeline", {"reason": "\n".join(self.cutting.lines()), **self.cutting.plain()})]

    def chunks(self, model: nn.Module, precision: Precision) -> dict[int, Chunk]:
        """This stage's runs of layers in `model` (the module itself, or a copy of it such as its moving average)."""
        layers = layers_of(model)
        recompute = self.strategy.checkpoint_activations
        return {run: Chunk(layers[a:b], a, precision, recompute) for run in self.runs for a, b in (self.ranges[run],)}

    def scored(self, model: nn.Module, precision: Precision) -> nn.Module:
        """The stages of `model` as one model, for an evaluation."""
        return Chain(model, self.chunks(model, precision), self.strategy, self.grid, self.world.device)

    def reduce(self) -> None:
        """Sum the gradients of tied weights over their stages, and all over the replicas. Every rank must call it."""
        for parameter, group in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        if self.strategy.replicas == 1:
            return
        by_kind: dict[torch.dtype, list[torch.Tensor]] = {}
        for p in self.module.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                by_kind.setdefault(p.grad.dtype, []).append(p.grad)
        for grads in by_kind.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=self.grid.column)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """The norm of the whole model's gradient: squares summed over stages, tied weights once. Every rank must call it."""
        held = [p for p in parameters if p.grad is not None]
        mine = total_norm(
            [p.grad for p in held if p.grad is not None and id(p) not in self._counted_elsewhere], self.world.device
        )
        self.bad_gradient = None
        if not torch.isfinite(torch.tensor(mine)):
            bad = {id(p) for p in held if p.grad is not None and not torch.isfinite(p.grad).all()}
            self.bad_gradient = next((name for name, p in self.module.named_parameters() if id(p) in bad), None)
        if self.grid.line_control is None:
            return mine
        squares = torch.tensor([mine**2], dtype=torch.float64)
        dist.all_reduce(squares, group=self.grid.line_control)
        return float(squares.sqrt())

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every replica the first one's buffers. Every rank must call it."""
        if self.strategy.replicas > 1:
            for tensor in tensors:
                dist.broadcast(tensor, group=self.grid.column, group_src=0)

    def check_in_sync(self, when: str) -> None:
        """As `Spread.check_in_sync`, over the replicas of this stage."""
        check_in_sync(self.grid.peers, dict(self.module.named_parameters()), f"{when}, stage {self.grid.stage}")

    # -- the whole state -------------------------------------------------------------------------------------------------

    def whole(self, state: TrainState) -> TrainState:
        """On rank 0 the state of all stages, as one worker with the whole model would have it. Every rank must call it."""
        numbers = self._numbers()
        optimizer = state.optimizer
        numbered = {numbers[at]: value for at, value in optimizer["state"].items() if at in numbers}
        mine = {
            "model": _on_host(state.model),
            "ema": None if state.ema is None else _on_host(state.ema),
            "state": _on_host(numbered),
            "params": [[numbers[at] for at in group["params"] if at in numbers] for group in optimizer["param_groups"]],
            "buffers": state.buffers,
        }
        if self.grid.replica or self.grid.line_control is None:
            parts = [mine]
        else:
            parts = [None] * self.strategy.stages  # type: ignore[list-item]
            into = parts if self.grid.stage == 0 else None
            dist.gather_object(mine, into, dst=0, group=self.grid.line_control)
        if self.grid.replica or self.grid.stage:
            return state
        groups = [
            {**group, "params": sorted({n for part in parts for n in part["params"][at]})}
            for at, group in enumerate(optimizer["param_groups"])
        ]
        states = {n: value for part in parts for n, value in part["state"].items()}
        return replace(
            state,
            model=self._joined([part["model"] for part in parts]),
            ema=None if state.ema is None else self._joined([part["ema"] for part in parts]),
            optimizer={"state": {n: states[n] for n in sorted(states)}, "param_groups": groups},
            buffers=[name for name in self.order if any(name in part["buffers"] for part in parts)],
        )

    def _joined(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
        return {name: found[name] for name in self.order}

    def own(self, state: TrainState) -> TrainState:
        """This stage's part of a whole state. CheckpointError when it belongs to another model."""
        check_model_matches(self.shapes, state.model)
        held = self.module.state_dict()
        back = {number: at for at, number in self._numbers().items()}
        saved = state.optimizer
        groups = [
            {**group, "params": sorted(back[n] for n in group["params"] if n in back) or [0]} for group in saved["param_groups"]
        ]
        return replace(
            state,
            model={name: state.model[name] for name in held},
            ema=None if state.ema is None else {name: state.ema[name] for name in held},
            optimizer={"state": {back[n]: v for n, v in saved["state"].items() if n in back}, "param_groups": groups},
        )

    def _numbers(self) -> dict[int, int]:
        """Place in this stage's optimizer -> place in the whole model's."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return {at: self._number[id(p)] for at, p in enumerate(trained)}


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return value


def _free(model: nn.Module, own: set[int]) -> None:
    """Drop every parameter and buffer whose id is not in `own`; the names' places stay, empty."""
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is not None and id(tensor) not in own:
                    named[name] = None
