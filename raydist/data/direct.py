"""Data without Ray: every rank reads by the plan in a background thread and keeps its share.

For one process, for torchrun, and for small data anywhere: each rank decodes all files of what it reads, and data of up to
256 MiB stays decoded in memory between epochs. `ray_data` reads each file once for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raydist.batching import share
from raydist.data.columns import Columns, join, rows_of
from raydist.data.plan import Piece
from raydist.data.prefetch import Prefetch
from raydist.data.reading import Shares, SpanReader
from raydist.data.source import EvalData, Position, StepData
from raydist.data.tables import TableSet
from raydist.data.tensors import to_torch
from raydist.data.transforms import Transforms


class DirectSource:
    """Training data of one rank (a `TrainSource`)."""

    def __init__(self, reader: SpanReader, rank: int, world_size: int) -> None:
        self.reader = reader
        self.plan = reader.plan
        self.rank = rank
        self.world_size = world_size
        self.rows_per_epoch: int | None = self.plan.rows_per_epoch
        self.steps_per_epoch: int | None = self.plan.steps_per_epoch
        self.notes = notes_of(reader)
        self._running: list[Prefetch[Any]] = []

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        """Steps from `start` on. Batches are views of one block of memory per span: use them, do not keep them all."""
        ahead = Prefetch(self._shares(start, stop_epoch), depth=1)
        self._running.append(ahead)
        try:
            for (shares, tensors), waited in ahead:
                yield from steps_of(self.plan, shares.span, tensors, shares.starts, self.rank, self.world_size, waited)
        finally:
            ahead.close()
            self._running.remove(ahead)

    def _shares(self, start: Position, stop_epoch: int | None) -> Iterator[tuple[Shares, dict[str, Any]]]:
        for span in self.plan.spans(start, stop_epoch, self.reader.span_rows):
            shares = self.reader.shares(span, self.rank, self.world_size)
            yield shares, to_torch(shares.columns)

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self.reader)

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        return name_rows(self.reader, epoch, index, start, stop)

    def close(self) -> None:
        for ahead in list(self._running):
            ahead.close()


def steps_of(
    plan: Any, span: Any, tensors: dict[str, Any], starts: list[int], rank: int, world_size: int, waited: float
) -> Iterator[StepData]:
    """The steps of a span out of one rank's rows: batch `i` is rows `[starts[i], starts[i + 1])`."""
    for at in range(span.steps):
        index = span.start + at
        rows = plan.rows_in_step(index)
        begin, end = share(rows, rank, world_size)
        batch = {name: column[starts[at] : starts[at] + max(1, end - begin)] for name, column in tensors.items()}
        yield StepData(
            epoch=span.epoch,
            index=index,
            last_in_epoch=index + 1 == plan.steps_per_epoch,
            global_rows=rows,
            rows=end - begin,
            batch=batch,
            wait_s=waited if at == 0 else 0.0,
        )


def notes_of(reader: SpanReader) -> list[str]:
    """What a user should know of this data: rows left out, nulls filled."""
    plan = reader.plan
    notes = list(reader.tables.notes)
    if plan.rows > plan.rows_per_epoch:
        notes.append(f"drop_last leaves {plan.rows - plan.rows_per_epoch} of {plan.rows} rows out of each epoch")
    return notes


def fingerprint_of(reader: SpanReader) -> dict[str, Any]:
    """The data's fingerprint, and how its order is made."""
    plan = reader.plan
    order = {"global_size": plan.global_size, "window": plan.window, "seed": plan.seed, "drop_last": plan.drop_last}
    return {**reader.tables.fingerprint(), "order": order}


def name_rows(reader: SpanReader, epoch: int, index: int, start: int, stop: int) -> str:
    """Words that name rows `[start, stop)` of a global batch: `file rows a..b`."""
    base, rows = index * reader.plan.global_size, reader.plan.rows_in_step(index)
    return reader.tables.name(reader.plan.name_rows(epoch, base + min(start, rows), base + min(stop, rows)))


class DirectEval:
    """Evaluation data of one rank (an `EvalSource`): a contiguous part of all rows in file order, read by this rank alone."""

    def __init__(
        self, tables: TableSet, transforms: Transforms, batch_size: int, rank: int, world_size: int, changes: bool
    ) -> None:
        self.tables = tables
        self.transforms = transforms
        self.batch_size = batch_size
        self.changes = changes
        total = int(tables.rows.sum())
        self.rows: int | None = None if changes else total
        self._share = share(total, rank, world_size)
        self._kept: list[dict[str, Any]] | None = [] if tables.size <= 64 * 2**20 else None
        self._full = False

    def batches(self) -> Iterator[EvalData]:
        """All batches of this rank. Small data is read once and kept."""
        if self._full and self._kept is not None:
            for batch in self._kept:
                yield EvalData({name: _copy(value) for name, value in batch.items()}, _length(batch))
            return
        kept: list[dict[str, Any]] = []
        ahead = Prefetch(self._read(), depth=2)
        try:
            for columns, _ in ahead:
                tensors = to_torch(columns)
                if self._kept is not None:
                    kept.append({name: _copy(value) for name, value in tensors.items()})
                yield EvalData(tensors, rows_of(columns))
        finally:
            ahead.close()
        if self._kept is not None:
            self._kept, self._full = kept, True

    def close(self) -> None:
        self._kept, self._full = None, False

    def _read(self) -> Iterator[Columns]:
        """Batches of `batch_size` rows, cut out of row groups; the last one is short."""
        waiting: list[Columns] = []
        held = 0
        for piece in self._pieces():
            columns = self.tables.read(piece.group)
            whole_group = bool(self.transforms) and self.transforms.random
            if not whole_group:
                columns = {name: array[piece.start : piece.stop] for name, array in columns.items()}
            if self.transforms:
                columns = self.transforms(columns, (0, piece.group), same_rows=not self.changes)
            if whole_group and not self.changes:
                columns = {name: array[piece.start : piece.stop] for name, array in columns.items()}
            waiting.append(columns)
            held += rows_of(columns)
            if held >= self.batch_size:
                whole = {name: join([part[name] for part in waiting]) for name in columns}
                cut = held - held % self.batch_size
                for at in range(0, cut, self.batch_size):
                    yield {name: array[at : at + self.batch_size] for name, array in whole.items()}
                waiting, held = [{name: array[cut:] for name, array in whole.items()}], held - cut
        if held:
            yield {name: join([part[name] for part in waiting if rows_of(part)]) for name in waiting[0]}

    def _pieces(self) -> Iterator[Piece]:
        """This rank's rows; whole row groups where transforms change the number of rows."""
        first, last = self._share
        at = 0
        for number, rows in enumerate(self.tables.rows.tolist()):
            if self.changes:
                if first <= at < last and rows:
                    yield Piece(number, 0, rows)
                at += rows
                continue
            low, high = max(first, at), min(last, at + rows)
            if low < high:
                yield Piece(number, low - at, high - at)
            at += rows


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else list(value)


def _length(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))
