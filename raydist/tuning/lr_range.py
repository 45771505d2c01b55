"""The learning-rate range test: raise the rate exponentially, step by step, and see where the loss falls fastest.

Smith 2015, "Cyclical Learning Rates for Training Neural Networks", section 3.3, with the exponential growth, the smoothed loss
and the stop at four times the best of fastai's and Lightning's `lr_find`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LambdaLR

from raydist.batching import padded_share
from raydist.control import Control
from raydist.errors import ConfigError, TrainError
from raydist.tuning.trial import results, short_job, two_digits
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig

FEWEST_STEPS = 20
DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times its best."""
_BETA = 0.9
"""Weight of the past in the smoothed loss."""
_SKIP = 0.05
"""Share of the steps at the start whose slope is not looked at: noise and first contact."""


@dataclass
class RangeTest:
    """What the test saw: rates and losses by step, the smoothed loss, why it ended, and what follows from it.

    `steepest` is the rate where the loss falls fastest in the logarithm of the rate, `tenth` a tenth of the rate with the
    lowest loss; both None when the loss did not fall.
    """

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    ended: str = ""
    diverged: bool = False
    steepest: float | None = None
    tenth: float | None = None


def exponential(optimizer: torch.optim.Optimizer, ratio: float, steps: int) -> LambdaLR:
    """A schedule from the optimizer's own rate to `ratio` times that, reached in step `steps`."""
    return LambdaLR(optimizer, lambda step: ratio ** (step / (steps - 1)))


def range_test(config: JobConfig, world: World, low: float, high: float, steps: int) -> RangeTest:
    """Train `steps` steps from scratch, the rate growing from `low` to `high`. Every rank must call it.

    The batches are the job's, at its global batch size. Ends early when the loss diverges. Raises ConfigError for a range that
    is none, DataError without data, TrainError when the loss is not finite from the first step on.
    """
    _check(low, high, steps)
    schedule = {"target": "raydist.tuning.lr_range:exponential", "args": {"ratio": high / low, "steps": steps}}
    job = short_job(config, steps, {"optimizer": {"lr": low}, "schedule": schedule})
    control = Control(micro_size=padded_share(config.batch.global_size, max(config.workers[1], world.world_size)))
    test, best = RangeTest(), math.inf
    running = results(job, world, control)
    for result in running:
        bad = world.broadcast(next((e["reason"] for e in control.take() if e["kind"] == "bad_step"), None))
        lr = low * (high / low) ** ((result.step - result.metrics["skipped"] - 1) / (steps - 1))
        if bad is not None:
            if not test.losses:
                raise TrainError(f"the loss is not finite from the first step on, at a learning rate of {low:g}: {bad}")
            test.ended, test.diverged = f"the loss was not finite in step {result.step}", True
            break
        loss = result.metrics["train_loss"]
        if loss is None:  # fp16's scaler skipped the step to find its scale
            continue
        test.lrs.append(lr)
        test.losses.append(loss)
        test.smoothed.append(float(ema(np.array(test.losses))[-1]))
        best = min(best, test.smoothed[-1])
        if test.smoothed[-1] > best + (DIVERGED - 1) * abs(best):
            test.ended, test.diverged = f"the smoothed loss was {DIVERGED:g} times its best in step {result.step}", True
            break
    running.close()
    if not test.losses:
        raise TrainError(f"none of {steps} steps was applied: fp16's scaler skipped them all; give more --steps")
    test.ended = test.ended or f"step {steps} of {steps} was reached"
    test.steepest, test.tenth = suggest(test.lrs, test.losses)
    return test


def _check(low: float, high: float, steps: int) -> None:
    problems = []
    if not (math.isfinite(low) and low > 0):
        problems.append(f"--low {low:g} is no learning rate: give a number above 0")
    if not (math.isfinite(high) and high > 0):
        problems.append(f"--high {high:g} is no learning rate: give a number above 0")
    if not problems and low >= high:
        problems.append(f"the range is backwards: --low {low:g} must be below --high {high:g}")
    if steps < FEWEST_STEPS:
        problems.append(f"--steps {steps} are too few for a curve: at least {FEWEST_STEPS}")
    if problems:
        raise ConfigError("; ".join(problems))


def ema(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The exponential moving average, corrected for its start (Kingma & Ba 2015, section 3)."""
    mean, out = 0.0, np.empty(len(values))
    for at, value in enumerate(values):
        mean = _BETA * mean + (1 - _BETA) * value
        out[at] = mean / (1 - _BETA ** (at + 1))
    return out


def both_ways(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smoothed forwards and backwards: the plain average lags by about ten steps, most of a decade, to the right."""
    return (ema(values) + ema(values[::-1])[::-1]) / 2


def suggest(lrs: Sequence[float], losses: Sequence[float]) -> tuple[float | None, float | None]:
    """`(steepest, tenth)` of a curve, each with two digits; None twice when the loss did not fall beyond its noise."""
    rates, raw = np.log(np.array(lrs)), np.array(losses)
    end = int(np.argmin(ema(raw))) + 1  # what comes after the lowest loss would pull the smoothed curve up before it
    first = max(1, round(_SKIP * len(raw)))
    if end < first + 3:
        return None, None
    smooth = both_ways(raw[:end])
    noise = float(np.std(np.diff(raw[:end]))) / math.sqrt(2)  # from neighbours, which hardly know of the fall
    if smooth[0] - smooth.min() <= max(3 * noise, 1e-3 * abs(float(smooth[0]))):
        return None, None
    slopes = np.gradient(smooth, rates[:end])
    steepest = first + int(np.argmin(slopes[first:]))
    return two_digits(float(lrs[steepest])), two_digits(float(lrs[int(np.argmin(smooth))]) / 10)
