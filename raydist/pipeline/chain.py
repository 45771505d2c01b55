"""The stages as one model for evaluation: each batch goes down the chain, and the last stage scores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from raydist.pipeline.chunk import Chunk, blank, meta_of
from raydist.pipeline.measure import as_tuple
from raydist.pipeline.stand_in import StandIn
from raydist.strategy import Elsewhere

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy
    from raydist.pipeline.grid import Grid


class Chain(StandIn):
    """Forward only. While a batch is in the later stages, the first one already has the next.

    On a rank that does not hold the last run, the call raises `Elsewhere`. Every stage of the replica must make it with the
    same batch.
    """

    chained = True

    def __init__(
        self, model: nn.Module, chunks: dict[int, Chunk], strategy: PipelineStrategy, grid: Grid, device: torch.device
    ) -> None:
        super().__init__(model, self._run)
        for name, value in {"chunks": chunks, "strategy": strategy, "grid": grid, "device": device}.items():
            object.__setattr__(self, name, value)

    def train(self, mode: bool = True) -> Chain:
        """The layers' mode."""
        self._model.train(mode)
        for chunk in self.chunks.values():
            chunk.train(mode)
        return self

    def _run(self, args: tuple[torch.Tensor, ...]) -> Any:
        grid, strategy = self.grid, self.strategy
        passed = args
        output: Any = None
        for run, chunk in sorted(self.chunks.items()):
            if run and (before := strategy.rank_of(run - 1)) != grid.stage:
                passed = self._receive(grid.global_rank(before))
            output = chunk(*passed)
            passed = as_tuple(output)
            if run + 1 < strategy.runs and (after := strategy.rank_of(run + 1)) != grid.stage:
                self._send(passed, grid.global_rank(after))
        if strategy.runs - 1 not in self.chunks:
            raise Elsewhere
        return output

    def _receive(self, source: int) -> tuple[torch.Tensor, ...]:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self.grid.line_control)
        tensors = blank(box[0], self.device)
        for tensor in tensors:
            dist.recv(tensor, src=source, group=self.grid.line)
        return tensors

    def _send(self, tensors: tuple[torch.Tensor, ...], to: int) -> None:
        dist.send_object_list([meta_of(tensors, False)], dst=to, group=self.grid.line_control)
        for tensor in tensors:
            dist.send(tensor.contiguous(), dst=to, group=self.grid.line)
