"""The whole plan of a job as plain data: batches, steps, memory, placement, and what stands in the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from raydist.batching import padded_share
from raydist.errors import ConfigError, RaydistError
from raydist.plain_table import size as size_of
from raydist.planning.batches import batch_row, tail_of, world_sizes
from raydist.planning.memory import Memory, measure
from raydist.planning.nodes import Node, Placement, asked, place
from raydist.precision import Precision
from raydist.task import Task, build_task
from raydist.trainer import build_model
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig


@dataclass(frozen=True)
class _Data:
    """What the training data says: rows and steps of an epoch, and the largest share of its first batch (real rows)."""

    rows: int | None = None
    steps: int | None = None
    batch: Any = None
    problem: str | None = None


def make_plan(config: JobConfig, nodes: list[Node]) -> dict[str, Any]:
    """The plan of `config` on `nodes`: plain JSON. `problems` keep the job from starting, `notes` do not.

    Reads the first batch of the training data (and, with `data.fit`, all of it); data that cannot be read here leaves
    steps and activations unknown. ConfigError when the task itself is wrong.
    """
    task = build_task(config.task)
    placement = place(config, nodes)
    low, high = asked(config)
    pipeline = config.strategy if config.strategy.name == "pipeline" and config.strategy.stages > 1 else None
    if pipeline is not None:  # who shares a batch are the replicas, each of several workers
        low = high = pipeline.replicas
    data = _look_at_data(config, low)  # the fewest workers have the largest shares
    tail = tail_of(data.rows, config.batch.global_size, config.data.train.drop_last)[1] if data.rows is not None else 0
    memory, notes, problems = _memory(config, task, data, low, None if pipeline else _limit(nodes, placement))
    micro = _micro(config) or (memory.micro if memory.micro != _share(config, low) else None)
    rows = [batch_row(size, config.batch.global_size, micro, tail) for size in world_sizes(low, high)]
    if high > config.batch.global_size:
        notes.append(f"a global batch of {config.batch.global_size} rows leaves some of {high} workers without a row")
    stages = None
    if pipeline is not None:
        notes.append(f"each of {pipeline.stages} stages holds only its part of the model: see the table of the pipeline")
        try:
            stages = _pipeline(config, task, data)
        except ConfigError as error:
            problems.append(str(error))
    idle = [row.workers for row in rows if 0 in row.tail]
    if idle:
        notes.append(f"in the last batch of an epoch ({tail} rows) some of {idle[0]} workers have no row of their own")
    return {
        "job": config.name,
        "strategy": config.strategy.name,
        "precision": config.precision.name,
        "global_size": config.batch.global_size,
        "batches": [{**asdict(row), "even": row.even} for row in rows],
        "epoch": {"rows": data.rows, "steps": data.steps, "tail_rows": tail, "problem": data.problem},
        "total_steps": _total_steps(config, data.steps),
        "memory": {"workers": low, **memory.plain()},
        "placement": _placed(placement, nodes),
        "elastic": None if low == high else {"least": low, "most": high, "fit": placement.fits},
        "pipeline": stages,
        "notes": [*placement.notes, *([data.problem] if data.problem else []), *notes],
        "problems": [*([placement.problem] if placement.problem else []), *problems],
    }


def _look_at_data(config: JobConfig, workers: int) -> _Data:
    from raydist.data.job import fitted_for, needed_columns, open_training
    from raydist.data.source import Position

    world = World(rank=0, world_size=workers)
    try:
        source = open_training(config, world, needed_columns(config), fitted_for(config, world, None))
        try:
            first = next(iter(source.steps(Position(), 1)))
            return _Data(source.rows_per_epoch, source.steps_per_epoch, first.batch)
        finally:
            source.close()
    except (RaydistError, OSError, StopIteration) as error:
        return _Data(problem=f"the training data cannot be read here: {error}")


def _micro(config: JobConfig) -> int | None:
    return config.batch.micro_size if isinstance(config.batch.micro_size, int) else None


def _share(config: JobConfig, workers: int) -> int:
    return padded_share(config.batch.global_size, workers)


def _limit(nodes: list[Node], placement: Placement) -> int | None:
    """Bytes of GPU memory that a worker has, on the smallest of the nodes it may be on; None when not known."""
    if not placement.gpus_per_worker:
        return None
    known = [node.gpu_bytes for node in nodes if node.gpus]
    if not known or None in known:
        return None
    return int(min(bytes_ for bytes_ in known if bytes_ is not None) * min(1.0, placement.gpus_per_worker))


def _memory(config: JobConfig, task: Task, data: _Data, workers: int, limit: int | None) -> tuple[Memory, list[str], list[str]]:
    """Memory at the micro-batch the run would end with: the one asked for, or for `auto` the first halving that fits."""
    share = _share(config, workers)
    first = size = min(_micro(config) or share, share)
    memory = measure(config, task, data.batch, size, workers)
    notes, problems = [], []
    if memory.problem:
        notes.append(memory.problem)
    while limit is not None and memory.total is not None and memory.total > limit:
        words = f"about {size_of(memory.total)} for micro-batches of {size} rows, and a worker's GPU has {size_of(limit)}"
        if _micro(config) is not None or size == 1:
            way = "lower batch.micro_size, " if size > 1 else ""
            problems.append(f"{words}: {way}use precision: bf16, a smaller model, or larger GPUs")
            break
        size = -(-size // 2)
        memory = measure(config, task, data.batch, size, workers)
    if size < first and not problems:
        notes.append(f"micro_size: auto: {first} rows do not fit; {size} rows do, found by halving in the first steps")
    if limit is not None and memory.total is not None and not problems and memory.total > 0.9 * limit:
        notes.append("less than a tenth of the GPU's memory is left for CUDA itself and for fragmentation")
    return memory, notes, problems


def _total_steps(config: JobConfig, steps: int | None) -> int | None:
    limits = [config.train.max_steps] if config.train.max_steps is not None else []
    if config.train.epochs is not None and steps is not None:
        limits.append(config.train.epochs * steps)
    return min(limits) if limits else None


def _placed(placement: Placement, nodes: list[Node]) -> dict[str, Any]:
    return {
        "workers": placement.workers,
        "fit": placement.fits,
        "gpus_per_worker": placement.gpus_per_worker,
        "nodes": [{**asdict(node), "ranks": ranks} for node, ranks in zip(nodes, placement.ranks, strict=True)],
    }


def _pipeline(config: JobConfig, task: Task, data: _Data) -> dict[str, Any]:
    """The stages and the expected bubble, measured here, on the CPU. ConfigError when the model cannot be cut so."""
    from raydist.pipeline.cutting import make_cut
    from raydist.pipeline.layers import layers_of
    from raydist.pipeline.sample import inputs_in

    strategy: Any = config.strategy
    model = build_model(task)
    micro = config.batch.micro_size if isinstance(config.batch.micro_size, int) else None
    rows = micro or -(-padded_share(config.batch.global_size, strategy.replicas) // strategy.micro)
    cpu = torch.device("cpu")
    inputs = None if data.batch is None else inputs_in(task, model, data.batch, rows, cpu)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))  # as the workers have
    try:
        made = make_cut(strategy, layers_of(model), inputs, Precision(config.precision, cpu))
    finally:
        torch.set_num_threads(threads)
    return {**made.plain(), "table": made.lines()}
