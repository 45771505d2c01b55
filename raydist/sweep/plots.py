"""A sweep in charts: its history, its trials as parallel coordinates, which setting matters, and what failed. No ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raydist.report.charts import COLORS, Chart
from raydist.report.words import number
from raydist.sweep.importance import importance
from raydist.sweep.trials import Trial, Trials, read_trials

_STATES = {
    "finished": COLORS[0],
    "stopped": COLORS[1],
    "failed": COLORS[7],
    "running": COLORS[2],
    "pending": "#888888",
}
_WIDE = 30.0
"""A setting whose largest value is this many times its smallest is drawn on a logarithmic axis."""
_UNSET = "(unset)"


def figures(folder: str) -> list[Chart] | None:
    """The sweep's charts, for `raydist report`; None where the folder is no sweep's."""
    trials = read_trials(folder)
    if trials is None or not trials.rows:
        return None
    made = [history(trials), parallel(trials), importances(trials), outcomes(trials)]
    return [chart for chart in made if chart is not None]


def history(trials: Trials) -> Chart | None:
    """Each trial's metric in the order of the trials, and the best so far."""
    if not trials.scored:
        return None
    place = {id(row): at for at, row in enumerate(trials.rows, start=1)}
    traces: list[dict[str, Any]] = []
    for status in ("finished", "stopped"):
        rows = [row for row in trials.scored if row.status == status]
        if rows:
            trace = {"type": "scatter", "mode": "markers", "name": status, "marker": {"color": _STATES[status], "size": 9}}
            points = {"x": [place[id(row)] for row in rows], "y": [row.value for row in rows]}
            traces.append({**trace, **points, "text": [_hover(row) for row in rows]})
    x, y = _best_so_far(trials, place)
    line = {"color": COLORS[0], "width": 2, "shape": "hv"}
    traces.append({"type": "scatter", "mode": "lines", "name": "best so far", "x": x, "y": y, "line": line})
    layout = {"xaxis": {"title": {"text": "trial"}}, "yaxis": {"title": {"text": trials.metric}}}
    best = trials.best
    assert best is not None
    words = f"{trials.metric} of {len(trials.scored)} trials, in their order. Best: trial {best.name} with {number(best.value)}"
    settings = ", ".join(f"{key} {number(value)}" for key, value in best.settings.items())
    return Chart(f"trials: {trials.metric}", f"{words} ({settings}).", traces, layout, *_ranking(trials))


def _best_so_far(trials: Trials, place: dict[int, int]) -> tuple[list[int], list[float]]:
    finished = [row for row in trials.scored if row.status == "finished"] or trials.scored
    x: list[int] = []
    y: list[float] = []
    for row in finished:
        assert row.value is not None
        better = not y or trials.cost(row) < (-y[-1] if trials.mode == "max" else y[-1])
        x.append(place[id(row)])
        y.append(row.value if better else y[-1])
    return [*x, len(trials.rows)], [*y, y[-1]]


def _hover(row: Trial) -> str:
    settings = "<br>".join(f"{_plain(key)} {_plain(number(value))}" for key, value in row.settings.items())
    return f"trial {_plain(row.name)}<br>{settings}"


def _plain(text: str) -> str:
    """Without what plotly would read as markup."""
    return text.replace("<", "‹").replace(">", "›")


def _ranking(trials: Trials) -> tuple[list[str], list[list[str]]]:
    """Every trial, the best first, those without a number last."""
    facts = list(dict.fromkeys(key for row in trials.rows for key in row.facts))
    order = [*sorted(trials.scored, key=trials.cost), *(row for row in trials.rows if row not in trials.scored)]
    header = ["trial", "status", trials.metric, *trials.keys, *facts]
    return header, [
        [
            row.name,
            row.status,
            number(row.value),
            *(number(row.settings.get(key, _UNSET)) for key in trials.keys),
            *(row.facts.get(key, "") for key in facts),
        ]
        for row in order
    ]


# -- parallel coordinates ------------------------------------------------------------------------------------------------


def parallel(trials: Trials) -> Chart | None:
    """A line a trial through all settings to its metric."""
    rows = trials.scored
    if len(rows) < 2 or not trials.keys:
        return None
    dimensions = [_axis(key, [row.settings.get(key) for row in rows]) for key in trials.keys]
    values = [row.value for row in rows]
    dimensions.append(_axis(trials.metric, values, log=False))
    line = {"color": values, "colorscale": "Viridis", "reversescale": trials.mode == "min", "showscale": True}
    line["colorbar"] = {"title": {"text": trials.metric}}
    trace = {"type": "parcoords", "line": line, "dimensions": dimensions}
    layout = {"height": 440, "margin": {"l": 80, "r": 40, "t": 64, "b": 32}}
    best = "lowest" if trials.mode == "min" else "highest"
    words = (
        f"Each line is one of {len(rows)} trials and runs through its {', '.join(trials.keys)} to its {trials.metric}; "
        f"the {best} is the best. Drag along an axis to keep only the lines that pass there."
    )
    return Chart("settings and metric", words, [trace], layout)


