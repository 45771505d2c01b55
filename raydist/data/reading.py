"""Reads spans of a plan: the rows of some global batches, or one rank's shares of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raydist.batching import padded_share, share
from raydist.data.columns import Columns, take
from raydist.data.plan import Ints, Plan, Selection, Span
from raydist.data.tables import TableSet
from raydist.data.transforms import Transforms

CACHE_BYTES = 256 * 2**20
"""Data sets up to this size (uncompressed) stay decoded in memory."""
SPAN_BYTES = 8 * 2**20
"""Bytes that a span holds at least, about; a span is never less than a window."""


@dataclass(frozen=True)
class Shares:
    """One rank's rows of a span: rows `[starts[i], starts[i + 1])` of `columns` belong to global batch `span.start + i`."""

    span: Span
    columns: Columns
    starts: list[int]


@dataclass
class SpanReader:
    """Rows by plan. Groups that the next span may need again stay in memory, and all of them when the data is small."""

    tables: TableSet
    plan: Plan
    transforms: Transforms
    cache_bytes: int = CACHE_BYTES
    _cache: OrderedDict[int, Columns] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}

    @property
    def span_rows(self) -> int:
        """Rows of a span; depends on the data and the global batch alone."""
        return max(self.plan.window or 0, int(SPAN_BYTES * self.tables.rows.sum() / max(1, self.tables.size)))

    def sizes(self, span: Span) -> list[int]:
        """Rows of each global batch of the span."""
        return [self.plan.rows_in_step(index) for index in range(span.start, span.stop)]

    def rows(self, span: Span, order: Ints | None = None) -> Columns:
        """Rows of a span in plan order, or those at places `order` of it, transformed."""
        selection = self.plan.select_steps(span)
        if not self.transforms:
            return self._take(selection, order)
        if not self.transforms.random:
            return self.transforms(self._take(selection, order))
        whole = self._take(selection, None)
        ends = np.cumsum([0, *self.sizes(span)])
        batches = [
            self.transforms({name: array[ends[i] : ends[i + 1]] for name, array in whole.items()}, (span.epoch, span.start + i))
            for i in range(span.steps)
        ]
        return take(batches, np.arange(ends[-1]) if order is None else order)

    def changed_rows(self, span: Span) -> Columns:
        """What transforms that change the number of rows make of a span; random ones go by (epoch, first batch of the span)."""
        return self.transforms(self._take(self.plan.select_steps(span), None), (span.epoch, span.start), same_rows=False)

    def shares(self, span: Span, rank: int, world_size: int) -> Shares:
        """The rank's share of each global batch of the span; row 0 of a batch in which it has none."""
        order, starts = share_order(self.sizes(span), rank, world_size)
        return Shares(span, self.rows(span, order), starts)

    def group(self, number: int) -> Columns:
        """A row group, out of memory if it is there. Do not write to it."""
        found = self._cache.get(number)
        if found is None:
            found = self._cache[number] = self.tables.read(number)
        return found

    def _take(self, selection: Selection, order: Ints | None) -> Columns:
        parts = []
        for piece in selection.pieces:
            columns = self.group(piece.group)
            whole = piece.rows == self.tables.rows[piece.group]
            parts.append(columns if whole else {name: array[piece.start : piece.stop] for name, array in columns.items()})
        if self.tables.size > self.cache_bytes:
            self._forget({selection.pieces[0].group, selection.pieces[-1].group})
        return take(parts, selection.order if order is None else selection.order[order])

    def _forget(self, keep: set[int]) -> None:
        for number in [number for number in self._cache if number not in keep]:
            del self._cache[number]


def share_order(sizes: list[int], rank: int, world_size: int) -> tuple[Ints, list[int]]:
    """Places in a span of the rows of a rank's shares, at least one a global batch, and where each share starts among them."""
    places, starts, base = [], [0], 0
    for rows in sizes:
        start, stop = share(rows, rank, world_size)
        own = (start, stop) if start < stop else (0, 1)
        places.append(np.arange(base + own[0], base + own[1], dtype=np.int64))
        starts.append(starts[-1] + own[1] - own[0])
        base += rows
    return np.concatenate(places), starts


def rank_major(sizes: list[int], global_size: int, world_size: int, steps: int) -> Ints:
    """Places in a span, laid out rank by rank: shape (world_size, steps * padded share).

    Each global batch gives every rank as many rows as the largest share has; a smaller share is padded with row 0 of its batch,
    and a span of fewer than `steps` batches with row 0 of the span, so that all blocks are equal.
    """
    width = padded_share(global_size, world_size)
    places = np.zeros((world_size, steps, width), dtype=np.int64)
    base = 0
    for at, rows in enumerate(sizes):
        for rank in range(world_size):
            start, stop = share(rows, rank, world_size)
            places[rank, at, : stop - start] = np.arange(base + start, base + stop)
            places[rank, at, stop - start :] = base
        base += rows
    return places.reshape(world_size, steps * width)
