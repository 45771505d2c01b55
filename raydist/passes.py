"""Forward and backward of one step on one rank: micro-batches, weights, sizes that may not fit, and what was not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raydist.batching import MicroBatch, loss_scale, micro_batches, padded_share, share
from raydist.data.source import StepData
from raydist.errors import RaydistError, TrainError
from raydist.metrics import LossMeter
from raydist.precision import Precision
from raydist.randomness import seed_all
from raydist.strategy import Spread, check_used, kept_buffers
from raydist.task import Task, checked_loss, slice_rows, to_device
from raydist.world import World, is_broken_link

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.faults import Place

_TRIAL_STEPS = 3
"""Steps in which a new micro-batch size of `auto` is on trial."""


class Passes:
    """Turns a rank's share of a global batch into reduced gradients. Every rank makes the same calls.

    `micro_size` is rows of a micro-batch, None the whole share. `notes` are (kind, reason) of what happened on all ranks alike.
    """

    def __init__(self, config: JobConfig, task: Task, world: World, spread: Spread, precision: Precision) -> None:
        self.config, self.task, self.world, self.spread, self.precision = config, task, world, spread, precision
        self.meter = LossMeter()
        self.micro_size = config.batch.micro_size if isinstance(config.batch.micro_size, int) else None
        self.notes: list[tuple[str, str]] = []
        self.fault: Place | None = None
        self._weigh = getattr(task, "weight", None)
        self._checked = False
        self._fits = 0

    def run(self, data: StepData, done: int) -> torch.Tensor:
        """Fill the gradients of step `done + 1` (mean over the global batch); returns a scalar bool: are my losses finite.

        When some loss was not, the gradients are NaN on every rank. Raises TrainError for a loss or model that cannot be used.
        """
        before = (self.meter.total, self.meter.weight)
        self.spread.module.train()
        self._check_first(data, done)
        while True:
            finite = self._careful_pass(data, done) if self._may_not_fit() else self._pass(data, done, self.spread.no_sync)
            if finite is not None:
                self._fits += 1
                return finite
            self.meter.drop(*before)
            self._halve(data, done)

    def cut(self, data: StepData) -> list[MicroBatch]:
        """This rank's micro-batches of a global batch, at the current micro-batch size."""
        return micro_batches(data.global_rows, self.world.rank, self.world.world_size, self.size(data))

    def size(self, data: StepData) -> int:
        """Rows of a full micro-batch of this step."""
        return self.micro_size or padded_share(data.global_rows, self.world.world_size)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        """The task's loss under autocast; what it raises comes back with the step and the shapes that went in.

        Before the first step has gone well, an error is taken for a mistake in the job (TrainError, which no restart mends).
        """
        try:
            with self.precision.forward():
                return checked_loss(self.task.loss(model, batch), step)
        except (RaydistError, torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except Exception as error:
            if is_broken_link(str(error)):  # a forward may talk to other ranks (buffers, SyncBatchNorm)
                raise
            words = f"rank {self.world.rank}, step {step}: the model or loss failed on a batch of {describe(batch)}"
            if self._fits == 0:
                raise TrainError(f"{words}: {type(error).__name__}: {error}") from error
            error.add_note(words)
            raise

    def closing(self) -> dict[str, Any]:
        """At a run's end: "summary" (fields for it) and "trace" (a Chrome trace), where there is any. Every rank calls it."""
        return {}

    def _seed(self, done: int) -> None:
        """The random numbers of step `done + 1` on this rank, whatever was drawn before."""
        seed_all(self.config.seed, "step", done, self.world.rank)

    def _pass(self, data: StepData, done: int, no_sync: Callable[[bool], AbstractContextManager[Any]]) -> torch.Tensor:
        self._seed(done)
        pieces = self.cut(data)
        batches = [slice_rows(data.batch, piece.start, piece.stop) for piece in pieces]
        weights, global_weight = self._weights(data, pieces, batches, done + 1)
        if self.fault is not None:
            self.fault("step", done + 1)
        finite = torch.ones((), dtype=torch.bool, device=self.world.device)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            last = number == len(batches) - 1
            with no_sync(last):
                loss = self.loss(self.spread.forward, to_device(batch, self.world.device), done + 1)
                finite = finite & torch.isfinite(loss.detach()).to(finite.device)
                self.meter.add(loss, weight)
                wide = loss if loss.dtype == torch.float64 else loss.float()
                scaled = wide * loss_scale(weight, global_weight, self.world.world_size)
                if last:
                    # a loss that is not finite makes the reduced gradient NaN: every rank sees it without another message
                    scaled = scaled * torch.where(finite, 1.0, float("nan")).to(scaled.device)
                self.precision.backward(scaled)
        return finite

    def _weights(
        self, data: StepData, pieces: Sequence[MicroBatch], batches: Sequence[Any], step: int
    ) -> tuple[list[float], float]:
        """The weight of each micro-batch of this rank, and of the global batch."""
        if self._weigh is None:
            return [float(piece.rows) for piece in pieces], float(data.global_rows)
        weights = [float(self._weigh(batch)) if piece.rows else 0.0 for piece, batch in zip(pieces, batches, strict=True)]
        problem = next((w for w in weights if not (w >= 0 and math.isfinite(w))), None)
        total, broken = self.world.sum([0.0 if problem is not None else sum(weights), float(problem is not None)])
        if problem is not None:
            raise TrainError(
                f"step {step}: task.weight gave {problem} on rank {self.world.rank}; it must be finite and not negative"
            )
        if broken:
            raise TrainError(f"step {step}: task.weight gave a weight that is negative or not finite on another rank")
        if total <= 0:
            raise TrainError(f"step {step}: task.weight gave 0 for the whole global batch; it must be positive in sum")
        return weights, total

    def _check_first(self, data: StepData, done: int) -> None:
        if self._checked:
            return
        self._checked = True
        self._seed(done)
        batch = to_device(slice_rows(data.batch, 0, 2), self.world.device)
        self._check_used(lambda model: self.loss(model, batch, done + 1))

    def _check_used(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
        check_used(self.spread, getattr(self.config.strategy, "find_unused_parameters", True), loss_of)

    # -- out of memory -----------------------------------------------------------------------------------------------

    def _may_not_fit(self) -> bool:
        """Whether this micro-batch size is still on trial: then nothing is reduced before all ranks know that it fitted."""
        on_trial = self._fits < _TRIAL_STEPS and self.config.batch.micro_size == "auto"
        return on_trial and (self.world.device.type == "cuda" or self.fault is not None)

    def _careful_pass(self, data: StepData, done: int) -> torch.Tensor | None:
        """A local pass, an agreement whether it fitted everywhere, and the reduction; None when some rank ran out of memory."""
        finite: torch.Tensor | None = None
        if self.spread.replicated and getattr(self.config.strategy, "broadcast_buffers", False):
            self.world.broadcast_tensors([b for b in self.spread.module.buffers() if b.numel()])
        try:
            finite = self._pass(data, done, lambda last: self.spread.no_sync(False))
        except torch.OutOfMemoryError:
            self._free()
        if self.world.sum([float(finite is None)])[0]:
            return None
        assert finite is not None
        average_gradients(self.world, self.spread.module.parameters())
        return finite

    def _halve(self, data: StepData, done: int) -> None:
        """Half the micro-batch on all ranks, after an out-of-memory that all know of. TrainError when one row does not fit."""
        size = self.size(data)
        if size == 1:
            raise TrainError(
                f"step {done + 1}: out of memory with a micro-batch of one row; use a smaller model, "
                "precision: bf16, or more memory"
            )
        self._free()
        self.micro_size, self._fits = -(-size // 2), 0
        self.notes.append(
            ("out_of_memory", f"{size} rows did not fit; from step {done + 1} on micro-batches of {self.micro_size}")
        )

    def _free(self) -> None:
        for parameter in self.spread.module.parameters():
            parameter.grad = None
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- not finite ----------------------------------------------------------------------------------------------------

    def diagnose(self, data: StepData, done: int) -> tuple[str, int, int] | None:
        """What was not finite on this rank in step `done + 1`, before any reduction mixed it: the first micro-batch with such a
        loss or gradient, and the rows `[start, stop)` of the global batch in it. None when this rank is clean.

        Runs the step again alone, with the same random numbers; weights must be as they were. Buffers stay as they are.
        """
        module = self.spread.module
        self._seed(done)
        found: tuple[str, int, int] | None = None
        first, _ = share(data.global_rows, self.world.rank, self.world.world_size)
        with kept_buffers(module):
            for piece in self.cut(data):
                if piece.rows and found is None:
                    batch = to_device(slice_rows(data.batch, piece.start, piece.stop), self.world.device)
                    what = not_finite(module, self.loss(module, batch, done + 1))
                    found = None if what is None else (what, first + piece.start, first + piece.stop)
        return found


def not_finite(module: nn.Module, loss: torch.Tensor) -> str | None:
    """Words for a loss that is not finite, or for the first parameter whose gradient is not; None when all are."""
    if not torch.isfinite(loss):
        return f"the loss is {float(loss.detach())}"
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    grads: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    bad = [name for (name, _), g in zip(named, grads, strict=True) if g is not None and not torch.isfinite(g).all()]
    return f"the gradient of {bad[0]!r} is not finite" if bad else None


def average_gradients(world: World, parameters: Iterable[torch.nn.Parameter]) -> None:
    """What DDP does in backward, done after it: the mean over ranks of each gradient, in place. Every rank must call it."""
    if world.world_size == 1:
        return
    by_kind: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_kind.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]) / world.world_size
        torch.distributed.all_reduce(flat)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def describe(batch: Any) -> str:
    """Shapes and dtypes of a batch, for an error message."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, dict):
        return ", ".join(f"{key} {describe(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(describe(value) for value in batch[:6]) + ("…" if len(batch) > 6 else "") + ")"
    return type(batch).__name__
