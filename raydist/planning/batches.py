"""How global batches fall on workers, in integers: the batch law's own functions, put into a table."""

from __future__ import annotations

from dataclasses import dataclass

from raydist.batching import micro_batches, padded_share, rows_in_step, share, steps_in

MOST_ROWS = 8
"""World sizes of an elastic range that are shown; of a longer one, doublings from the least to the most."""


@dataclass(frozen=True)
class BatchRow:
    """One world size: rows of the largest and smallest share, of a full micro-batch, micro-batches per step, tail shares."""

    workers: int
    largest: int
    smallest: int
    micro: int
    accumulation: int
    tail: list[int]
    """Rows of each worker in the short last batch; empty when there is none."""

    @property
    def even(self) -> bool:
        """Whether global = workers × micro × accumulation holds exactly."""
        return self.largest == self.smallest and self.largest == self.micro * self.accumulation


def batch_row(workers: int, global_size: int, micro: int | None, tail_rows: int) -> BatchRow:
    """The table's line for `workers`. `micro` None is the whole share; `tail_rows` 0 means that no batch is short."""
    shares = [stop - start for start, stop in (share(global_size, rank, workers) for rank in (0, workers - 1))]
    rows = min(micro or padded_share(global_size, workers), padded_share(global_size, workers))
    tail = [stop - start for start, stop in (share(tail_rows, rank, workers) for rank in range(workers))] if tail_rows else []
    return BatchRow(workers, shares[0], shares[1], rows, len(micro_batches(global_size, 0, workers, rows)), tail)


def world_sizes(low: int, high: int) -> list[int]:
    """The world sizes worth a line."""
    if high - low < MOST_ROWS:
        return list(range(low, high + 1))
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def tail_of(rows: int, global_size: int, drop_last: bool) -> tuple[int, int]:
    """Steps of an epoch, and rows of its short last batch (0 when every batch is whole or the tail is dropped)."""
    steps = steps_in(rows, global_size, drop_last)
    last = rows_in_step(rows, global_size, steps - 1) if steps else 0
    return steps, last if last < global_size else 0
