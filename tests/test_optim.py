"""Optimizers get their options; learning rates follow closed formulas in applied steps, and go on after a resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR

from raydist.config import OptimizerConfig, ScheduleConfig
from raydist.errors import ConfigError
from raydist.optim import Schedule, build_optimizer
from tests.support import lin_job, train_here


def parameters() -> list[nn.Parameter]:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return [nn.Parameter(torch.tensor([1.0, -2.0])), frozen]


def optimizer_of(**options: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig.model_validate({"lr": 0.1, **options}), parameters())


def descend(optimizer: torch.optim.Optimizer, steps: int = 5) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    for step in range(steps):
        parameter.grad = parameter.detach() * 2 + step
        optimizer.step()
    return parameter.detach()


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "own", "own_options"),
    [
        ({"name": "sgd"}, torch.optim.SGD, {}),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
        ({"name": "adam", "betas": [0.8, 0.9], "eps": 0.5}, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 0.5}),
        ({"name": "adamw", "weight_decay": 0.3}, torch.optim.AdamW, {"weight_decay": 0.3}),
        ({"name": "adamw"}, torch.optim.AdamW, {}),
        ({"target": "torch.optim:RMSprop", "args": {"alpha": 0.5}}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
    ids=str,
)
def test_an_optimizer_steps_as_torchs_own_with_these_options(
    options: dict[str, Any], own: type[torch.optim.Optimizer], own_options: dict[str, Any]
) -> None:
    built = optimizer_of(**options)
    assert type(built) is own and len(built.param_groups[0]["params"]) == 1
    plain = own(parameters()[:1], lr=0.1, **own_options)  # type: ignore[call-arg]
    torch.testing.assert_close(descend(built), descend(plain))


def test_fused_kernels_are_used_where_they_help_unless_refused() -> None:
    assert optimizer_of(name="adamw").param_groups[0]["fused"] is True
    assert optimizer_of(name="adamw", fused=False).param_groups[0]["fused"] is False
    whole = [nn.Parameter(torch.ones(1, dtype=torch.complex64))]
    assert build_optimizer(OptimizerConfig(name="adam", lr=0.1), whole).param_groups[0]["fused"] is False


class NoOptimizer:
    def __init__(self, params: Any, lr: float) -> None:
        pass


def test_an_optimizer_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="the model has no parameter that needs a gradient: there is nothing to train"):
        build_optimizer(OptimizerConfig(name="sgd", lr=0.1), parameters()[1:])
    with pytest.raises(
        ConfigError, match=r"optimizer.target: tests.test_optim:NoOptimizer made a NoOptimizer, not a torch.optim"
    ):
        optimizer_of(target="tests.test_optim:NoOptimizer")
    with pytest.raises(ConfigError, match=r"optimizer: torch.optim:SGD does not take these args.*'momentun'"):
        optimizer_of(target="torch.optim:SGD", args={"momentun": 0.9})
    with pytest.raises(
        ConfigError, match=r"optimizer: torch.optim:SGD refused its args: ValueError: Invalid momentum value: -1"
    ):
        optimizer_of(target="torch.optim:SGD", args={"momentum": -1})


# -- schedules --------------------------------------------------------------------------------------------------------

LR = 0.4


def sgd(lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def schedule_of(total: int | None = None, lr: float = LR, **settings: Any) -> Schedule:
    return Schedule(ScheduleConfig.model_validate(settings), sgd(lr), total)


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The rate of each of the next `steps` steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.lr)
        schedule.optimizer.step()
        schedule.step()
    return found


def warmed(t: int, warmup: int) -> float:
    return LR * (t + 1) / (warmup + 1)


def cosine(t: int, warmup: int, total: int, low: float) -> float:
    at = min(1.0, (t - warmup) / (total - warmup))
    return low + (LR - low) * 0.5 * (1 + math.cos(math.pi * at))


def linear(t: int, warmup: int, total: int, low: float) -> float:
    return LR + (low - LR) * min(1.0, (t - warmup) / (total - warmup))


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_named_schedules_follow_their_formula_after_a_linear_warm_up(warmup: int, low: float) -> None:
    total = 12
    curves = {
        "constant": lambda t: LR,
        "linear": lambda t: linear(t, warmup, total, low),
        "cosine": lambda t: cosine(t, warmup, total, low),
        "step": lambda t: LR * 0.5 ** ((t - warmup) // 3),
    }
    for name, curve in curves.items():
        own: dict[str, Any] = {"step_size": 3, "gamma": 0.5} if name == "step" else {}
        own |= {"min_lr": low} if name in ("linear", "cosine") else {}
        schedule = schedule_of(total, name=name, warmup_steps=warmup, **own)
        expected = [warmed(t, warmup) if t < warmup else curve(t) for t in range(15)]  # beyond the end it stays at the floor
        assert rates(schedule, 15) == pytest.approx(expected), name


def test_named_schedules_equal_torchs_own() -> None:
    for settings, own in [
        ({"name": "cosine", "min_lr": 0.1}, lambda o: CosineAnnealingLR(o, 10, eta_min=0.1)),
        ({"name": "linear", "min_lr": 0.1}, lambda o: LinearLR(o, 1.0, 0.25, 10)),
        ({"name": "step", "step_size": 4, "gamma": 0.3}, lambda o: StepLR(o, 4, 0.3)),
    ]:
        optimizer = sgd()
        scheduler, expected = own(optimizer), []
        for _ in range(10):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates(schedule_of(10, **settings), 10) == pytest.approx(expected)


def test_total_steps_of_the_schedule_wins_over_the_runs() -> None:
    assert rates(schedule_of(100, name="linear", total_steps=4), 6) == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
    with pytest.raises(
        ConfigError, match=r"schedule.name: cosine needs the run's length: set schedule.total_steps or train.max_steps"
    ):
        schedule_of(None, name="cosine")
    assert rates(schedule_of(None, name="cosine", warmup_steps=0, total_steps=2), 1) == [LR]


def test_a_plateau_lowers_the_rate_as_torchs_own_does() -> None:
    values = [5.0, 4.0, 4.1, 4.2, 4.3, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5]
    optimizer = sgd()
    own = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=2, min_lr=0.15)
    schedule = schedule_of(None, name="plateau", patience=2, factor=0.5, min_lr=0.15, metric="eval_loss")
    for value in values:
        own.step(value)
        schedule.step()
        schedule.observe({"eval_loss": value})
        assert schedule.lr == optimizer.param_groups[0]["lr"]
    assert schedule.lr == 0.15
    with pytest.raises(
        ConfigError, match=r"schedule.metric: 'eval_loss' is not measured; the evaluation gives eval_acc, eval_f1"
    ):
        schedule.observe({"eval_f1": 1.0, "eval_acc": 2.0})


def test_a_plateau_waits_for_the_warm_up() -> None:
    schedule = schedule_of(None, name="plateau", patience=0, factor=0.5, warmup_steps=3)
    found = []
    for _ in range(3):
        found.append(schedule.lr)
        schedule.observe({"eval_loss": 1.0})  # no progress, but the rate is still rising
        schedule.step()
    assert found == pytest.approx([0.1, 0.2, 0.3])
    schedule.observe({"eval_loss": 1.0})
    assert schedule.lr == pytest.approx(0.4)
    schedule.observe({"eval_loss": 1.0})
    schedule.step()
    assert schedule.lr == pytest.approx(0.2)


def test_a_schedule_by_import_path_starts_after_the_warm_up() -> None:
    plain = schedule_of(target="torch.optim.lr_scheduler:ExponentialLR", args={"gamma": 0.5})
    assert rates(plain, 4) == pytest.approx([0.4, 0.2, 0.1, 0.05])
    late = schedule_of(target="torch.optim.lr_scheduler:ExponentialLR", args={"gamma": 0.5}, warmup_steps=3)
    assert rates(late, 7) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 0.1, 0.05])


class NoScheduler:
    def __init__(self, optimizer: Any) -> None:
        pass


def test_a_schedule_that_cannot_be_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"schedule.target: use `name: plateau` instead, so that the metric it follows is known"
    ):
        schedule_of(target="torch.optim.lr_scheduler:ReduceLROnPlateau")
    with pytest.raises(ConfigError, match=r"schedule: torch.optim.lr_scheduler:StepLR does not take these args"):
        schedule_of(target="torch.optim.lr_scheduler:StepLR", args={"size": 3})
    with pytest.raises(
        ConfigError, match=r"schedule.target: tests.test_optim:NoScheduler made a NoScheduler, not a torch learning"
    ):
        schedule_of(target="tests.test_optim:NoScheduler")


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "constant", "warmup_steps": 8},
        {"name": "cosine", "warmup_steps": 2},
        {"name": "step", "step_size": 3},
        {"name": "plateau", "patience": 1, "factor": 0.5, "warmup_steps": 2},
        {"target": "torch.optim.lr_scheduler:ExponentialLR", "args": {"gamma": 0.9}, "warmup_steps": 3},
        {"target": "torch.optim.lr_scheduler:OneCycleLR", "args": {"max_lr": 1.0, "total_steps": 20}},
        {"target": "torch.optim.lr_scheduler:CyclicLR", "args": {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_schedule_goes_on_as_if_never_stopped(settings: dict[str, Any], stop: int) -> None:
    def walk(schedule: Schedule, first: int, last: int) -> list[float]:
        found = []
        for t in range(first, last):
            found += rates(schedule, 1)
            schedule.observe({"eval_loss": 1.0 if t > 4 else 10.0 - t})
        return found

    def with_momentum() -> Schedule:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR, momentum=0.9)
        return Schedule(ScheduleConfig.model_validate(settings), optimizer, 20)

    whole = walk(with_momentum(), 0, 14)
    first = with_momentum()
    assert walk(first, 0, stop) == whole[:stop]
    rest = with_momentum()
    rest.optimizer.load_state_dict(first.optimizer.state_dict())
    rest.load_state_dict(first.state_dict())
    assert walk(rest, stop, 14) == whole[stop:]


def test_onecycle_equals_torchs_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR, momentum=0.9)
    own = OneCycleLR(optimizer, max_lr=1.0, total_steps=8)
    expected = []
    for _ in range(7):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        own.step()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR, momentum=0.9)
    settings = {"target": "torch.optim.lr_scheduler:OneCycleLR", "args": {"max_lr": 1.0, "total_steps": 8}}
    assert rates(Schedule(ScheduleConfig.model_validate(settings), other, None), 7) == pytest.approx(expected)


def test_a_schedule_state_holds_plain_values_only() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        return (
            all(map(plain, value))
            if isinstance(value, (list, tuple))
            else value is None or isinstance(value, (bool, int, float, str))
        )

    for settings in (
        {"name": "cosine"},
        {"name": "plateau"},
        {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2}},
    ):
        assert plain(schedule_of(5, **settings).state_dict())


def test_a_resume_with_another_rate_or_length_follows_the_new_settings() -> None:
    first = schedule_of(10, name="linear")
    rates(first, 5)
    longer = schedule_of(20, name="linear", lr=0.8)
    longer.optimizer.load_state_dict(first.optimizer.state_dict())
    longer.load_state_dict(first.state_dict())
    assert rates(longer, 3) == pytest.approx([0.8 * (1 - t / 20) for t in (5, 6, 7)])


def test_the_rate_moves_with_the_steps_of_a_run() -> None:
    job = lin_job([1] * 6, 1, schedule={"name": "linear", "warmup_steps": 2}, train={"epochs": 1, "log_every": {"steps": 1}})
    # the line of step k shows the rate after it, which is the rate of step k + 1
    expected = [0.1 * 2 / 3, 0.1, 0.075, 0.05, 0.025, 0.0]
    assert [line["lr"] for line in train_here(job)["lines"]] == pytest.approx(expected)
