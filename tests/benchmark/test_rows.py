"""The judged figure of a row: from hand-made numbers, by the definition."""

from __future__ import annotations

import pytest

from raydist.benchmark.rows import Bar, Row, each_round, figure, row_from, spread
from raydist.errors import RaydistError

RATIO = Bar("ratio", 1.02, 1.0, "torchrun")


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    row = Row("step", "cnn", "ms", {"raydist": [10.0, 40.0, 11.0], "torchrun": [10.0, 20.0, 10.0]})
    assert each_round(row, RATIO) == [1.0, 2.0, 1.1]
    assert figure(row, RATIO) == 1.1  # the ratio of the medians would be 1.1 too, that of the means 1.525


def test_a_speed_up_divides_the_other_way_and_wants_more() -> None:
    bar = Bar("speed-up", 1.5, 2.0, "ray")
    row = Row("data", "epoch", "s", {"raydist": [2.0], "ray": [5.0]})
    assert figure(row, bar) == 2.5 and bar.met(2.5) and bar.met(1.5) and not bar.met(1.4)
    assert bar.words(1.5) == "≥ 1.5 ×" and RATIO.words(1.02) == "≤ 1.02 ×"


def test_a_value_is_our_own_median_and_others_do_not_enter() -> None:
    bar = Bar("value", 2.0, 1.0)
    row = Row("scale", "16 workers", "ms", {"raydist": [3.0, 1.0, 2.0], "torchrun": [9.0]})
    assert figure(row, bar) == 2.0 and bar.met(2.0) and not bar.met(2.1) and bar.words(2.0) == "≤ 2"


def test_bars_judge_the_contender_that_they_name() -> None:
    bar = Bar("ratio", 1.05, 1.01, "no saving", "in the background")
    row = Row("ckpt", "", "ms", {"no saving": [10.0], "in the background": [10.5], "waiting for it": [20.0]})
    assert figure(row, bar) == 1.05 and row.name == "ckpt"


def test_spread_is_half_the_range_in_parts_of_the_median() -> None:
    assert spread([1.0, 1.2, 0.8]) == pytest.approx(0.2)
    assert spread([5.0]) == 0.0


def test_a_missing_contender_and_uneven_rounds_are_told() -> None:
    row = Row("step", "cnn", "ms", {"raydist": [1.0, 2.0], "torchrun": [1.0]})
    with pytest.raises(RaydistError, match="step/cnn: raydist ran 2 rounds and torchrun 1"):
        each_round(row, RATIO)
    with pytest.raises(RaydistError, match="step/cnn: no figure of 'torchrun'; there are raydist"):
        each_round(Row("step", "cnn", "ms", {"raydist": [1.0]}), RATIO)


@pytest.mark.parametrize(
    "plain",
    [
        {"bench": "step"},
        {"bench": "step", "case": "", "unit": "s", "values": {}},
        {"bench": "step", "case": "", "unit": "s", "values": {"raydist": []}},
        {"bench": "step", "case": "", "unit": "s", "values": {"raydist": ["fast"]}},
        {"bench": "step", "case": "", "unit": "s", "values": {"raydist": [1]}, "speed": 1},
    ],
)
def test_what_is_no_row_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(RaydistError, match="row of a benchmark"):
        row_from(plain)


def test_a_row_goes_through_json_unchanged() -> None:
    row = Row("step", "cnn", "ms", {"raydist": [1.0]}, note="n", judged=False, more={"a": 1})
    assert row_from(row.plain()) == row
