"""The batch table against sums over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raydist.planning.batches import batch_row, tail_of, world_sizes

COUNT = st.integers(1, 64)


@given(workers=COUNT, global_size=st.integers(1, 300), micro=st.none() | COUNT, tail=st.integers(0, 100))
def test_a_row_of_the_table_adds_up(workers: int, global_size: int, micro: int | None, tail: int) -> None:
    row = batch_row(workers, global_size, micro, tail)
    assert row.largest - row.smallest == (1 if global_size % workers else 0)
    assert row.smallest == global_size // workers
    assert sum(row.tail) == tail
    assert row.micro * row.accumulation >= row.largest  # every row is in some micro-batch, and none is all padding
    assert row.micro * (row.accumulation - 1) < max(1, row.largest)
    assert row.even == (global_size == workers * row.micro * row.accumulation)


def test_tails() -> None:
    assert tail_of(10, 4, False) == (3, 2)
    assert tail_of(10, 4, True) == (2, 0)
    assert tail_of(8, 4, False) == (2, 0)
    assert tail_of(3, 4, False) == (1, 3)


def test_world_sizes_of_a_range() -> None:
    assert world_sizes(3, 3) == [3]
    assert world_sizes(1, 4) == [1, 2, 3, 4]
    assert world_sizes(2, 40) == [2, 4, 8, 16, 32, 40]
