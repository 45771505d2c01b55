"""The charts of a report as PNG files, drawn by a headless Chrome or Chromium through kaleido."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydist.errors import ConfigError, RaydistError
from raydist.jsonl import plain
from raydist.report.charts import Chart

WIDTH, HEIGHT = 1000, 560
"""Size of a picture in CSS pixels; it is written at twice that."""


def write_pictures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One PNG a chart under `folder`, named by number and title. Raises ConfigError where there is nothing to draw with."""
    try:
        import kaleido
    except ImportError as error:
        raise ConfigError("--png draws with plotly and kaleido: pip install 'raydist[report]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{at:02d}-{_slug(chart.title)}.png" for at, chart in enumerate(charts, start=1)]
    size = {"width": WIDTH, "height": HEIGHT, "scale": 2}
    jobs = [
        {"fig": plain(_light(chart)), "path": str(path), "opts": {"format": "png", **size}}
        for chart, path in zip(charts, paths, strict=True)
    ]
    try:
        kaleido.write_fig_from_object_sync(jobs, kopts={"n": 1})
    except Exception as error:
        if "chrome" in f"{type(error).__name__} {error}".lower():
            raise ConfigError(
                "--png draws with a headless Chrome or Chromium, and there is none: install chromium (Debian, Ubuntu: "
                "apt-get install chromium), or run `plotly_get_chrome`; the HTML report needs none"
            ) from error
        raise
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise RaydistError(f"{folder}: the browser wrote no {', '.join(missing)}")
    return paths


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]


def _light(chart: Chart) -> dict[str, Any]:
    layout = {key: value for key, value in chart.layout.items() if key not in ("width", "height", "template")}
    for key in ("xaxis", "yaxis"):
        layout[key] = {"gridcolor": "#d9dee4", "zerolinecolor": "#d9dee4", "automargin": True, **layout.get(key, {})}
    style = {"paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff", "font": {"color": "#1b1f24", "size": 14}}
    return {"data": chart.data, "layout": {**layout, **style, "title": {"text": chart.title}}}
