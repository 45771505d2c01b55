"""The charts of a report: what is drawn, and in words what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.report.reading import Run, seconds
from raydist.report.words import number

COLORS = ("#3f7fd0", "#d9730d", "#2f9e6e", "#c2478f", "#8a6fd8", "#b08900", "#1f9aa8", "#d0504f")
"""Seen apart on white and on near-black, and by most people who see colors otherwise."""
_PARTS = (("compute_s", "compute", "#3f7fd0"), ("data_wait_s", "data wait", "#d9730d"), ("sync_wait_s", "sync wait", "#8a6fd8"))
_TIMES = {"step_s", "data_wait_s", "compute_s", "sync_wait_s", "eval_s"}
_OWN = {
    "step",
    "epoch",
    "lr",
    "grad_norm",
    "skipped",
    "rows_seen",
    "rows_per_s",
    "memory_mb",
    "memory_reserved_mb",
    "loss_scale",
}
MOST_RANKS = 64
"""Ranks that a bar chart shows: the slowest ones when there are more."""


@dataclass
class Chart:
    """One figure: plotly's own JSON (`data`, `layout`), its title, what it shows in a sentence, and its numbers as a table."""

    title: str
    words: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Every chart that the runs have numbers for, the most asked-for first."""
    made = [_loss(runs, labels)]
    keys = list(dict.fromkeys(key for run in runs for key in run.numbers()))
    for key in keys:
        if key.startswith("eval_") and key not in ("eval_loss", "eval_s"):
            made.append(_curve(runs, labels, key, key.removeprefix("eval_").replace("_", " ") + " (evaluation)"))
    made.append(_timeline(runs, labels))
    made.append(_curve(runs, labels, "lr", "learning rate"))
    made.append(_curve(runs, labels, "grad_norm", "gradient norm, before clipping", log=True))
    made.append(_curve(runs, labels, "loss_scale", "loss scale of fp16", log=True))
    made.append(_curve(runs, labels, "rows_per_s", "throughput, rows a second"))
    for run, label in zip(runs, labels, strict=True):
        made += [_split(run, label), _split_over_steps(run, label)] if len(runs) <= 4 else []
    made += [_memory(runs, labels)]
    known = _OWN | _TIMES | {"train_loss"}
    made += [_curve(runs, labels, key, key) for key in keys if key not in known and not key.startswith("eval_")]
    return [chart for chart in made if chart is not None]


def _lines(
    runs: Sequence[Run], labels: Sequence[str], key: str, suffix: str = "", dash: str | None = None
) -> list[dict[str, Any]]:
    traces = []
    for at, (run, label) in enumerate(zip(runs, labels, strict=True)):
        steps, values = run.series(key)
        if steps:
            line: dict[str, Any] = {"color": COLORS[at % len(COLORS)], "width": 2}
            if dash:
                line["dash"] = dash
            mode = "lines" if len(steps) > 1 else "markers"
            name = f"{label}{suffix}" if len(runs) > 1 else suffix.strip() or label
            traces.append({"type": "scatter", "mode": mode, "x": steps, "y": values, "name": name, "line": line})
    return traces


def _said(traces: Sequence[dict[str, Any]], what: str) -> str:
    """What curves show, in a sentence each."""
    parts = []
    for trace in traces[:8]:
        x, y = trace["x"], trace["y"]
        low, high = min(y), max(y)
        parts.append(
            f"{trace['name']}: {number(y[0])} at step {x[0]}, {number(y[-1])} at step {x[-1]}, "
            f"lowest {number(low)}, highest {number(high)}"
        )
    more = f"; and {len(traces) - 8} more" if len(traces) > 8 else ""
    return f"{what} over steps. " + "; ".join(parts) + more + "."


def _table(traces: Sequence[dict[str, Any]], rows: int = 40) -> tuple[list[str], list[list[str]]]:
    """The curves' values at no more than `rows` steps."""
    steps = sorted({step for trace in traces for step in trace["x"]})
    stride = -(-len(steps) // rows) if steps else 1
    kept = sorted({*steps[::stride], *steps[-1:]})
    at = [dict(zip(trace["x"], trace["y"], strict=True)) for trace in traces]
    body = [[str(step), *(number(values[step]) if step in values else "" for values in at)] for step in kept]
    return ["step", *(str(trace["name"]) for trace in traces)], body


def _curve(runs: Sequence[Run], labels: Sequence[str], key: str, title: str, log: bool = False) -> Chart | None:
    traces = _lines(runs, labels, key, suffix="" if len(runs) > 1 else title)
    if not traces:
        return None
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "step"}}, "showlegend": len(runs) > 1}
    if log and all(value > 0 for trace in traces for value in trace["y"]):
        layout["yaxis"] = {"type": "log"}
    elif all(value >= 0 for trace in traces for value in trace["y"]):
        layout["yaxis"] = {"rangemode": "tozero"}
    return Chart(title, _said(traces, title), traces, layout, *_table(traces))


