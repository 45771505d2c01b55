"""One pass over the evaluation data: weighted mean loss and metrics over every row of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raydist.data.source import EvalSource
from raydist.errors import DataError, RaydistError, TrainError
from raydist.metrics import LossMeter, merge_metrics
from raydist.precision import Precision
from raydist.strategy import Elsewhere
from raydist.task import ColumnTask, Task, checked_loss, slice_rows, to_device
from raydist.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric


def evaluate(
    task: Task,
    model: nn.Module,
    source: EvalSource,
    world: World,
    precision: Precision,
    step: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """`{"eval_loss": …, "eval_<metric>": …}` over all rows of all ranks. Every rank must call it; `tick` is called at each
    batch, as a sign of life.

    Ranks may have different numbers of batches, or none: nothing is exchanged until each has scored its own. A failure on one
    rank is raised on all of them.
    """
    metrics: dict[str, Metric] = (
        {name: m.to(world.device) for name, m in task.metrics().items()} if hasattr(task, "metrics") else {}
    )
    meter = LossMeter()
    problem: RaydistError | None = None
    lockstep = bool(getattr(model, "lockstep", False))
    chained = lockstep or bool(getattr(model, "chained", False))
    model.eval()
    try:
        with torch.no_grad():
            for data in in_step(source, world) if lockstep else source.batches():
                tick()
                if data.rows == 0:  # nothing left here, and other ranks need this one's part of the model
                    _score(task, model, to_device(data.batch, world.device), {}, precision, step)
                    continue
                batch = slice_rows(data.batch, 0, data.rows)
                try:
                    loss = _score(task, model, to_device(batch, world.device), metrics, precision, step)
                except Elsewhere:
                    continue
                weigh = getattr(task, "weight", None)
                meter.add(loss, float(weigh(batch)) if weigh else float(data.rows))
    except RaydistError as error:
        if chained:  # the other stages wait for what this one will not send: no word reaches them but its end
            raise
        problem = error
    except Exception as error:  # whatever the user's code raises: the other ranks must hear of it
        problem = TrainError(f"rank {world.rank}, evaluation after step {step}: {type(error).__name__}: {error}")
        problem.__cause__ = error
        if chained:
            raise problem from error
    finally:
        model.train()
    _raise_together(world, problem)
    loss_value = meter.reduce(world)
    if loss_value is None:
        raise DataError("data.eval has no rows: nothing to evaluate; give it rows, or leave out data.eval")
    return {"eval_loss": loss_value, **{f"eval_{name}": value for name, value in merge_metrics(world, metrics).items()}}


def in_step(source: EvalSource, world: World) -> Iterator[Any]:
    """The source's batches, and then a borrowed row (with `rows` 0) while another rank has some.

    All ranks get equally many. Every rank must take all of them.
    """
    batches = iter(source.batches())
    borrowed: Any = None
    while True:
        data = next(batches, None)
        having = world.gather(data is not None)
        if not any(having):
            return
        if data is not None and borrowed is None:
            borrowed = replace(data, batch=slice_rows(data.batch, 0, 1), rows=0)
        lacking = world.gather(data is None and borrowed is None) if not all(having) else [False]
        if any(lacking):
            lender = having.index(True)
            lent = world.gather(borrowed if lender == world.rank else None)[lender]
            borrowed = borrowed or lent
        yield borrowed if data is None else data


def _score(
    task: Task, model: nn.Module, batch: Any, metrics: Mapping[str, Metric], precision: Precision, step: int
) -> torch.Tensor:
    with precision.forward():
        if not metrics:
            return checked_loss(task.loss(model, batch), step)
        predictions, targets = task.predict(model, batch)  # type: ignore[attr-defined]
        loss = task.loss_of(predictions, targets) if isinstance(task, ColumnTask) else task.loss(model, batch)
    if isinstance(predictions, torch.Tensor) and predictions.dtype in (torch.bfloat16, torch.float16):
        predictions = predictions.float()
    for metric in metrics.values():
        metric.update(predictions, targets)
    return checked_loss(loss, step)


def _raise_together(world: World, problem: RaydistError | None) -> None:
    """Raise the lowest rank's error on every rank, so that none waits for another. Every rank must call it."""
    found = world.gather(None if problem is None else (type(problem).__name__, str(problem)))
    if problem is not None:
        raise problem
    for rank, other in enumerate(found):
        if other is not None:
            raise TrainError(f"rank {rank} failed in evaluation after the same step: {other[1]}")
