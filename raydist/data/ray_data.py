"""Data as one Ray Data stream: each file is read once, by Ray's tasks, for all ranks of the worker group.

    source = open_ray_train(job.data.train, global_size=64, seed=0, rank=world.rank, world_size=world.world_size,
                            exchange=world.broadcast, columns=[...], fitted=None)
    for step in source.steps(Position(epoch=0, index=7)): ...

The plan is cut into spans (whole shuffle windows). Rank 0 builds a `ray.data` stream with one item a span, over all remaining
epochs, so there is no pause between epochs:

    spans -> map_batches(read, shuffle, transform, lay out rank by rank) -> repartition -> streaming_split(world_size)

Each span becomes `world_size` blocks of equal rows (padded with borrowed rows). Under `preserve_order` the splitter gives
each block, in order, to the rank with the fewest rows so far: equal blocks go round robin, so rank r gets block r of every
span, its share of each global batch. A block carries many steps, so a step costs no round trip. The first span of a run is
read by every rank itself while the stream starts up: the first batch does not wait for Ray.

Every rank must call `open_ray_train`, and iterate `steps`, at the same time: both `exchange` an object from rank 0. The start
position is the one the ranks know from the checkpoint they loaded, so nothing is guessed in the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ExecutionResources

from raydist.batching import padded_share
from raydist.data.columns import rows_of, to_numpy
from raydist.data.direct import fingerprint_of, name_rows, notes_of, steps_of
from raydist.data.job import Sources, fitted_for, needed_columns, open_sources
from raydist.data.opening import direct_source, open_reader
from raydist.data.plan import Span
from raydist.data.prefetch import Prefetch
from raydist.data.reading import CACHE_BYTES, SpanReader
from raydist.data.source import Position, StepData, TrainSource
from raydist.data.span_task import ERROR, SpanTask
from raydist.data.tensors import to_torch
from raydist.errors import DataError, RaydistError

if TYPE_CHECKING:
    from raydist.config import DatasetConfig, JobConfig
    from raydist.data.fit import Fitted
    from raydist.world import World

Exchange = Callable[[Any], Any]
"""Gives every rank the object that rank 0 passed (`World.broadcast`); the others' objects are ignored."""

SPAN_BYTES = 48 * 2**20
"""Bytes of a span of the stream, about; never less than a shuffle window."""
MOST_SPANS = 2000
"""Spans of one stream; a longer run makes the next stream when one is used up."""
SPANS_AHEAD = 6
"""Spans that may lie finished in the object store, about: what bounds memory when training is slower than reading."""
LEAST_AHEAD = 64 * 2**20
"""Bytes that may lie there in any case."""


def open_ray_train(
    config: DatasetConfig,
    *,
    global_size: int,
    seed: int,
    rank: int,
    world_size: int,
    exchange: Exchange,
    columns: list[str] | None = None,
    fitted: Fitted | None = None,
    cache_dir: Path | str | None = None,
) -> TrainSource:
    """This rank's training data inside a Ray cluster. Every rank must call it; rank 0 opens the files for all.

    `engine: auto` takes the Ray stream for more than 256 MiB of data (less stays in each rank's memory, read directly) when the
    cluster has a CPU left for it; `ray` insists. DataError, on every rank: what `open_train` raises, or no CPU left.
    """
    mine: tuple[SpanReader | None, str, str | None] = (None, "", None)
    if rank == 0:
        try:
            reader = open_reader(
                config, global_size=global_size, seed=seed, columns=columns, fitted=fitted, cache_dir=cache_dir
            )
            engine, note = choose_engine(config, reader, free_cpus())
            mine = (reader, engine, note)
        except RaydistError as error:
            mine = (None, "", str(error))
    found, engine, words = exchange(mine)
    if found is None:
        raise DataError(words)
    if words:
        found.tables.notes.append(words)
    if engine == "direct":
        return direct_source(config, found, rank, world_size)
    return RaySource(found, rank, world_size, exchange)


def open_sources_on_ray(config: JobConfig, world: World, stored: dict[str, Any] | None) -> Sources:
    """A job's data inside a Ray worker: `open_sources`, with file training data through Ray Data. Every rank must call it."""
    if config.data.train.target is not None:
        return open_sources(config, world, stored)
    fitted, columns = fitted_for(config, world, stored), needed_columns(config)
    train = open_ray_train(
        config.data.train,
        global_size=config.batch.global_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        exchange=world.broadcast,
        columns=columns,
        fitted=fitted,
    )
    known = stored if fitted is None else {**(stored or {}), "fitted": fitted.to_json()}
    return open_sources(config, world, known, train)


def free_cpus() -> float:
    """CPUs of the cluster that nobody has reserved: what Ray Data's tasks can run on."""
    return float(ray.available_resources().get("CPU", 0.0))


def choose_engine(config: DatasetConfig, reader: SpanReader, cpus: float) -> tuple[str, str | None]:
    """`direct` or `ray`, and a note for the user where the choice is not what one would expect."""
    if config.engine == "direct" or config.rows == "changes":
        note = "rows: changes is read by each rank itself, not by Ray Data" if config.engine == "ray" else None
        return "direct", note
    if config.engine == "auto" and reader.tables.size <= CACHE_BYTES:
        return "direct", None
    if cpus >= 1:
        return "ray", None
    words = f"the workers have reserved all CPUs of the cluster but {cpus:g}; Ray Data needs at least one"
    if config.engine == "auto":
        return "direct", f"{words}: each rank reads all data itself, which is slower. Add a CPU, or set engine: direct"
    raise DataError(f"data.train.engine: {words}. Add a CPU or lower scaling.workers, or set engine: direct")


