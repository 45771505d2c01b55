"""Forward and backward of one step through the stages, by torch's schedules (`torch.distributed.pipelining`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raydist.batching import MicroBatch, micro_batches, padded_share, share
from raydist.data.source import StepData
from raydist.errors import RaydistError, TrainError
from raydist.passes import Passes
from raydist.pipeline.chunk import Meta, blank, shapes
from raydist.pipeline.schedules import SCHEDULES
from raydist.pipeline.spread import PipelineSpread
from raydist.pipeline.stand_in import Inputs, giving, seeing
from raydist.pipeline.timed import StageClock, TimedStage, account, chrome_trace, plain
from raydist.precision import Precision
from raydist.task import Task, checked_loss, slice_rows, to_device
from raydist.world import World, is_broken_link

if TYPE_CHECKING:
    from raydist.config import JobConfig


class PipelinePasses(Passes):
    """`Passes` whose micro-batches go through the stages. Every rank makes the same calls.

    Micro-batches of a pass have equally many rows: the last row of a short one is repeated, and what it gives is cut off
    before the loss. A micro-batch without rows has weight 0.
    """

    spread: PipelineSpread

    def __init__(self, config: JobConfig, task: Task, world: World, spread: PipelineSpread, precision: Precision) -> None:
        super().__init__(config, task, world, spread, precision)
        self.grid, self.strategy = spread.grid, spread.strategy
        self.chunks = spread.chunks(spread.module, precision)
        self.is_first, self.is_last = 0 in self.chunks, self.strategy.runs - 1 in self.chunks
        self.clock = StageClock(world.device)
        self._engines: dict[str, Any] = {}
        self._bad: tuple[str, int, int] | None = None
        self._done = 0
        self._pieces: list[tuple[MicroBatch, Any, float]] = []
        self._finite = torch.ones((), dtype=torch.bool)
        self._scale = 1.0
        self._offset = 0

    def cut(self, data: StepData) -> list[MicroBatch]:
        """This replica's micro-batches, filled up to whole passes.

        Without `batch.micro_size` one pass, its rows spread evenly: 7 rows in 3 are (3, 2, 2).
        """
        grid, micro = self.grid, self.strategy.micro
        if self.micro_size is None:
            start, stop = share(data.global_rows, grid.replica, grid.replicas)
            edges = [share(stop - start, at, micro) for at in range(micro)]
            return [MicroBatch(a, b, b - a) if a < b else MicroBatch(0, 1, 0) for a, b in edges]
        pieces = micro_batches(data.global_rows, grid.replica, grid.replicas, self.micro_size)
        return pieces + [MicroBatch(0, 1, 0)] * (-len(pieces) % micro)

    def size(self, data: StepData) -> int:
        """Rows of a micro-batch."""
        return self.micro_size or max(1, -(-padded_share(data.global_rows, self.grid.replicas) // self.strategy.micro))

    def run(self, data: StepData, done: int) -> torch.Tensor:
        """As `Passes.run`: the gradients of this stage's layers, summed over the replicas."""
        self.spread.module.train()
        self._bad, self._done = None, done
        pieces = self.cut(data)
        ends = self.is_first or self.is_last
        batches = [slice_rows(data.batch, p.start, p.stop) for p in pieces] if ends else [None] * len(pieces)
        weights, total = self._weights_of(data, pieces, batches, done + 1)
        if self.fault is not None:
            self.fault("step", done + 1)
        self._finite, self._scale = torch.ones((), dtype=torch.bool), 1.0 / total
        self._offset = share(data.global_rows, self.grid.replica, self.grid.replicas)[0]
        for chunk in self.chunks.values():
            chunk.start(self.config.seed, done, self.grid.replica)
        if self.precision.scaler is not None:
            self.precision.scaler.scale(self._finite.float())  # a scaler that scales nothing here has no state else
        work = list(zip(pieces, batches, weights, strict=True))
        try:
            for at in range(0, len(work), self.strategy.micro):
                self._flow(work[at : at + self.strategy.micro], self.size(data))
        except (RaydistError, torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:
            if is_broken_link(str(error)) or isinstance(error, ConnectionError):
                raise
            words = f"step {done + 1}: the model or loss failed"
            if self._fits == 0:
                raise TrainError(f"{self.spread.where()}, {words}: {type(error).__name__}: {error}") from error
            error.add_note(f"{words} in {self.spread.where()}")
            raise
        self._fits += 1
        self.spread.reduce()
        return self._finite

    def _weights_of(self, data: StepData, pieces: list[MicroBatch], batches: list[Any], step: int) -> tuple[list[float], float]:
        """The last stage weighs; the others only take part in the sum."""
        if self._weigh is None:
            return [float(piece.rows) for piece in pieces], float(data.global_rows)
        if self.is_last:
            return self._weights(data, pieces, batches, step)
        total, broken = self.world.sum([0.0, 0.0])
        if broken or total <= 0:
            raise TrainError(f"step {step}: task.weight gave no usable weight on the last stage")
        return [0.0] * len(pieces), total

    def _flow(self, work: list[tuple[MicroBatch, Any, float]], rows: int) -> None:
        """One pass of the schedule over `micro` micro-batches of `rows` rows."""
        self._pieces = work
        given = self._inputs(work, rows) if self.is_first else None
        engine = self._engine(given, len(work))
        numbers = torch.arange(len(work)) if self.is_last else None
        began = self.clock.begin()
        engine.step(*(given or ()), target=numbers, return_outputs=False)
        self.clock.end(began)

    def _inputs(self, work: list[tuple[MicroBatch, Any, float]], rows: int) -> tuple[torch.Tensor, ...]:
        """What the task gives the model in each micro-batch, padded to `rows` and joined."""
        parts = []
        look = seeing(self.spread.module)
        for _, batch, _ in work:
            try:
                self.task.loss(look, to_device(batch, self.world.device))
            except Inputs as seen:
                parts.append([_padded(tensor, rows) for tensor in seen.args])
            else:
                raise TrainError("strategy pipeline: the task's loss does not call the model")
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _engine(self, given: tuple[torch.Tensor, ...] | None, micro: int) -> Any:
        """The schedule for inputs of this shape; made at its first use. Every stage of the replica must call it."""
        inputs: Meta | None = None
        if given is not None:
            inputs = [([t.shape[0] // micro, *t.shape[1:]], t.dtype, False) for t in given]
        key = self._agreed(str(inputs))
        if key not in self._engines:
            found = shapes(self.chunks, self.strategy, self.grid, self.world.device, inputs)
            stages = [
                TimedStage(
                    chunk,
                    run,
                    self.strategy.runs,
                    self.world.device,
                    input_args=blank(found[run][0], self.world.device),
                    output_args=blank(found[run][1], self.world.device),
                    group=self.grid.line,
                )
                for run, chunk in sorted(self.chunks.items())
            ]
            for stage in stages:
                stage.clock = self.clock
            kind: Any = SCHEDULES[self.strategy.schedule]
            multi = self.strategy.schedule not in ("gpipe", "1f1b")
            for chunk in self.chunks.values():
                chunk.start(self.config.seed, self._done, self.grid.replica)
            self._engines[key] = kind(stages if multi else stages[0], micro, loss_fn=self._loss, scale_grads=False)
        return self._engines[key]

    def _agreed(self, key: str) -> str:
        """Stage 0's word for the shapes of this pass, on every stage."""
        if self.grid.line_control is None:
            return key
        box = [key]
        dist.broadcast_object_list(box, src=self.grid.global_rank(0), group=self.grid.line_control)
        return box[0]

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """The weighted, scaled loss of one micro-batch, at the last stage."""
        at = int(number)
        piece, batch, weight = self._pieces[at]
        batch = to_device(batch, self.world.device)
        real = slice_rows(output, 0, piece.stop - piece.start)
        with self.precision.forward():
            loss = checked_loss(self.task.loss(giving(self.spread.module, real), batch), self._done + 1)
        finite = torch.isfinite(loss.detach()).to(self._finite.device)
        if weight and self._bad is None and not bool(finite):
            rows = (self._offset + piece.start, self._offset + piece.stop)
            self._bad = (f"the loss is {float(loss.detach())}", *rows)
        self._finite = self._finite & finite
        self.meter.add(loss, weight)
        wide = loss if loss.dtype == torch.float64 else loss.float()
        scaled = wide * (weight * self._scale) * torch.where(self._finite, 1.0, float("nan")).to(loss)
        return self.precision.scaler.scale(scaled) if self.precision.scaler else scaled

    def closing(self) -> dict[str, Any]:
        """As `Passes.closing`: the pipeline's part of the summary, and the trace of one pass."""
        found = self.world.gather((self.spread.where(), plain(self.clock)))[: self.strategy.stages]
        clocks = [clock for _, clock in found]
        told = account(self.strategy, clocks)
        if told is None:
            return {}
        return {"summary": {"pipeline": told}, "trace": chrome_trace(clocks, [f"stage {at}" for at in range(len(clocks))])}

    def diagnose(self, data: StepData, done: int) -> tuple[str, int, int] | None:
        """What this stage saw go wrong in the step just done: a loss, or a gradient of its layers."""
        if self._bad is not None:
            return self._bad
        if self.spread.bad_gradient is not None:
            first, last = share(data.global_rows, self.grid.replica, self.grid.replicas)
            return f"the gradient of {self.spread.bad_gradient!r} is not finite", first, last
        return None


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if tensor.dim() == 0 or not 0 < tensor.shape[0] <= rows:
        raise TrainError(
            f"strategy pipeline: the model was given a tensor of shape {list(tensor.shape)} for a micro-batch of at most "
            f"{rows} rows; the first dimension of every input must be the rows"
        )
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(rows - tensor.shape[0], *tensor.shape[1:])])
