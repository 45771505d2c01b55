"""What a sweep decides without a cluster: who is stopped, when the budget ends, when a slot has grown, what is shown."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raydist.config import parse_config
from raydist.errors import ConfigError, TrainError
from raydist.runners.cluster import Cluster
from raydist.screen import Screen
from raydist.sweep.journal import Journal
from raydist.sweep.run import Sweep, _tell
from raydist.sweep.schedulers import Median, Past, scheduler_of
from raydist.sweep.slot import has_grown
from raydist.sweep.space import Plan, check
from raydist.sweep.table import Board, line_of, result
from tests.support import lin_job
from tests.sweep.test_space import job

NOBODY: Any = None


def plan(**sweep: Any) -> Plan:
    return check(job({"optimizer.lr": {"uniform": [0.1, 1.0]}}, **sweep))


def under_way(tmp_path: Path, **sweep: Any) -> Sweep:
    made = plan(**sweep)
    return Sweep(made, str(tmp_path), Journal(str(tmp_path), "eval_loss", "min"), Screen(stream=io.StringIO()))


def row(epochs: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"epochs": epochs, "steps": 4 * epochs, "rows": 8 * epochs, "eval_loss": loss, **more}


# -- median ----------------------------------------------------------------------------------------------------------


def told(scheduler: Any, number: int, epochs: int, loss: float) -> str:
    return str(scheduler.on_trial_result(NOBODY, Past(f"{number:05d}"), row(epochs, loss)))


def test_the_median_rule_stops_whose_best_is_worse_than_the_median_of_the_others_means(tmp_path: Path) -> None:
    """Means of the others up to epoch 2: (4 + 2) / 2 = 3, (6 + 4) / 2 = 5 and (9 + 9) / 2 = 9, so their median is 5."""
    asked = {"name": "median", "grace": 1, "min_trials": 3}
    median = scheduler_of(plan(scheduler=asked), Journal(str(tmp_path), "eval_loss", "min"), 4)
    for number, losses in enumerate([(4.0, 2.0), (6.0, 4.0), (9.0, 9.0)]):
        assert told(median, number, 1, losses[0]) == told(median, number, 2, losses[1]) == "CONTINUE"  # too few to compare
    assert told(median, 3, 2, 4.9) == "CONTINUE"
    assert told(median, 4, 2, 5.1) == "STOP"  # of 3, 5, 9 and 4.9 the median is 4.95
    assert told(median, 4, 3, 0.1) == "STOP"  # and stays stopped


def test_the_median_rule_counts_a_last_result_once_and_one_repeated_after_a_restart_never() -> None:
    median = Median(metric="eval_loss", mode="min", time_attr="epochs", grace_period=1, min_samples_required=1)
    for epochs, loss in [(1, 1.0), (2, 1.0), (1, 50.0), (2, 50.0)]:  # back to its start, and there again
        told(median, 0, epochs, loss)
    for _ in range(2):
        median.on_trial_complete(NOBODY, Past("00000"), row(3, 4.0))  # type: ignore[arg-type]
    assert told(median, 1, 3, 1.9) == "CONTINUE"  # the mean is (1 + 1 + 4) / 3 = 2
    assert told(median, 2, 3, 2.1) == "STOP"


@pytest.mark.parametrize("name", ["median", "asha"])
def test_a_scheduler_that_is_told_a_journal_decides_as_the_one_that_was_there(tmp_path: Path, name: str) -> None:
    extra = {"min_trials": 1} if name == "median" else {"reduction": 2}
    asked = plan(scheduler={"name": name, "grace": 1, "max": 4, **extra})
    journal = Journal(str(tmp_path), "eval_loss", "min")
    for number, losses in enumerate([(3.0, 2.0, 1.0, 1.0), (None,), (2.0, 2.0)]):
        journal.begin(number, {"optimizer.lr": 0.1})
        for epochs, loss in enumerate(losses, start=1):
            journal.report(number, row(epochs, loss, ended=epochs == 4 or loss is None))
    journal.report(0, row(4, 1.0, ended=True))  # killed just before it was noted as finished, and there again
    journal.write(lambda _: asked.config)
    scheduler = scheduler_of(asked, Journal(str(tmp_path), "eval_loss", "min"), 4)
    decisions = []
    for number, loss in ((3, 1.9), (4, 9.0)):
        scheduler.on_trial_add(NOBODY, Past(f"{number:05d}"))  # type: ignore[arg-type]
        decisions.append(told(scheduler, number, 1, loss))
    assert decisions == ["CONTINUE", "STOP"]


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_budgets_of_time_and_worker_hours_go_on_counting_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sweep = under_way(tmp_path, budget={"time": "1h", "worker_hours": 3.0})
    now[0] += 3000
    sweep.journal.hours += 2.0
    sweep.journal.begin(0, {"optimizer.lr": 0.1})
    sweep.journal.write(lambda _: sweep.config)
    assert not sweep.spent()
    now[0] += 10_000  # nobody ran it
    again = under_way(tmp_path, budget={"time": "1h", "worker_hours": 3.0})
    assert (again.journal.seconds(), again.journal.hours) == (3000, 2.0)
    now[0] += 599
    assert not again.spent()
    again.journal.hours = 3.0
    assert again.spent()
    again.journal.hours = 0.0
    now[0] += 1
    assert again.spent()


def test_a_budget_that_ends_before_anything_was_evaluated_says_so(tmp_path: Path) -> None:
    sweep = under_way(tmp_path, samples=4, budget={"worker_hours": 1.0})
    sweep.journal.begin(0, {"optimizer.lr": 0.1})
    sweep.journal.hours = 1.5
    with pytest.raises(TrainError, match=r"used up with 0 of 4 trials done and none evaluated; --resume with a larger"):
        _tell(sweep)


# -- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_has_grown_when_any_of_its_ranks_holds_more_than_the_limit_beyond_its_first_trial() -> None:
    assert not has_grown([], [])
    assert not has_grown([400.0, 500.0], [912.0, 1012.0])
    assert has_grown([400.0, 500.0], [400.0, 1013.0])
    assert has_grown([10.0], [12.0], limit=1.0)
    assert not has_grown([900.0], [100.0])


def test_three_workers_on_two_cpus_are_refused_with_both_numbers() -> None:
    config = parse_config(lin_job([1.0], 3, scaling={"workers": 3}), "/nowhere")
    with pytest.raises(ConfigError, match=r"3 workers need 3 CPU, and the cluster has 2 CPU"):
        Cluster({"CPU": 2.0}, owned=True).fit_workers(config)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_live_table_shows_the_best_those_that_run_counts_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sweep = under_way(tmp_path, samples=6)
    sweep.began = now[0]
    journal, board = sweep.journal, Board(sweep)
    for number, loss in enumerate([0.5, 0.25, None, 0.125]):
        journal.begin(number, {"optimizer.lr": 0.5 + number})
        journal.report(number, row(2, loss))
    journal.end(0, "finished")
    journal.end(1, "finished")
    journal.end(2, "failed", "step 3: loss is nan")
    now[0] = 60.0
    assert board.title() == "lin: 3/6 done, 1 running, 1 failed, eta 01:00"
    out = io.StringIO()
    Console(file=out, width=100).print(board.table())
    lines = [" ".join(line.replace("│", " ").split()) for line in out.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("0000")] == [
        "00001 * finished 0.25 8 1.5",
        "00003 running 0.125 8 3.5",
        "00002 failed 8 2.5",
        "00000 finished 0.5 8 0.5",
    ]
    assert line_of(journal.rows[2], "eval_loss") == "trial 00002 failed at step 8: step 3: loss is nan  (optimizer.lr 2.5)"
    said = result(journal)
    assert "1 of 4 failed" in said and "  trial 00002: step 3: loss is nan" in said
    assert said[-1].startswith("best: trial 00001 with eval_loss 0.25; raydist train ")