class RaySource:
    """Training data of one rank out of a Ray Data stream (a `TrainSource`)."""

    def __init__(self, reader: SpanReader, rank: int, world_size: int, exchange: Exchange, bridge: bool = True) -> None:
        self.reader = reader
        self.plan = reader.plan
        self.rank = rank
        self.world_size = world_size
        self.exchange = exchange
        self.bridge = bridge
        self.rows_per_epoch: int | None = self.plan.rows_per_epoch
        self.steps_per_epoch: int | None = self.plan.steps_per_epoch
        self.notes = notes_of(reader)
        self._running: list[Prefetch[Any]] = []
        self._held: list[Any] = []

    @property
    def span_rows(self) -> int:
        """Rows of a span; depends on the data and the global batch alone."""
        return int(max(self.plan.window or 0, SPAN_BYTES * self.plan.rows / max(1, self.reader.tables.size)))

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        """Steps from `start` on. Every rank must call it and take equally many steps."""
        spans = self.plan.spans(start, stop_epoch, self.span_rows)
        first = next(spans, None)
        if first is None:
            return
        if self.bridge:
            head = list(self._pieces(first))
            yield from self._run(head, list(islice(spans, MOST_SPANS)))
        else:
            yield from self._run([], [first, *islice(spans, MOST_SPANS - 1)])
        while chunk := list(islice(spans, MOST_SPANS)):
            yield from self._run([], chunk)

    def _pieces(self, span: Span) -> Iterator[Span]:
        """A span window by window: what a rank reads itself should give its first batch soon."""
        unit = self.plan.span_steps(1)
        at = span.start
        while at < span.stop:
            stop = min(span.stop, (at // unit + 1) * unit)
            yield Span(span.epoch, at, stop)
            at = stop

    def _run(self, head: list[Span], spans: list[Span]) -> Iterator[StepData]:
        """Steps of `head`, read by this rank, and then those of `spans`, out of a stream that starts meanwhile."""
        running = [Prefetch(self._direct(head))] if head else []
        self._running += running
        try:
            if spans:
                stream = Prefetch(self._streamed(self._split(spans), spans))
                running.append(stream)
                self._running.append(stream)
            for (span, tensors, starts), waited in chain.from_iterable(running):
                yield from steps_of(self.plan, span, tensors, starts, self.rank, self.world_size, waited)
        except ray.exceptions.RayError as error:
            raise DataError(f"the Ray Data stream failed: {error}") from error
        finally:
            for ahead in running:
                ahead.close()
                self._running.remove(ahead)

    def _split(self, spans: list[Span]) -> Any:
        """This rank's part of a stream that rank 0 builds."""
        mine: tuple[list[Any], str] = ([], "")
        if self.rank == 0:
            try:
                mine = (build_stream(self.reader, spans, self.world_size, self.plan.span_steps(self.span_rows)), "")
            except Exception as error:  # the other ranks wait for an answer
                mine = ([], f"the Ray Data stream did not start: {type(error).__name__}: {error}")
        shards, words = self.exchange(mine)
        if words:
            raise DataError(words)
        # a handle that travelled outside of Ray (torch.distributed) keeps nothing alive: rank 0 holds the stream for all
        self._held = mine[0]
        return shards[self.rank]

    def _direct(self, spans: list[Span]) -> Iterator[tuple[Span, dict[str, Any], list[int]]]:
        for span in spans:
            shares = self.reader.shares(span, self.rank, self.world_size)
            yield span, to_torch(shares.columns), shares.starts

    def _streamed(self, shard: Any, spans: list[Span]) -> Iterator[tuple[Span, dict[str, Any], list[int]]]:
        width = padded_share(self.plan.global_size, self.world_size)
        wanted = width * self.plan.span_steps(self.span_rows)
        blocks = iter(shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
        try:
            for span in spans:
                block = to_numpy(next(blocks, pa.table({})))
                if ERROR in block:
                    raise DataError(block[ERROR][0])
                if rows_of(block) != wanted:
                    raise DataError(f"the Ray Data stream gave a block of {rows_of(block)} rows where {wanted} were planned")
                # a copy: the block lies in shared memory, read-only, and is given back sooner
                tensors = to_torch({name: array.copy() for name, array in block.items()})
                yield span, tensors, [width * at for at in range(span.steps + 1)]
        finally:
            blocks.close()  # tells the stream that this rank is done

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self.reader)

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        return name_rows(self.reader, epoch, index, start, stop)

    def close(self) -> None:
        for ahead in list(self._running):
            ahead.close()
        self._held = []


def build_stream(reader: SpanReader, spans: list[Span], world_size: int, steps: int) -> list[Any]:
    """One Ray Data stream over `spans` (of at most `steps` global batches), split into `world_size` iterators."""
    width = padded_share(reader.plan.global_size, world_size)
    read = SpanTask(reader, spans, world_size, steps)
    data = ray.data.from_items([{"span": number} for number in range(len(spans))], override_num_blocks=len(spans))
    context = data.context
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    span_bytes = reader.tables.size / max(1, reader.plan.rows) * width * world_size * steps
    context.execution_options.resource_limits = ExecutionResources.for_limits(
        cpu=max(1.0, free_cpus()), object_store_memory=max(SPANS_AHEAD * span_bytes, LEAST_AHEAD)
    )
    # not strict: each task makes exactly world_size blocks, so the repartition fuses with the reading and only cuts
    laid_out = data.map_batches(read, batch_size=1).repartition(target_num_rows_per_block=width * steps)
    return list(laid_out.streaming_split(world_size, equal=False))
