"""The order of rows, against a plain reading of its definition."""

from __future__ import annotations

import pickle
import random
import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data.plan import (
    AUTO_BATCHES,
    AUTO_BYTES,
    Piece,
    Plan,
    Span,
    auto_window,
    permutation,
    round_window,
)
from raydist.data.source import Position

GROUPS = [5, 0, 7, 3, 11]


def rows_of(plan: Plan, epoch: int, index: int) -> list[int]:
    """The rows of a global batch, counted through all groups in file order."""
    begins = np.concatenate([[0], np.cumsum(plan.group_rows)])
    chosen = plan.select_steps(Span(epoch, index, index + 1))
    stream = [int(begins[p.group]) + row for p in chosen.pieces for row in range(p.start, p.stop)]
    return [stream[at] for at in chosen.order]


def epoch_of(plan: Plan, epoch: int) -> list[list[int]]:
    return [rows_of(plan, epoch, index) for index in range(plan.steps_per_epoch)]


def defined(groups: list[int], batch: int, seed: int, window: int | None, epoch: int) -> list[list[int]]:
    """The docstring of `plan`, word by word."""
    begins = np.concatenate([[0], np.cumsum(groups)]).tolist()
    order = range(len(groups)) if window is None else permutation(len(groups), seed, epoch, 0).tolist()
    stream = [begins[g] + row for g in order for row in range(groups[g])]
    if window is not None:
        windows = [stream[at : at + window] for at in range(0, len(stream), window)]
        stream = [w[i] for n, w in enumerate(windows) for i in permutation(len(w), seed, epoch, 1, n).tolist()]
    return [stream[at : at + batch] for at in range(0, len(stream), batch)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.integers(1, 9),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 3),
)
def test_the_order_is_the_one_defined(groups: list[int], batch: int, seed: int, window: int | None, epoch: int) -> None:
    window = None if window is None else round_window(window, batch)
    plan = Plan(np.array(groups), batch, seed, window)
    assert epoch_of(plan, epoch) == defined(groups, batch, seed, window, epoch)
    assert sorted(row for rows in epoch_of(plan, epoch) for row in rows) == list(range(sum(groups)))


def test_without_shuffle_rows_come_in_file_order() -> None:
    assert [row for rows in epoch_of(Plan(np.array(GROUPS), 4), 3) for row in rows] == list(range(26))


def test_seeds_and_epochs_do_not_mix() -> None:
    orders = {(seed, epoch): tuple(permutation(50, seed, epoch, 0).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    plans = {seed: Plan(np.array(GROUPS), 4, seed, 8) for seed in (0, 1)}
    assert epoch_of(plans[0], 1) != epoch_of(plans[1], 0)
    assert epoch_of(plans[0], 0) != epoch_of(plans[0], 1)


def test_an_order_never_changes() -> None:
    # a checkpoint resumes into this order: a change here is a change of every run
    assert permutation(10, 0, 0, 0).tolist() == [9, 7, 2, 0, 4, 3, 5, 6, 1, 8]
    assert permutation(6, 7, 2, 1, 3).tolist() == [2, 0, 4, 5, 1, 3]


def test_drop_last_leaves_out_the_short_batch() -> None:
    plan = Plan(np.array(GROUPS), 4, 0, 8, drop_last=True)
    assert (plan.rows, plan.rows_per_epoch, plan.steps_per_epoch) == (26, 24, 6)
    kept = epoch_of(Plan(np.array(GROUPS), 4, 0, 8), 0)[:6]
    assert epoch_of(plan, 0) == kept


def test_spans_cover_every_batch_once_and_cut_no_window() -> None:
    plan = Plan(np.array([100]), 3, 0, 12)
    for index in range(plan.steps_per_epoch):
        spans = list(plan.spans(Position(1, index), 3, rows=25))
        steps = [(s.epoch, k) for s in spans for k in range(s.start, s.stop)]
        assert steps == [(1, k) for k in range(index, 34)] + [(2, k) for k in range(34)]
        assert all(s.start % 8 == 0 for s in spans[1:])
        assert max(s.steps for s in spans) == 8 == plan.span_steps(25)
    assert len(list(islice(plan.spans(Position(), None, 25), 100))) == 100
    assert list(Plan(np.array([0]), 3).spans(Position(), None, 25)) == []


def test_rows_are_named_in_file_order() -> None:
    plan = Plan(np.array(GROUPS), 4)
    assert plan.name_rows(0, 3, 8) == [Piece(0, 3, 5), Piece(2, 0, 3)]
    shuffled = Plan(np.array(GROUPS), 26, 0, 26)
    assert shuffled.name_rows(0, 0, 26) == [Piece(g, 0, rows) for g, rows in enumerate(GROUPS) if rows]
    assert plan.name_rows(0, 3, 3) == []


def test_the_auto_window_depends_on_data_and_batch_alone() -> None:
    rows, row_bytes = 10_000_000, 256
    window = auto_window(rows, rows * row_bytes, 64)
    assert AUTO_BYTES / row_bytes <= window < AUTO_BYTES / row_bytes + 64
    assert window % 64 == 0
    assert auto_window(1000, 1000 * 2**20, 10) == AUTO_BATCHES * 10


def test_a_window_is_whole_batches() -> None:
    assert [round_window(w, 4) for w in (1, 4, 5)] == [4, 4, 8]
    with pytest.raises(ValueError, match="a window of 6 rows is not a number of global batches of 4 rows"):
        Plan(np.array([8]), 4, 0, 6)
    with pytest.raises(ValueError, match="at least 1 row"):
        Plan(np.array([8]), 0)
    with pytest.raises(ValueError, match="outside an epoch of 8 rows"):
        Plan(np.array([8]), 4).select(0, 4, 9)


def test_finding_a_step_costs_the_same_everywhere() -> None:
    # seeking reads nothing and replays nothing: pieces touched at the end are no more than at the start
    plan = Plan(np.full(50_000, 1000), 64, 0, 6400)
    touched = [
        len(plan.select_steps(Span(0, k, k + 1)).pieces) for k in (0, plan.steps_per_epoch // 2, plan.steps_per_epoch - 1)
    ]
    assert max(touched) <= 8
    steps = random.Random(0).sample(range(plan.steps_per_epoch), 50)
    began = time.perf_counter()
    for k in steps:
        plan.select_steps(Span(0, k, k + 1))
    assert (time.perf_counter() - began) / len(steps) < 0.1


def test_a_plan_travels_without_its_cache() -> None:
    plan = Plan(np.array(GROUPS), 4, 0, 8)
    epoch_of(plan, 0)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy._streams == {}
    assert epoch_of(copy, 2) == epoch_of(plan, 2)