def _loss(runs: Sequence[Run], labels: Sequence[str]) -> Chart | None:
    traces = [*_lines(runs, labels, "train_loss", " train"), *_lines(runs, labels, "eval_loss", " eval", dash="dot")]
    if not traces:
        return None
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "step"}}, "shapes": _marks(runs)}
    chart = Chart("loss", _said(traces, "loss"), traces, layout, *_table(traces))
    if layout["shapes"]:
        chart.words += " Thin vertical lines mark restarts, skipped steps and other events."
    return chart


def _marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    if len(runs) > 1:
        return []
    steps = {event["step"] for event in runs[0].trouble() if isinstance(event.get("step"), int)}
    style = {"color": "#888888", "width": 1, "dash": "dot"}
    return [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": style}
        for step in sorted(steps)[:200]
    ]


_SYMBOLS = {
    "start": "triangle-right",
    "resume": "triangle-right",
    "restart": "triangle-right",
    "failure": "x",
    "failed": "x",
    "hang": "hourglass",
    "bad_step": "diamond",
    "resize": "arrow-bar-up",
    "out_of_memory": "square",
    "finish": "star",
    "checkpoint": "circle-open",
}


def _timeline(runs: Sequence[Run], labels: Sequence[str]) -> Chart | None:
    """Steps over wall time, and on them what happened."""
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for at, (run, label) in enumerate(zip(runs, labels, strict=True)):
        if not run.times:
            continue
        color = COLORS[at % len(COLORS)]
        x, y = list(run.times.values()), list(run.times)
        name = label if len(runs) > 1 else "steps"
        traces.append({"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": {"color": color, "width": 2}})
        rows += _happened(run, label if len(runs) > 1 else None, color, traces)
    if not traces:
        return None
    layout = {"xaxis": {"title": {"text": "seconds since the first start"}}, "yaxis": {"title": {"text": "step"}}}
    kinds = sorted({row[-3] for row in rows})
    words = f"Steps done over wall time, with {len(rows)} events" + (f": {', '.join(kinds)}." if kinds else ".")
    header = [*(["run"] if len(runs) > 1 else []), "seconds", "event", "step", "what"]
    return Chart("what happened when", words, traces, layout, header, rows)


def _happened(run: Run, label: str | None, color: str, traces: list[dict[str, Any]]) -> list[list[str]]:
    """Adds a trace of markers for each kind of event; returns the events as rows."""
    first = seconds(run.events[0])
    rows: list[list[str]] = []
    kinds: dict[str, list[tuple[float, int, str]]] = {}
    step = 0
    for event in run.events:
        kind = str(event["kind"])
        step = event["step"] if isinstance(event.get("step"), int) else step
        if kind in _SYMBOLS:
            reason = str(event.get("reason", ""))
            kinds.setdefault(kind, []).append((seconds(event) - first, step, reason))
            if kind != "checkpoint":
                rows.append([*([label] if label else []), f"{seconds(event) - first:.1f}", kind, str(step), reason])
    for kind, found in kinds.items():
        marker = {"symbol": _SYMBOLS[kind], "size": 10, "color": color, "line": {"width": 1.5, "color": color}}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{label}: {kind}" if label else kind.replace("_", " "),
                "x": [when for when, _, _ in found],
                "y": [where for _, where, _ in found],
                "text": [reason[:200] for _, _, reason in found],
                "marker": marker,
                "showlegend": label is None,
            }
        )
    return rows[:200]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _split(run: Run, label: str) -> Chart | None:
    """Mean milliseconds a step of each part, per rank."""
    from raydist.monitor import Monitor

    monitor = Monitor()
    steps = before = 0
    for line in run.lines:
        monitor.add(line)
        steps, before = steps + (line["step"] - before if "ranks" in line else 0), line["step"]
    totals = monitor.totals
    if not steps or not totals["compute_s"]:
        return None
    order = list(range(len(totals["compute_s"])))
    if len(order) > MOST_RANKS:
        order = sorted(order, key=lambda rank: -(totals["compute_s"][rank] + totals["data_wait_s"][rank]))[:MOST_RANKS]
    names = [f"rank {rank}" for rank in order]
    traces, columns = [], []
    for key, name, color in _PARTS:
        values = [1e3 * totals[key][rank] / steps for rank in order]
        columns.append(values)
        traces.append({"type": "bar", "orientation": "h", "name": name, "y": names, "x": values, "marker": {"color": color}})
    rows = [[name, *(number(column[at]) for column in columns)] for at, name in enumerate(names)]
    slow = monitor.summary()["slow_rank"]
    words = "Mean milliseconds of a step, per rank: " + "; ".join(
        f"{name} compute {row[1]}, data wait {row[2]}, sync wait {row[3]}" for name, row in zip(names[:8], rows, strict=False)
    )
    words += f". Rank {slow['rank']} is slow: {slow['cause']}." if slow else ". No rank is slower than the others."
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "milliseconds a step"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": max(240, 120 + 26 * len(names)),
    }
    return Chart(f"time of a step, per rank: {label}", words, traces, layout, ["rank", *(p[1] for p in _PARTS)], rows)


