"""One HTML page that needs nothing else: no network, no fonts, no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from raydist import __version__
from raydist.errors import ConfigError
from raydist.jsonl import plain
from raydist.report.charts import Chart
from raydist.report.reading import Run, differences
from raydist.report.words import duration, number


def page(title: str, runs: Sequence[Run], labels: Sequence[str], charts: Sequence[Chart], notes: Sequence[str] = ()) -> str:
    """The whole page. Everything from the runs is escaped; scripts are the page's own and plotly.js."""
    body = [
        f"<header><h1>{escape(title)}</h1><p>raydist {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p></header>",
        "<main>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        *([_section("Runs", _table("runs", ["run", *_FACTS], _facts(runs, labels), wide=True))] if runs else []),
        *(_figure(number, chart) for number, chart in enumerate(charts)),
    ]
    if len(runs) > 1:
        body.append(_section("Settings that differ", _differences(runs, labels)))
    body += [_settings(run, label) for run, label in zip(runs[:4], labels, strict=False)]
    body.append("</main>")
    figures = [{"data": chart.data, "layout": chart.layout} for chart in charts]
    return _asset("page.html").format_map(
        _Slots(
            title=escape(title),
            style=_asset("page.css"),
            body="\n".join(body),
            figures=_for_script(figures),
            plotly=plotly_js(),
            script=_asset("page.js"),
        )
    )


class _Slots(dict[str, str]):
    """Values of the page's slots; a missing one is our own mistake."""


def _asset(name: str) -> str:
    return (resources.files("raydist.report") / name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """The drawing library's source. Raises ConfigError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("raydist report draws with plotly, which is not installed: pip install 'raydist[report]'") from error
    return str(get_plotlyjs())


def _for_script(value: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(plain(value), allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _figure(at: int, chart: Chart) -> str:
    table = ""
    if chart.rows:
        inside = _table(chart.title, chart.header, chart.rows, wide=True)
        table = f"<details><summary>The numbers: {escape(chart.title)}</summary>{inside}</details>"
    return (
        f'<section><h2 id="h{at}">{escape(chart.title)}</h2><figure aria-labelledby="h{at}">'
        f'<div class="chart" id="chart-{at}" role="img" aria-label="{escape(chart.words)}"></div>'
        f"<figcaption>{escape(chart.words)}</figcaption></figure>{table}</section>"
    )


def _table(name: str, header: Sequence[str], rows: Iterable[Sequence[str]], wide: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll" role="region" tabindex="0" aria-label="table: {escape(name)}">{table}</div>' if wide else table


_FACTS = ("status", "steps", "skipped", "rows seen", "results", "workers", "restarts", "steps done twice", "time", "slow rank")


def _facts(runs: Sequence[Run], labels: Sequence[str]) -> list[list[str]]:
    rows = []
    for run, label in zip(runs, labels, strict=True):
        summary = run.summary or {}
        last = run.lines[-1] if run.lines else {}
        results = summary.get("metrics") or {k: v for k, v in last.items() if k.startswith(("eval_", "train_"))}
        slow = summary.get("slow_rank")
        reason = f" ({summary['reason']})" if summary.get("reason") else ""
        rows.append(
            [
                label,
                f"{run.status}{reason}",
                str(summary.get("steps", last.get("step", 0))),
                str(summary.get("skipped", last.get("skipped", 0))),
                str(summary.get("rows_seen", last.get("rows_seen", 0))),
                ", ".join(f"{key} {number(value)}" for key, value in results.items()),
                number(summary.get("workers")),
                str(summary.get("restarts", sum(event["kind"] == "restart" for event in run.events))),
                number(summary.get("lost_steps", 0)),
                duration(float(summary["seconds"])) if "seconds" in summary else "",
                f"rank {slow['rank']}: {slow['cause']}" if slow else "",
            ]
        )
    return rows


def _differences(runs: Sequence[Run], labels: Sequence[str]) -> str:
    found = differences(runs)
    if not found:
        return "<p>None: all settings are the same.</p>"
    rows = [[key, *("(unset)" if value is None else str(value) for value in values)] for key, values in found]
    return _table("settings that differ", ["setting", *labels], rows, wide=True)


def _settings(run: Run, label: str) -> str:
    from raydist.config import diff_settings

    rows = [[key, str(value)] for key, _, value in diff_settings({}, run.config)]
    if not rows:
        return ""
    inside = _table(f"settings of {label}", ["setting", "value"], rows, wide=True)
    return _section(
        f"Settings: {label}", f"<details><summary>{len(rows)} settings of {escape(label)}</summary>{inside}</details>"
    )
