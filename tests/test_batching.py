"""The batch law's integers, for any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.batching import loss_scale, micro_batches, padded_share, rows_in_step, share, steps_in

rows = st.integers(0, 5000)
worlds = st.integers(1, 40)


@given(rows, worlds)
def test_shares_cover_the_global_batch_exactly_once_and_differ_by_at_most_one_row(global_rows: int, world_size: int) -> None:
    parts = [share(global_rows, rank, world_size) for rank in range(world_size)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(global_rows))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    assert padded_share(global_rows, world_size) == max(1, *sizes) if world_size > 1 else True


@given(rows, worlds, st.integers(1, 600))
def test_micro_batches_cover_each_share_and_are_equally_many_on_every_rank(
    global_rows: int, world_size: int, micro_size: int
) -> None:
    counts = set()
    for rank in range(world_size):
        start, stop = share(global_rows, rank, world_size)
        pieces = micro_batches(global_rows, rank, world_size, micro_size)
        counts.add(len(pieces))
        counted = [piece for piece in pieces if piece.rows]
        assert [row for p in counted for row in range(p.start, p.stop)] == list(range(stop - start))
        assert all(p.stop - p.start == p.rows <= micro_size for p in counted)
        assert all((p.start, p.stop) == (0, 1) for p in pieces if not p.rows)
    assert len(counts) == 1
    assert counts.pop() >= 1


@given(st.integers(1, 5000), worlds, st.integers(1, 600))
def test_loss_scales_sum_to_the_world_size_so_ddps_average_is_the_weighted_mean(
    global_rows: int, world_size: int, micro: int
) -> None:
    total = sum(
        loss_scale(piece.rows, global_rows, world_size)
        for rank in range(world_size)
        for piece in micro_batches(global_rows, rank, world_size, micro)
    )
    assert total / world_size == pytest.approx(1.0)


@given(rows, st.integers(1, 600))
def test_steps_hold_every_row_once(total: int, global_size: int) -> None:
    steps = steps_in(total, global_size)
    assert sum(rows_in_step(total, global_size, k) for k in range(steps)) == total
    assert all(rows_in_step(total, global_size, k) == global_size for k in range(steps - 1))
    assert steps_in(total, global_size, drop_last=True) * global_size <= total


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        share(4, 2, 2)
    with pytest.raises(ValueError, match="-1 rows"):
        share(-1, 0, 2)
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        micro_batches(4, 0, 2, 0)


def test_no_weight_at_all_scales_to_zero() -> None:
    assert loss_scale(0.0, 0.0, 3) == 0.0
