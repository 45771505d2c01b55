"""Who does what when: the lists are what torch does, and the limits are those of the papers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from raydist.config_pipeline import PipelineStrategy
from raydist.pipeline.orders import Action, Kind, bubble, limit, orders, simulate
from raydist.pipeline.timed import account, chrome_trace
from tests.pipeline.jobs import actions, stages, wide
from tests.support import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


def strategy(schedule: Any, count: int = 4, micro: int = 8) -> PipelineStrategy:
    return PipelineStrategy(stages=count, schedule=schedule, micro_batches=micro)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_is_what_torch_does(ranks: RankPool, schedule: str) -> None:
    assert ranks(2, actions, wide(stages(2, schedule))) == orders(strategy(schedule, 2, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_goes_forward_and_back_once_through_each_run(schedule: str) -> None:
    asked = strategy(schedule)
    found = orders(asked)
    everything = list(product(range(asked.runs), range(asked.micro)))
    done = [action for mine in found for action in mine]
    assert len(set(done)) == len(done)
    for kinds in ("F", "BI", "BW"):
        assert sorted((a.run, a.micro) for a in done if a.kind in kinds) == everything
    assert all(asked.rank_of(action.run) == stage for stage, mine in enumerate(found) for action in mine)


@pytest.mark.parametrize(("count", "micro"), [(2, 4), (4, 4), (4, 8), (4, 16)])
def test_the_limits_of_equal_stages(count: int, micro: int) -> None:
    # GPipe and 1F1B: (p - 1) / (m + p - 1); interleaved with v runs a stage: (p - 1) / (v m + p - 1) (Narayanan et al. 2021)
    for schedule in ("gpipe", "1f1b"):
        assert limit(strategy(schedule, count, micro), [3.0] * count) == pytest.approx((count - 1) / (micro + count - 1))
    interleaved = limit(strategy("interleaved", count, micro), [3.0] * 2 * count)
    assert interleaved == pytest.approx((count - 1) / (2 * micro + count - 1))


def test_the_time_of_stages_that_take_10_and_20_ms() -> None:
    # (4 + 4 - 1) micro-batches of 30 ms
    times: dict[tuple[Kind, int], float] = {("F", run): 10.0 for run in range(4)} | {("B", run): 20.0 for run in range(4)}
    spans = simulate(orders(strategy("1f1b", 4, 4)), times)
    assert max(span.end for stage in spans for span in stage) == pytest.approx(210.0)
    assert bubble(spans) == pytest.approx(3 / 7)


def test_splitting_the_backward_leaves_less_bubble() -> None:
    bubbles = {schedule: limit(strategy(schedule), [3.0] * strategy(schedule).runs) for schedule in SCHEDULES}
    assert bubbles["1f1b"] > bubbles["zero_bubble"] > bubbles["zbv"]


def test_account_and_trace_of_two_stages() -> None:
    def clock(run: int, spans: list[tuple[Kind, float, float]], wall: float) -> dict[str, Any]:
        totals = {(kind, run): (end - start, 1) for kind, start, end in spans}
        listed = [(Action(kind, run, 0), start, end) for kind, start, end in spans]
        return {"spans": listed, "totals": totals, "wall": wall, "passes": 1}

    first, last = clock(0, [("F", 1.0, 2.0), ("B", 6.0, 8.0)], 7.0), clock(1, [("F", 3.0, 4.0), ("B", 4.0, 6.0)], 7.0)
    told = account(PipelineStrategy(stages=2, schedule="gpipe", micro_batches=1), [first, last])
    assert told is not None
    assert told["bubble"] == pytest.approx(1 - 6 / 14) and told["limit"] == pytest.approx(0.5)
    assert told["busy_s"] == [3.0, 3.0] and told["wait_s"] == [4.0, 4.0]
    trace = chrome_trace([first, last], ["stage 0", "stage 1"])
    bars = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert bars == [
        (0, "forward 0", 0, 1e6),
        (0, "backward 0", 5e6, 2e6),
        (1, "forward 0", 2e6, 1e6),
        (1, "backward 0", 3e6, 2e6),
    ]
    assert account(PipelineStrategy(stages=2), [first, {**last, "passes": 0}]) is None