def _split_over_steps(run: Run, label: str) -> Chart | None:
    """Mean over the ranks, step by step, stacked."""
    lines = [line for line in run.lines if "ranks" in line]
    if len(lines) < 2:
        return None
    traces = []
    for key, name, color in _PARTS:
        values = [1e3 * _mean(line["ranks"][key]) for line in lines]
        steps = [line["step"] for line in lines]
        trace = {"type": "scatter", "mode": "lines", "stackgroup": "one", "name": name, "x": steps, "y": values}
        traces.append({**trace, "line": {"color": color, "width": 1}})
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"}}
    title = f"time of a step, mean over ranks: {label}"
    return Chart(title, _said(traces, "Milliseconds of a step"), traces, layout, *_table(traces))


def _memory(runs: Sequence[Run], labels: Sequence[str]) -> Chart | None:
    """The most memory that each rank held so far; one run's ranks, or the fullest rank of each run."""
    traces: list[dict[str, Any]] = []
    if len(runs) == 1:
        lines = [line for line in runs[0].lines if "ranks" in line]
        width = max((len(line["ranks"]["memory_mb"]) for line in lines), default=0)
        gpu = any("memory_reserved_mb" in line for line in lines)
        kinds = [("memory_mb", "allocated" if gpu else "", None), *([("memory_reserved_mb", "reserved", "dot")] if gpu else [])]
        for rank in range(min(width, 16)):
            for key, word, dash in kinds:
                traces.append(_of_rank(lines, rank, key, f"rank {rank} {word}".strip(), dash))
    else:
        traces = _reduced(runs, labels, lambda line: max(line["ranks"]["memory_mb"]))
    traces = [trace for trace in traces if trace["x"]]
    if not traces:
        return None
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "MiB"}, "rangemode": "tozero"}}
    title = "peak memory, MiB, per rank" if len(runs) == 1 else "peak memory, MiB, of the fullest rank"
    return Chart(title, _said(traces, title), traces, layout, *_table(traces))


def _of_rank(lines: Sequence[dict[str, Any]], rank: int, key: str, name: str, dash: str | None) -> dict[str, Any]:
    found = [(line["step"], line["ranks"][key][rank]) for line in lines if rank < len(line["ranks"].get(key, ()))]
    style: dict[str, Any] = {"color": COLORS[rank % len(COLORS)], **({"dash": dash} if dash else {})}
    x, y = [step for step, _ in found], [value for _, value in found]
    return {"type": "scatter", "mode": "lines+markers" if len(x) < 3 else "lines", "name": name, "x": x, "y": y, "line": style}


def _reduced(runs: Sequence[Run], labels: Sequence[str], value: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    traces = []
    for at, (run, label) in enumerate(zip(runs, labels, strict=True)):
        lines = [line for line in run.lines if "ranks" in line]
        style = {"color": COLORS[at % len(COLORS)]}
        x, y = [line["step"] for line in lines], [value(line) for line in lines]
        traces.append({"type": "scatter", "mode": "lines", "name": label, "x": x, "y": y, "line": style})
    return traces
