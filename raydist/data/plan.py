"""Which rows make global batch k: a pure function of the row counts, `seed`, `epoch` and `k`.

The data is a list of row groups (of a parquet file, a piece of a text file, one image) with known row counts. An epoch's
order is made in two levels:

1. the *row stream*: the row groups one after the other, permuted by `(seed, epoch)`;
2. *windows*: consecutive `window` rows of the row stream, each permuted on its own by `(seed, epoch, number of the window)`.

Without a window both levels are off and rows come in file order. Global batch `k` is rows `[k*B, (k+1)*B)` of the result.
The world size does not enter, and the start of batch `k` is found by a binary search, at the same cost for every `k`.

A window is a whole number of global batches, so windows of a stream can be read and shuffled independently. It is *not* a
full shuffle: a row moves with its row group and then within its window. A window as large as the data is a full shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydist.batching import rows_in_step, steps_in
from raydist.data.source import Position

Ints = NDArray[np.int64]

AUTO_BYTES = 32 * 2**20
"""Bytes of data that `window: auto` aims at (uncompressed, as the files state it)."""
AUTO_BATCHES = 8
"""Least number of global batches of a `window: auto`."""


def permutation(rows: int, seed: int, *key: int) -> Ints:
    """A permutation of `range(rows)` that depends on `seed` and `key` alone.

    It sorts raw output of PCG64, whose stream numpy promises to keep, so an order outlives numpy's releases.
    `key` has a fixed length for each use: `(0, 1)` and `(1, 0)` are unrelated.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(rows)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def auto_window(rows: int, data_bytes: int, global_size: int) -> int:
    """Rows of `window: auto`: about 32 MiB of data, at least 8 global batches; depends on the data and the batch alone."""
    row_bytes = max(1.0, data_bytes / max(rows, 1))
    return round_window(max(int(AUTO_BYTES / row_bytes), AUTO_BATCHES * global_size), global_size)


def round_window(window: int, global_size: int) -> int:
    """`window` rounded up to whole global batches."""
    return -(-window // global_size) * global_size


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)` of row group `group`."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Global batches `[start, stop)` of an epoch: the unit in which the data is read."""

    epoch: int
    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Selection:
    """Where rows lie: `order[i]` is the row, counted through `pieces` one after the other, that comes at place `i`."""

    pieces: list[Piece]
    order: Ints


@dataclass(frozen=True)
class Plan:
    """The order of rows in every epoch.

    group_rows: rows of each row group, in file order; zeros are allowed.
    window: rows of a shuffle window, a multiple of `global_size`; None keeps file order.
    """

    group_rows: Ints
    global_size: int
    seed: int = 0
    window: int | None = None
    drop_last: bool = False
    _streams: dict[int, tuple[Ints, Ints]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_size < 1:
            raise ValueError(f"a global batch needs at least 1 row, not {self.global_size}")
        if self.window is not None and (self.window < 1 or self.window % self.global_size):
            raise ValueError(f"a window of {self.window} rows is not a number of global batches of {self.global_size} rows")
        object.__setattr__(self, "group_rows", np.asarray(self.group_rows, dtype=np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}

    @property
    def rows(self) -> int:
        """Rows of the data."""
        return int(self.group_rows.sum())

    @property
    def steps_per_epoch(self) -> int:
        return steps_in(self.rows, self.global_size, self.drop_last)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that an epoch trains: all, or with `drop_last` those of whole global batches."""
        return min(self.rows, self.steps_per_epoch * self.global_size)

    def rows_in_step(self, index: int) -> int:
        return rows_in_step(self.rows_per_epoch, self.global_size, index)

    def select(self, epoch: int, start: int, stop: int) -> Selection:
        """Where rows `[start, stop)` of an epoch's order lie. Pieces cover the windows these rows belong to."""
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(f"rows {start}..{stop} are outside an epoch of {self.rows} rows")
        if start == stop:
            return Selection([], np.empty(0, dtype=np.int64))
        if self.window is None:
            return Selection(self._pieces(epoch, start, stop), np.arange(stop - start, dtype=np.int64))
        first, last = start // self.window, (stop - 1) // self.window
        base, end = first * self.window, min(self.rows, (last + 1) * self.window)
        orders = []
        for number in range(first, last + 1):
            low, high = number * self.window, min(self.rows, (number + 1) * self.window)
            orders.append(permutation(high - low, self.seed, epoch, 1, number) + (low - base))
        order = np.concatenate(orders)[start - base : stop - base]
        return Selection(self._pieces(epoch, base, end), order)

    def select_steps(self, span: Span) -> Selection:
        """Where the rows of a span lie, in the order of its global batches."""
        size = self.global_size
        return self.select(span.epoch, span.start * size, min(self.rows_per_epoch, span.stop * size))

    def span_steps(self, rows: int) -> int:
        """Global batches of a span of about `rows` rows that cuts no window."""
        unit = max(1, (self.window or self.global_size) // self.global_size)
        return max(1, rows // (unit * self.global_size)) * unit

    def spans(self, start: Position, stop_epoch: int | None, rows: int) -> Iterator[Span]:
        """Spans from `start` on that hold about `rows` rows each and cut no window (the first one may start inside)."""
        length = self.span_steps(rows)
        steps = self.steps_per_epoch
        epoch, index = start.epoch, start.index
        while steps and (stop_epoch is None or epoch < stop_epoch):
            while index < steps:
                stop = min(steps, (index // length + 1) * length)
                yield Span(epoch, index, stop)
                index = stop
            epoch, index = epoch + 1, 0

    def name_rows(self, epoch: int, start: int, stop: int) -> list[Piece]:
        """The rows `[start, stop)` of an epoch's order as pieces of row groups, in file order, neighbours joined."""
        chosen = self.select(epoch, start, stop)
        begins = np.cumsum([0] + [piece.rows for piece in chosen.pieces])
        which = np.searchsorted(begins, chosen.order, side="right") - 1
        found = sorted(
            (chosen.pieces[at].group, int(row) - int(begins[at]) + chosen.pieces[at].start)
            for at, row in zip(which.tolist(), chosen.order.tolist(), strict=True)
        )
        return _join(found)

    def _stream(self, epoch: int) -> tuple[Ints, Ints]:
        """The epoch's order of row groups, and the row of the stream at which each one starts (one more at the end)."""
        found = self._streams.get(epoch)
        if found is None:
            groups = len(self.group_rows)
            order = np.arange(groups) if self.window is None else permutation(groups, self.seed, epoch, 0)
            found = order, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.group_rows[order])])
            self._streams.clear()
            self._streams[epoch] = found
        return found

    def _pieces(self, epoch: int, start: int, stop: int) -> list[Piece]:
        order, starts = self._stream(epoch)
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        pieces = []
        for at in range(first, last):
            low, high = max(start, int(starts[at])), min(stop, int(starts[at + 1]))
            if low < high:
                pieces.append(Piece(int(order[at]), low - int(starts[at]), high - int(starts[at])))
        return pieces


def _join(rows: Sequence[tuple[int, int]]) -> list[Piece]:
    """Pieces out of sorted `(group, row)` pairs."""
    pieces: list[Piece] = []
    for group, row in rows:
        if pieces and pieces[-1].group == group and pieces[-1].stop == row:
            pieces[-1] = Piece(group, pieces[-1].start, row + 1)
        else:
            pieces.append(Piece(group, row, row + 1))
    return pieces
