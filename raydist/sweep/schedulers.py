"""Ray Tune's schedulers as the job file asks for them, brought to where an interrupted sweep was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from raydist.config_sweep import Options, Range, Tree
from raydist.errors import ConfigError
from raydist.sweep.journal import Journal
from raydist.sweep.search import tune_space
from raydist.sweep.space import Plan, name_of

_RUNNING = ("optimizer.", "clip_grad_norm")
_FIXED = ("optimizer.name", "optimizer.target", "optimizer.args", "optimizer.fused")


@dataclass(frozen=True)
class Past:
    """Stands for a trial of an earlier invocation; for the schedulers a trial is its id."""

    trial_id: str


class Median(MedianStoppingRule):
    """Ray Tune's median rule, which knows trials of an earlier invocation by their id, and pauses none."""

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return str(TrialScheduler.CONTINUE)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """As Ray Tune's. A trial that went back to its checkpoint is judged again only where it has not been yet."""
        past: Any = Past(trial.trial_id)
        if past in self._stopped_trials:
            return str(TrialScheduler.STOP)
        if self._told(past, result):
            return str(TrialScheduler.CONTINUE)
        return str(super().on_trial_result(tune_controller, past, result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Keep the last result, which is not judged; one that was would move the mean if it counted twice."""
        past: Any = Past(trial.trial_id)
        if self._metric in result and not self._told(past, result):
            self._results[past].append(result)

    def _told(self, past: Any, result: dict[str, Any]) -> bool:
        """Whether the trial has been there before."""
        seen = self._results.get(past)
        return seen is not None and bool(result[self._time_attr] <= seen[-1][self._time_attr])

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Nothing to forget."""


def scheduler_of(plan: Plan, journal: Journal, longest: int) -> TrialScheduler:
    """The scheduler. `longest` is a trial's length in its unit. Raises ConfigError."""
    asked, sweep = plan.sweep.scheduler, plan.sweep
    compared: dict[str, Any] = {"metric": sweep.metric, "mode": sweep.mode, "time_attr": asked.unit}
    if asked.name == "none":
        return FIFOScheduler()
    if asked.name == "pbt":
        mutations = mutations_of(plan)
        return PopulationBasedTraining(
            **compared,
            perturbation_interval=asked.interval,
            quantile_fraction=asked.quantile,
            resample_probability=asked.resample,
            hyperparam_mutations=mutations,
            log_config=False,
        )
    if asked.name == "asha":
        made: TrialScheduler = AsyncHyperBandScheduler(
            **compared, max_t=longest + 1, grace_period=asked.grace, reduction_factor=asked.reduction
        )  # a trial ends by itself at `longest`; one more, so that its last report is not taken for a stop
    else:
        made = Median(**compared, grace_period=asked.grace, min_samples_required=asked.min_trials, hard_stop=True)
    _replay(made, journal, sweep.metric)
    return made


def mutations_of(plan: Plan) -> dict[str, Any]:
    """What PBT may change in a running trial, in Ray Tune's words. Raises ConfigError."""
    tree, asked = plan.tree, plan.sweep.scheduler.mutate
    drawn = {".".join(key): node for key, node in tree.nodes if isinstance(node, Range | Options)}
    able = [key for key in drawn if key.startswith(_RUNNING) and not key.startswith(_FIXED)]
    wrong = [key for key in asked or () if key not in able]
    if wrong or not able:
        raise ConfigError(
            f"sweep.scheduler.mutate: {', '.join(wrong) or 'nothing in the space'} can be changed while a trial runs. Keys of "
            f"the space under optimizer (but {', '.join(_FIXED)}) and clip_grad_norm can: {', '.join(able) or 'add one'}"
        )
    kept = {key: drawn[key] for key in asked or able}
    lists = {key: list(node.options) for key, node in kept.items() if isinstance(node, Options)}
    ranges = tuple((tuple(key.split(".")), node) for key, node in kept.items() if isinstance(node, Range))
    return {**lists, **tune_space(Tree(ranges))}


def _replay(scheduler: TrialScheduler, journal: Journal, metric: str) -> None:
    """Tell a new scheduler all reports of the journal, in order; trials that go on stay known."""
    known: set[int] = set()
    nobody: Any = None
    for record in journal.records:
        number = int(record["trial"])
        if record["kind"] == "begin":
            known.add(number)
        if record["kind"] != "report":
            continue
        row = dict(record["row"])
        row[metric] = math.nan if row.get(metric) is None else row[metric]
        past: Any = Past(name_of(number))
        if number in known or row.get("ended"):
            scheduler.on_trial_add(nobody, past)
            known.discard(number)
        if row.get("ended"):
            scheduler.on_trial_complete(nobody, past, row)
        else:
            scheduler.on_trial_result(nobody, past, row)