def _axis(name: str, values: Sequence[Any], log: bool = True) -> dict[str, Any]:
    """A dimension of plotly's parcoords, which knows numbers only: words by position, wide ranges by logarithm."""
    there = [value for value in values if value is not None]
    if not all(isinstance(value, int | float) for value in there):
        words = sorted({_plain(str(_UNSET if value is None else value)) for value in values})
        at = [words.index(_plain(str(_UNSET if value is None else value))) for value in values]
        return {"label": name, "values": at, "tickvals": list(range(len(words))), "ticktext": words, **_range(at)}
    wide = log and min(there) > 0 and max(there) / min(there) >= _WIDE
    placed = [None if value is None else math.log10(value) if wide else float(value) for value in values]
    known = [value for value in placed if value is not None]
    low, high = min(known), max(known)
    ticks = {low + (high - low) * step / 4 for step in range(5)} if len(set(known)) > 6 else set(known)
    shown = [(tick, f"{10**tick if wide else tick:.3g}") for tick in sorted(ticks)]
    if len(known) < len(placed):
        below = low - 0.15 * ((high - low) or 1.0)
        shown.insert(0, (below, _UNSET))
        placed = [below if value is None else value for value in placed]
    dimension = {
        "label": name,
        "values": placed,
        "tickvals": [tick for tick, _ in shown],
        "ticktext": [text for _, text in shown],
    }
    return {**dimension, **_range([value for value in placed if value is not None])}


def _range(values: Sequence[float]) -> dict[str, Any]:
    """Room for an axis with one value only, which plotly would not draw."""
    return {"range": [values[0] - 1, values[0] + 1]} if len(set(values)) == 1 else {}


# -- importance and failures ---------------------------------------------------------------------------------------------


def importances(trials: Trials) -> Chart | None:
    """The share of the metric's variation that each setting explains."""
    found = importance(trials)
    if found is None:
        return None
    shares = sorted(found.shares.items(), key=lambda item: item[1])
    keys, values = [key for key, _ in shares], [share for _, share in shares]
    trace = {"type": "bar", "orientation": "h", "x": values, "y": keys, "marker": {"color": COLORS[0]}}
    layout = {
        "xaxis": {"title": {"text": f"share of the variation of {trials.metric}"}, "range": [0, 1]},
        "yaxis": {"automargin": True, "type": "category"},
        "height": 160 + 36 * len(keys),
    }
    said = ", ".join(f"{key} {share:.0%}" for key, share in reversed(shares))
    rough = " So few trials give a rough hint only." if found.trials < 3 * max(4, len(keys)) else ""
    left = (
        f" Left out, as some trials do not have it or all have the same: {', '.join(found.left_out)}." if found.left_out else ""
    )
    words = (
        f"How much each setting explains of {trials.metric}, by {found.how} over {found.trials} trials: {said}.{rough}{left}"
    )
    return Chart(
        "importance of the settings", words, [trace], layout, ["setting", "share"], [[k, f"{v:.3f}"] for k, v in shares]
    )


def outcomes(trials: Trials) -> Chart:
    """How many trials ended how; the table lists those that failed."""
    counts = Counter(row.status for row in trials.rows)
    states = [state for state in _STATES if counts[state]] + [state for state in counts if state not in _STATES]
    traces = [
        {"type": "bar", "orientation": "h", "name": state, "y": ["trials"], "x": [counts[state]]}
        | {"marker": {"color": _STATES.get(state, "#888888")}}
        for state in states
    ]
    failed = [row for row in trials.rows if row.status == "failed"]
    all_of = len(trials.rows)
    words = f"Of {all_of} trials: {', '.join(f'{counts[state]} {state}' for state in states)}."
    if failed:
        words = f"{len(failed)} of {all_of} failed. {words} " + "; ".join(
            f"trial {row.name}: {row.error}" for row in failed[:8]
        )
    layout = {"barmode": "stack", "height": 200, "xaxis": {"title": {"text": "trials"}}}
    header = ["trial", "error", *trials.keys]
    rows = [[row.name, row.error, *(number(row.settings.get(key, _UNSET)) for key in trials.keys)] for row in failed]
    return Chart("how the trials ended", words, traces, layout, header, rows)
