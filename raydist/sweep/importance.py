"""Which settings of a sweep matter: Optuna's fANOVA, or PED-ANOVA where scikit-learn is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from raydist.sweep.trials import Trials

FEWEST = 4
"""Trials below which nothing is said."""
_WIDE = 30.0


@dataclass(frozen=True)
class Importance:
    """Shares by setting, which add up to 1; how they were found, over how many trials, and the settings left out."""

    shares: dict[str, float]
    how: str
    trials: int
    left_out: list[str]


def importance(trials: Trials) -> Importance | None:
    """None without Optuna, with fewer than four trials, or where nothing varies.

    fANOVA (Hutter, Hoos & Leyton-Brown 2014) fits a forest to the trials and splits its variance; PED-ANOVA (Watanabe, Bansal &
    Hutter 2023) compares the best trials with the rest.
    """
    rows = trials.scored
    if len(rows) < FEWEST or find_spec("optuna") is None or len({row.value for row in rows}) < 2:
        return None
    columns = {key: [row.settings.get(key) for row in rows] for key in trials.keys}
    kept = {key: values for key, values in columns.items() if None not in values and len(set(values)) > 1}
    if not kept:
        return None
    import optuna

    forest = find_spec("sklearn") is not None
    with _quiet(optuna):
        study = optuna.create_study(direction="maximize" if trials.mode == "max" else "minimize")
        spaces = {key: _space(values) for key, values in kept.items()}
        for at, row in enumerate(rows):
            params = {key: _param(values[at], spaces[key]) for key, values in kept.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=row.value))
        kind = optuna.importance
        judge = kind.FanovaImportanceEvaluator(seed=0) if forest else kind.PedAnovaImportanceEvaluator()
        found = kind.get_param_importances(study, evaluator=judge)
    shares = {key: float(share) for key, share in found.items()}
    left_out = [key for key in trials.keys if key not in kept]
    return Importance(shares, "Optuna's fANOVA" if forest else "Optuna's PED-ANOVA", len(rows), left_out)


def _space(values: list[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if all(isinstance(value, int | float) for value in values):
        low, high = float(min(values)), float(max(values))
        return FloatDistribution(low, high, log=low > 0 and high / low >= _WIDE)
    return CategoricalDistribution(sorted({str(value) for value in values}))


def _param(value: Any, space: Any) -> Any:
    return str(value) if hasattr(space, "choices") else float(value)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without Optuna's line about a new study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
