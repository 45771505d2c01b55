"""Bars and baselines: what is called met and what is called worse."""

from __future__ import annotations

import pytest

from raydist.benchmark.rows import Row
from raydist.benchmark.verdicts import check_baseline, judge, new_baseline, regressions
from raydist.errors import ConfigError


def row(bench: str, ours: float, theirs: float, judged: bool = True) -> Row:
    against = {"step": "torchrun", "data": "ray", "start": "ray train"}[bench]
    return Row(bench, "x", "s", {"raydist": [ours], against: [theirs]}, judged=judged)


def test_a_verdict_has_figure_and_bar() -> None:
    verdict = judge(row("step", 1.0, 2.0))
    assert (verdict.figure, verdict.met, verdict.spread) == (0.5, True, 0.0)
    assert not judge(row("step", 1.03, 1.0)).met
    plain = verdict.plain()
    assert (plain["bar"], plain["against"], plain["kind"], plain["met"]) == (1.02, "torchrun", "ratio", True)


def test_only_figures_beyond_their_slack_are_worse() -> None:
    baseline = {"figures": {"step/x": 1.0, "data/x": 2.0, "start/x": 0.5}, "slack": {"start": 0.5}}
    fine = [judge(row("step", 1.14, 1.0)), judge(row("data", 1.0, 1.75)), judge(row("start", 0.74, 1.0))]
    assert regressions(fine, baseline) == []
    worse = regressions([judge(row("step", 1.2, 1.0)), judge(row("data", 1.0, 1.6)), judge(row("start", 0.8, 1.0))], baseline)
    assert worse == [
        "step/x: 1.2, and the baseline has 1 (at most 1.15 is allowed)",
        "data/x: 1.6, and the baseline has 2 (at least 1.7 is allowed)",
        "start/x: 0.8, and the baseline has 0.5 (at most 0.75 is allowed)",
    ]


def test_rows_without_a_baseline_or_a_bar_are_left_out() -> None:
    assert regressions([judge(row("step", 9.0, 1.0))], {"figures": {}}) == []
    assert regressions([judge(row("step", 9.0, 1.0, judged=False))], {"figures": {"step/x": 1.0}}) == []


def test_seconds_do_not_enter_only_ratios() -> None:
    assert regressions([judge(row("step", 100.0, 100.0))], {"figures": {"step/x": 1.0}}) == []


def test_a_new_baseline_keeps_what_was_not_measured() -> None:
    before = {"figures": {"step/x": 3.0, "data/x": 2.0}, "slack": {"step": 0.1}}
    assert new_baseline([judge(row("step", 1.0, 2.0))], before) == {
        "figures": {"step/x": 0.5, "data/x": 2.0},
        "slack": {"step": 0.1},
    }


@pytest.mark.parametrize(
    "wrong", [[], {}, {"figures": []}, {"figures": {"step/x": "1"}}, {"figures": {}, "slack": {"a": None}}]
)
def test_a_file_that_is_no_baseline_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^b\.json: "):
        check_baseline(wrong, "b.json")
