"""Rows against their bars, and against a baseline: figures are ratios, so another machine's baseline says something too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.benchmark.registry import bar_of
from raydist.benchmark.rows import Bar, Row, each_round, figure, spread
from raydist.errors import ConfigError

SLACK = 0.15
"""How much worse than the baseline a figure may be, in parts of it, where the baseline says nothing else."""


@dataclass(frozen=True)
class Verdict:
    """A judged row: its figure, that of each round, half their range, and whether the bar is met."""

    row: Row
    bar: Bar
    figure: float
    rounds: list[float]
    spread: float
    met: bool

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        judged = {"kind": self.bar.kind, "against": self.bar.against, "bar": self.bar.bar, "aim": self.bar.aim}
        found = {"figure": self.figure, "each_round": self.rounds, "spread": self.spread, "met": self.met}
        return {**self.row.plain(), **judged, **found}


def judge(row: Row) -> Verdict:
    """A row against its benchmark's bar."""
    bar = bar_of(row.bench)
    rounds, middle = each_round(row, bar), figure(row, bar)
    return Verdict(row, bar, middle, rounds, spread(rounds), bar.met(middle))


def regressions(verdicts: Sequence[Verdict], baseline: Mapping[str, Any]) -> list[str]:
    """In words, each figure that is worse than the baseline's by more than its slack. Rows without a baseline are left out.

    `baseline` is `{"figures": {"step/digits_cnn": 1.01, …}, "slack": {"start": 0.3, …}}`.
    """
    figures, slacks = baseline["figures"], baseline.get("slack", {})
    found = []
    for verdict in verdicts:
        before = figures.get(verdict.row.name)
        if before is None or not verdict.row.judged:
            continue
        slack = slacks.get(verdict.row.name, slacks.get(verdict.row.bench, SLACK))
        higher = verdict.bar.kind == "speed-up"
        limit = before * (1 - slack) if higher else before * (1 + slack)
        if verdict.figure < limit if higher else verdict.figure > limit:
            found.append(
                f"{verdict.row.name}: {verdict.figure:.3g}, and the baseline has {before:.3g} "
                f"(at {'least' if higher else 'most'} {limit:.3g} is allowed)"
            )
    return found


def check_baseline(baseline: Any, where: str) -> dict[str, Any]:
    """`baseline` if it is one; ConfigError otherwise."""
    numbers = (int, float)
    if not isinstance(baseline, dict) or not isinstance(baseline.get("figures"), dict):
        raise ConfigError(f'{where}: no baseline of benchmarks: it needs {{"figures": {{"step/digits_cnn": 1.0, …}}}}')
    for part in ("figures", "slack"):
        wrong = {name: value for name, value in baseline.get(part, {}).items() if not isinstance(value, numbers)}
        if wrong:
            raise ConfigError(f"{where}: {part} must be numbers, and there is {wrong}")
    return baseline


def new_baseline(verdicts: Sequence[Verdict], before: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with the figures of these rows."""
    figures = {**before.get("figures", {}), **{v.row.name: round(v.figure, 4) for v in verdicts if v.row.judged}}
    return {"figures": figures, "slack": before.get("slack", {})}
