"""A sweep's space: what is refused, what is drawn, and the job that comes of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from raydist.config import JobConfig, parse_config
from raydist.errors import ConfigError
from raydist.sweep.space import Plan, check, job_of
from tests.support import lin_job


def job(space: dict[str, Any], changes: dict[str, Any] | None = None, **sweep: Any) -> JobConfig:
    data = lin_job([1.0, 2.0, 3.0, 1.0], 2, **(changes or {}))
    data["data"]["eval"] = {"target": "tests.support:line", "args": {"xs": [1.0]}}
    return parse_config({**data, "sweep": {"space": space, **sweep}}, "/nowhere")


def plan(space: dict[str, Any], changes: dict[str, Any] | None = None, **sweep: Any) -> Plan:
    return check(job(space, changes, **sweep))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"optimizer.lrr": {"uniform": [0, 1]}}, r"optimizer.lrr: names nothing in the job file; did you mean optimizer.lr\?"),
        ({"optimzer": {"lr": {"uniform": [0.1, 1]}}}, r"optimzer.lr: names nothing .*; did you mean optimizer\?"),
        ({"task.model.args.hiden": {"choice": [1]}}, r"task.model.args has no keys in the job file: write them there"),
        ({"data.train.args.x": {"choice": [[1.0]]}}, r"data.train.args.x: .*; did you mean data.train.args.xs\?"),
        ({"name": {"choice": ["a"]}}, r"name: it says where a trial is kept or how it runs, and cannot be swept"),
        ({"batch.global_size": {"choice": [2, 0]}}, r"batch.global_size=0 is no valid job\n.*= 0: allowed: an integer >= 1"),
        ({"optimizer.lr": {"uniform": [0, 1]}}, r"optimizer.lr=0 is no valid job"),
        ({"optimizer": {"choice": [{"nam": "adam"}]}}, r"optimizer.nam: names nothing"),
        ({"optimizer.lr": {"uniform": [2, 1]}}, r"sweep.space.optimizer.lr: uniform needs low < high, not \[2, 1\]"),
        ({"optimizer.lr": {"loguniform": [0, 1]}}, "loguniform needs low > 0"),
        ({"optimizer.lr": {"uniform": [1]}}, r"uniform takes \[low, high\], finite numbers"),
        ({"optimizer.lr": {"quniform": [1, 2, 0]}}, "quniform needs a step > 0"),
        ({"batch.global_size": {"randint": [1.5, 3]}}, "randint takes whole numbers"),
        ({"optimizer.lr": {"choice": []}}, "choice takes a non-empty list"),
        ({"optimizer.lr": {"choice": [1.0, 1.0]}}, "choice names an option twice"),
        ({"optimizer.lr": {"choice": [1.0], "uniform": [1, 2]}}, "one of .* alone is allowed"),
        ({"optimizer": {"choice": [{"lr": {"grid": [1.0]}}]}}, "grid is for the top of the space"),
        ({"optimizer": {"choice": [{"name": "adam"}]}, "optimizer.lr": {"uniform": [1, 2]}}, "drawn twice"),
    ],
)
def test_a_space_that_cannot_be_is_refused(space: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(space)


def test_a_metric_that_no_trial_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweep.metric = \"eval_los\": no such metric; did you mean eval_loss\?"):
        job({"seed": {"choice": [1]}}, metric="eval_los")
    with pytest.raises(ConfigError, match=r"sweep.metric = \"eval_loss\": eval_loss needs an evaluation"):
        job({"seed": {"choice": [1]}}, {"train__eval_every": None}, metric="eval_loss")


def test_a_job_without_a_sweep_says_what_one_looks_like() -> None:
    with pytest.raises(ConfigError, match="the job file has no sweep section; such as"):
        check(parse_config(lin_job([1.0], 1), "/nowhere"))


def test_a_grid_is_gone_through_once_in_order() -> None:
    space = {"optimizer.lr": {"grid": [0.1, 0.2, 0.3]}, "seed": {"choice": [5, 6]}}
    grid = plan(space, search="grid")
    assert grid.trials == 6
    expected = [{"optimizer.lr": lr, "seed": seed} for lr, seed in itertools.product([0.1, 0.2, 0.3], [5, 6])]
    assert [grid.settings(number) for number in range(6)] == expected
    assert plan(space, search="grid", samples=2).trials == 12
    assert plan(space, search="grid", samples=2, budget={"trials": 7}).trials == 7
    assert plan(space).trials == 3  # random: the grid once, the choice by chance


def test_random_draws_are_a_function_of_seed_and_number_and_fill_their_ranges() -> None:
    space = {
        "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
        "batch.global_size": {"randint": [1, 4]},
        "optimizer.momentum": {"quniform": [0.0, 0.9, 0.3]},
        "clip_grad_norm": {"uniform": [1, 2]},
        "seed": {"quniform": [0, 10, 5]},
    }
    one, same, other = plan(space, samples=300), plan(space, samples=300), plan(space, samples=300, seed=1)
    drawn = [one.settings(number) for number in range(300)]
    assert drawn == [same.settings(number) for number in range(300)]
    assert drawn != [other.settings(number) for number in range(300)]
    logs = [math.log10(settings["optimizer.lr"]) for settings in drawn]
    assert -4 <= min(logs) < -3.9 and -1.1 < max(logs) <= -1
    assert sum(log < -2.5 for log in logs) == pytest.approx(150, abs=40)  # half of them in the lower half of the decades
    assert {settings["batch.global_size"] for settings in drawn} == {1, 2, 3}
    assert {settings["optimizer.momentum"] for settings in drawn} == {0.0, 0.3, 0.6, 0.9}
    assert {settings["seed"] for settings in drawn} == {0, 5, 10}
    assert all(1 <= settings["clip_grad_norm"] <= 2 for settings in drawn)


def test_an_option_that_is_a_map_draws_its_own_keys() -> None:
    sgd = {"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}
    adam = {"name": "adam", "betas": {"choice": [[0.9, 0.99], [0.8, 0.9]]}}
    conditional = plan({"optimizer": {"choice": [sgd, adam]}}, samples=40)
    seen = [conditional.settings(number) for number in range(40)]
    assert {tuple(settings) for settings in seen} == {
        ("optimizer.name", "optimizer.momentum"),
        ("optimizer.name", "optimizer.betas"),
    }
    for settings in seen:
        made = job_of(conditional.config, conditional.sweep, settings, "t", "/s")
        assert (made.optimizer.name, made.optimizer.lr) == (settings["optimizer.name"], 0.1)


def test_an_option_with_a_target_takes_the_place_of_what_was_there() -> None:
    model = {"target": "raydist.models:MLP", "args": {"in_features": 1, "hidden": [3], "out_features": 1}}
    swapped = plan({"task.model": {"choice": [model]}})
    made = job_of(swapped.config, swapped.sweep, swapped.settings(0), "t", "/s")
    assert made.task.model is not None and made.task.model.target == "raydist.models:MLP"
    assert made.task.model.args == model["args"]


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_batch_size_moves_the_rate_only_when_asked(rule: str, factor: float) -> None:
    sized = plan({"batch.global_size": {"choice": [8]}, "optimizer.lr": {"choice": [0.3]}}, scale_lr=rule)
    made = job_of(sized.config, sized.sweep, sized.settings(0), "t", "/s")  # the job's own global batch is 2
    assert made.batch.global_size == 8 and made.optimizer.lr == pytest.approx(0.3 * factor)


def test_the_longest_trial_is_what_the_scheduler_says() -> None:
    epochs = plan({"seed": {"choice": [1]}}, {"train__max_steps": 99}, scheduler={"name": "asha", "max": 8})
    made = job_of(epochs.config, epochs.sweep, {}, "t", "/s")
    assert (made.train.epochs, made.train.max_steps) == (8, None)
    steps = plan({"seed": {"choice": [1]}}, scheduler={"name": "asha", "unit": "steps", "max": 5})
    made = job_of(steps.config, steps.sweep, {}, "t", "/s")
    assert (made.train.epochs, made.train.max_steps, made.sweep) == (None, 5, None)
    with pytest.raises(ConfigError, match=r"train.epochs is drawn, and sweep.scheduler.max says how long"):
        plan({"train.epochs": {"choice": [1, 2]}}, scheduler={"name": "asha", "max": 8})


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"budget": {"time": "two hours"}}, r"sweep.budget.time = \"two hours\": allowed: a finite number > 0"),
        ({"scheduler": {"name": "median", "reduction": 3}}, "not an option of median, which has unit, max, grace, min_trials"),
        ({"scheduler": {"name": "asha", "grace": 9, "max": 8}}, r"at most scheduler.max \(8\) is allowed"),
        ({"scheduler": "ahsa"}, r"did you mean asha\?"),
        ({"search": "optunna"}, r"did you mean optuna\?"),
        ({"search": "optuna", "scheduler": "pbt"}, "pbt changes the settings itself: use search: random or grid"),
        ({"search": "grid"}, "search: grid goes through lists"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job({"optimizer.lr": {"uniform": [0.1, 1]}}, **sweep)


def test_times_are_read_with_their_units() -> None:
    made = [job({"seed": {"choice": [1]}}, budget={"time": text}).sweep for text in ("90s", "30m", "2h", 5.0)]
    assert [sweep.budget.time for sweep in made if sweep] == [90, 1800, 7200, 5]
