"""From folders to a report: which runs, which charts, where it is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydist import storage
from raydist.errors import ConfigError
from raydist.report.charts import Chart, charts
from raydist.report.page import page
from raydist.report.reading import MOST_RUNS, Run, find_runs, label, read_run


def report(paths: Sequence[str], out: str | Path | None = None) -> str:
    """Write the HTML report of runs or sweeps and return where it is. Without `out`: `report.html` in the one folder given, or
    in the current folder when there are several. Raises ConfigError when there is no run, or plotly is not installed.
    """
    runs, labels, made, notes = collect(paths)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs" if len(paths) > 1 else Path(paths[0]).name
    where = str(out) if out is not None else _place(paths, "report.html")
    storage.write_bytes(where, page(f"raydist report: {title}", runs, labels, made, notes).encode())
    return where


def _place(paths: Sequence[str], name: str) -> str:
    return storage.join(paths[0].rstrip("/"), name) if len(paths) == 1 else name


def collect(paths: Sequence[str]) -> tuple[list[Run], list[str], list[Chart], list[str]]:
    """The runs of `paths`, their labels, every chart, and notes on what is left out."""
    if not paths:
        raise ConfigError("give the folder of a run or of a sweep")
    folders = list(dict.fromkeys(folder for path in paths for folder in find_runs(path)))
    notes = []
    if len(folders) > MOST_RUNS:
        notes.append(f"The first {MOST_RUNS} of {len(folders)} runs are drawn.")
        folders = folders[:MOST_RUNS]
    runs = [read_run(folder) for folder in folders]
    labels = label(runs)
    made = charts(runs, labels)
    for run, name in zip(runs, labels, strict=True):
        if (run.config.get("strategy") or {}).get("name") == "pipeline":
            made += foreign(f"pipeline: {name}", _pipeline(run.root))
    sweeps = [path for path in paths if path.rstrip("/") not in folders]
    made = [chart for path in sweeps for chart in foreign("sweep", _sweep(path))] + made
    return runs, labels, made, notes


def _pipeline(root: str) -> Any:
    from raydist.pipeline.timeline import figure

    return figure(root)


def _sweep(folder: str) -> Any:
    from raydist.sweep.plots import figures

    return figures(folder if "://" in folder else str(Path(folder).expanduser()))


def foreign(title: str, found: Any) -> list[Chart]:
    """Charts, or plotly figures, that another room made: one, a list or a dict by title; None is none."""
    if found is None:
        return []
    if isinstance(found, Chart):
        return [found]
    if isinstance(found, dict) and "data" not in found:
        return [chart for name, one in found.items() for chart in foreign(str(name), one)]
    if isinstance(found, list | tuple):
        return [chart for one in found for chart in foreign(title, one)]
    body = found if isinstance(found, dict) else json.loads(found.to_json())
    layout = dict(body.get("layout") or {})
    own = layout.pop("title", None)
    own = own.get("text") if isinstance(own, dict) else own
    name = str(own or title)
    words = str((layout.get("meta") or {}).get("words", "")) if isinstance(layout.get("meta"), dict) else ""
    return [Chart(name, words or _described(name, body["data"]), list(body["data"]), layout)]


def _described(name: str, data: Sequence[dict[str, Any]]) -> str:
    series = [str(trace["name"]) for trace in data if trace.get("name")]
    return f"{name}: a chart of {', '.join(series[:12])}." if series else f"{name}: a chart of {len(data)} series."
