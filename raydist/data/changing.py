"""Training data whose transforms change the number of rows (`rows: changes`): filters and flat-maps.

Global batch k is rows `[k*B, (k+1)*B)` of what the transforms make of the epoch's rows in plan order, whatever the world size.
How many there are is not known before, so a run's length is `max_steps` (or epochs that end when they end), and resuming
replays the epoch from its start. Every rank reads and transforms all rows and keeps its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from raydist.batching import share
from raydist.data.columns import Columns, join, rows_of
from raydist.data.direct import fingerprint_of
from raydist.data.prefetch import Prefetch
from raydist.data.reading import SpanReader
from raydist.data.source import Position, StepData
from raydist.data.tensors import to_torch
from raydist.errors import DataError

NOTE = "transforms change the number of rows: resuming inside an epoch replays it from its start"


class ChangingSource:
    """Training data of one rank (a `TrainSource`); `reader`'s plan covers all rows, `drop_last` drops a short last batch."""

    def __init__(self, reader: SpanReader, rank: int, world_size: int, drop_last: bool) -> None:
        self.reader = reader
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.rows_per_epoch: int | None = None
        self.steps_per_epoch: int | None = None
        self.notes = [*reader.tables.notes, NOTE]
        self._running: list[Prefetch[Any]] = []

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        """Steps from `start` on; those of the epoch before it are read and passed over."""
        ahead = Prefetch(self._batches(start, stop_epoch), depth=4)
        self._running.append(ahead)
        try:
            for (epoch, index, last, columns), waited in ahead:
                rows = rows_of(columns)
                begin, end = share(rows, self.rank, self.world_size)
                own = (begin, end) if begin < end else (0, 1)
                batch = to_torch({name: array[own[0] : own[1]] for name, array in columns.items()})
                yield StepData(epoch, index, last, rows, end - begin, batch, waited)
        finally:
            ahead.close()
            self._running.remove(ahead)

    def _batches(self, start: Position, stop_epoch: int | None) -> Iterator[tuple[int, int, bool, Columns]]:
        for epoch in count(start.epoch) if stop_epoch is None else range(start.epoch, stop_epoch):
            found = False
            held: Columns | None = None
            index = 0
            for columns in rebatch(self._transformed(epoch), self.reader.plan.global_size, self.drop_last):
                found = True
                if held is not None:
                    if epoch > start.epoch or index >= start.index:
                        yield epoch, index, False, held
                    index += 1
                held = columns
            if held is not None and (epoch > start.epoch or index >= start.index):
                yield epoch, index, True, held
            if not found:
                raise DataError(f"the transforms left too few rows of epoch {epoch} for one batch; check them")

    def _transformed(self, epoch: int) -> Iterator[Columns]:
        for span in self.reader.plan.spans(Position(epoch), epoch + 1, self.reader.span_rows):
            yield self.reader.changed_rows(span)

    def fingerprint(self) -> dict[str, Any]:
        return {**fingerprint_of(self.reader), "rows_change": True}

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        rows = f"row {start}" if stop - start == 1 else f"rows {start}..{stop - 1}"
        return (
            f"{rows} of global batch {index} of epoch {epoch}, counted after the transforms (with rows: "
            "changes their file is not known)"
        )

    def close(self) -> None:
        for ahead in list(self._running):
            ahead.close()


def rebatch(parts: Iterator[Columns], size: int, drop_last: bool) -> Iterator[Columns]:
    """Cut parts of any number of rows into batches of `size`; a short last one is dropped or kept."""
    waiting: list[Columns] = []
    held = 0
    for part in parts:
        if not rows_of(part):
            continue
        waiting.append(part)
        held += rows_of(part)
        if held >= size:
            whole = {name: join([one[name] for one in waiting]) for name in part}
            cut = held - held % size
            for at in range(0, cut, size):
                yield {name: array[at : at + size] for name, array in whole.items()}
            held -= cut
            waiting = [{name: array[cut:] for name, array in whole.items()}] if held else []
    if held and not drop_last:
        yield {name: join([one[name] for one in waiting]) for name in waiting[0]}
