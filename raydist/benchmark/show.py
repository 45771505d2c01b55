"""The table of the benchmarks for a terminal, and their chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.benchmark.registry import Benchmark
from raydist.benchmark.verdicts import Verdict
from raydist.errors import RaydistError
from raydist.plain_table import aligned

HEADER = ("benchmark", "case", "ours", "theirs", "figure", "±", "bar", "", "others (unit)")


def text(verdicts: Sequence[Verdict], problems: Mapping[str, str], benchmarks: Sequence[Benchmark]) -> str:
    """Every row with its contenders' medians, the judged figure, half its range over the rounds, and the bar."""
    lines = aligned([HEADER, *(_cells(verdict) for verdict in verdicts)], indent="")
    notes = dict.fromkeys(f"{v.row.name}: {v.row.note}" for v in verdicts if v.row.note)
    lines += ["", *notes] if notes else []
    lines += ["", *(f"{name}: not measured: {why}" for name, why in problems.items())] if problems else []
    judged = [verdict for verdict in verdicts if verdict.row.judged]
    lines += ["", f"{sum(v.met for v in judged)} of {len(judged)} bars met; figures are medians of the rounds' own ratios"]
    return "\n".join(lines)


def _cells(verdict: Verdict) -> list[str]:
    row, bar = verdict.row, verdict.bar
    middle = {name: statistics.median(values) for name, values in row.values.items()}
    others = ", ".join(f"{name} {_short(value)}" for name, value in middle.items() if name not in (bar.ours, bar.against))
    theirs = f"{bar.against} {_short(middle[bar.against])}" if bar.against else ""
    figure = f"{verdict.figure:.3g}" if bar.kind == "value" else f"{verdict.figure:.2f} ×"
    if bar.kind != "value" and abs(verdict.figure - bar.bar) < 0.05:
        figure = f"{verdict.figure:.3f} ×"
    spread = f"{100 * verdict.spread:.0f} %" if len(verdict.rounds) > 1 else ""
    judged = ("met" if verdict.met else "missed") if row.judged else ""
    ours = f"{'' if bar.ours == 'raydist' else bar.ours + ' '}{_short(middle[bar.ours])}"
    limit = bar.words(bar.bar) if row.judged else ""
    return [row.bench, row.case, ours, theirs, figure, spread, limit, judged, f"{others} ({row.unit})".strip()]


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def figure_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Plotly JSON: every figure as a part of its bar, 1 being the bar; a shorter line is better throughout."""
    judged = [verdict for verdict in verdicts if verdict.row.judged][::-1]
    parts = [v.bar.bar / v.figure if v.bar.kind == "speed-up" else v.figure / v.bar.bar for v in judged]
    data = {
        "type": "bar",
        "orientation": "h",
        "x": parts,
        "y": [verdict.row.name for verdict in judged],
        "text": [f"{v.figure:.3g} (bar {v.bar.words(v.bar.bar)} {v.bar.against or ''})" for v in judged],
        "textposition": "auto",
        "marker": {"color": ["#2f9e6e" if verdict.met else "#d9730d" for verdict in judged]},
        "hovertext": [", ".join(f"{n} {_short(statistics.median(x))}" for n, x in v.row.values.items()) for v in judged],
    }
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": "#1b1f24", "dash": "dash"}}
    axis = {"title": {"text": "figure as a part of its bar (left of the line: met)"}, "rangemode": "tozero"}
    layout = {"shapes": [line], "xaxis": axis, "yaxis": {"automargin": True}, "height": 140 + 34 * len(judged)}
    return {"data": [data], "layout": layout}


def write_chart(verdicts: Sequence[Verdict], path: Path) -> tuple[list[Path], str]:
    """The chart as `path`, HTML, and a PNG beside it. Returns what was written, and in words why something was not."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        return [], "no chart: it is drawn with plotly (pip install 'raydist[report]')"
    from raydist.report.charts import Chart
    from raydist.report.pictures import write_pictures

    figure = figure_of(verdicts)
    title = "raydist bench"
    go.Figure(figure).update_layout(title=title).write_html(path, include_plotlyjs=True)
    try:
        (picture,) = write_pictures([Chart(title, "", figure["data"], figure["layout"])], path.parent)
    except RaydistError as error:
        return [path], f"no picture of the chart: {error}"
    return [path, picture.rename(path.with_suffix(".png"))], ""
