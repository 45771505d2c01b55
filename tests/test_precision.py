"""Mixed precision: autocast, one unscaled and clipped global norm, a scaler that learns and is remembered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from raydist.config import Precision as PrecisionConfig
from raydist.precision import Precision, total_norm

CPU = torch.device("cpu")


def precision(name: str, **settings: Any) -> Precision:
    return Precision(PrecisionConfig.model_validate({"name": name, **settings}), CPU)


def problem() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_runs_in_the_precision_asked_for(name: str, dtype: torch.dtype) -> None:
    model, _, x = problem()
    with precision(name).forward():
        assert model(x).dtype == dtype
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_step_equals_the_recipe_of_torch(name: str, clip: float | None) -> None:
    model, optimizer, x = problem()
    ours = precision(name) if name != "fp16" else precision(name, init_scale=1024.0)
    with ours.forward():
        loss = model(x).pow(2).mean()
    ours.backward(loss)
    norm = ours.gradient_norm(optimizer, clip)
    ours.step(optimizer, apply=True)

    other, other_optimizer, _ = problem()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=name == "fp16")
    with torch.autocast("cpu", torch.float16 if name == "fp16" else torch.bfloat16, enabled=name != "fp32"):
        loss = other(x).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(other_optimizer)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), math.inf if clip is None else clip)
    scaler.step(other_optimizer)
    scaler.update()

    assert norm == pytest.approx(float(expected), rel=1e-5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_norm_is_global_and_in_float64() -> None:
    grads = [torch.full((10,), 3.0), torch.full((1,), 4.0, dtype=torch.bfloat16)]
    assert total_norm(grads, CPU) == pytest.approx(math.sqrt(10 * 9 + 16), rel=1e-6)
    assert total_norm([], CPU) == 0.0
    assert math.isinf(total_norm([torch.tensor([math.inf])], CPU))
    assert math.isnan(total_norm([torch.tensor([math.nan]), torch.ones(1)], CPU))


def test_clipping_scales_to_the_norm_and_leaves_smaller_and_broken_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for gradient, after in [([3.0, 4.0], [0.3, 0.4]), ([0.03, 0.04], [0.03, 0.04]), ([math.inf, 1.0], [math.inf, 1.0])]:
        parameter.grad = torch.tensor(gradient)
        assert precision("fp32").gradient_norm(optimizer, 0.5) == pytest.approx(math.hypot(*gradient))
        assert parameter.grad.tolist() == pytest.approx(after)


def step(ours: Precision, gradient: float) -> None:
    """One optimizer step whose unscaled gradient is `gradient`."""
    assert ours.scaler is not None
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    ours.backward((parameter * gradient).sum())
    norm = ours.gradient_norm(optimizer, None)
    ours.step(optimizer, apply=math.isfinite(norm))
    assert float(parameter.detach()) == (-gradient if math.isfinite(norm) else 0.0)


def test_the_scale_falls_after_an_overflow_and_rises_after_good_steps_and_survives_a_resume() -> None:
    settings = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    ours, found = precision("fp16", **settings), []
    for gradient in (1.0, 1.0, math.inf, 1.0):
        step(ours, gradient)
        found.append(ours.scale)
    assert found == [64.0, 256.0, 64.0, 64.0]
    other = precision("fp16", **settings)
    other.load_state_dict(ours.state_dict())
    step(other, 1.0)  # the second good step in a row
    assert other.scale == 256.0


def test_only_fp16_has_a_scaler() -> None:
    for name in ("fp32", "bf16"):
        ours = precision(name)
        assert (ours.scaler, ours.scale, ours.state_dict()) == (None, None, None)
        ours.load_state_dict({"scale": 2.0})  # of a run that was fp16 before
    fp16 = precision("fp16")
    fp16.load_state_dict(None)  # of a run that was not
    assert fp16.scale == 65536.0
