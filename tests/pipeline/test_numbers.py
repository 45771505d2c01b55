"""pred = b·(a·x) in two stages, a = b = x = 1, SGD: every number is worked out by hand."""

from __future__ import annotations

import pytest

from tests.pipeline.jobs import pp2
from tests.support import RankPool, train_here

# The loss of a row is (y - ab)², so d loss / da = d loss / db = -2 (y - 1) at a = b = 1; the step is 0.1 x the mean of it.


def weights_after(ranks: RankPool, y: list[float], size: int, **changes: object) -> list[float]:
    found = ranks(2, train_here, pp2(y, size, **changes))[0]["model"]
    return [float(weight) for weight in found.values()]


def test_one_step_on_seven_rows_in_three_micro_batches(ranks: RankPool) -> None:
    # the mean of y - 1 is 4: 1 + 0.1 · 2 · 4
    assert weights_after(ranks, [5.0] * 7, 7) == pytest.approx([1.8, 1.8], abs=1e-6)


def test_the_mean_is_over_rows_not_micro_batches(ranks: RankPool) -> None:
    # (3, 2, 2) rows: the mean of y - 1 over rows is 14 / 7 = 2; over micro-batches it would be 7 / 3
    assert weights_after(ranks, [1.0] * 5 + [8.0] * 2, 7) == pytest.approx([1.4, 1.4], abs=1e-6)


def test_a_tail_of_two_rows_in_four_micro_batches(ranks: RankPool) -> None:
    # four rows with y = 1 have no gradient; the tail's two have y - 1 = 1 and 3, the mean 2
    strategy = {"name": "pipeline", "stages": 2, "micro_batches": 4}
    assert weights_after(ranks, [1.0] * 4 + [2.0, 4.0], 4, strategy=strategy) == pytest.approx([1.4, 1.4], abs=1e-6)


def test_three_batches_accumulated_are_one_of_triple_size(ranks: RankPool) -> None:
    # 18 rows as three passes of three micro-batches of two rows: the mean of y - 1 is (6 · 1 + 6 · 2 + 6 · 3) / 18 = 2
    y = [2.0] * 6 + [3.0] * 6 + [4.0] * 6
    for batch in ({"global_size": 18}, {"global_size": 18, "micro_size": 2}):
        assert weights_after(ranks, y, 18, batch=batch) == pytest.approx([1.4, 1.4], abs=1e-6)


def test_the_clip_uses_the_norm_of_the_whole_model(ranks: RankPool) -> None:
    # both gradients are -8: the norm is 8 √2, and clipped to 1 each is -1 / √2
    found = ranks(2, train_here, pp2([5.0] * 7, 7, clip_grad_norm=1.0))[0]
    assert found["lines"][0]["grad_norm"] == pytest.approx(8 * 2**0.5, rel=1e-6)
    assert [float(w) for w in found["model"].values()] == pytest.approx([1 + 0.1 / 2**0.5] * 2, abs=1e-6)


def test_two_replicas_share_the_rows(ranks: RankPool) -> None:
    # 7 rows are 4 and 3, each in three micro-batches; as without replicas, 1 + 0.1 · 2 · 2
    strategy = {"name": "pipeline", "stages": 2, "replicas": 2, "micro_batches": 3}
    found = ranks(4, train_here, pp2([1.0] * 5 + [8.0] * 2, 7, strategy=strategy))
    for rank in found:
        assert [float(w) for w in rank["model"].values()] == pytest.approx([1.4] * len(rank["model"]), abs=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_an_evaluation_of_any_size(ranks: RankPool, rows: int) -> None:
    # after one step a = b = 1.8 and the prediction is 3.24
    y = [float(n) for n in range(rows)]
    same = {"target": "tests.pipeline.models:same"}
    data = {
        "train": {**same, "args": {"rows": 7, "y": [5.0] * 7}},
        "eval": {**same, "args": {"rows": rows, "y": y}},
    }
    found = ranks(2, train_here, pp2([5.0] * 7, 7, data=data, batch={"global_size": 7, "eval_size": 4}))[0]
    expected = sum((3.24 - value) ** 2 for value in y) / rows
    assert found["lines"][-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
