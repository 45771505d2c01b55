"""The trace of a run as a picture: what each stage did when in one pass."""

from __future__ import annotations

import json
from typing import Any

from raydist import storage

TRACE = "pipeline-trace.json"
"""In the run's folder."""
_LOOK = {
    "F": ("forward", "#3f7fd0"),
    "B": ("backward", "#d9730d"),
    "I": ("backward, inputs", "#d9730d"),
    "W": ("backward, weights", "#2f9e6e"),
}


def figure(root: str) -> dict[str, Any] | None:
    """A plotly figure (`data`, `layout`) of the run's trace, a row of bars a stage; None when the run has no trace."""
    try:
        trace = json.loads(storage.read_bytes(storage.join(root, TRACE)))
    except (FileNotFoundError, ValueError):
        return None
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    if not spans:
        return None
    data = []
    for kind, (name, color) in _LOOK.items():
        mine = [event for event in spans if event["cat"] == kind]
        if mine:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": [names[event["tid"]] for event in mine],
                    "x": [event["dur"] / 1e3 for event in mine],
                    "base": [event["ts"] / 1e3 for event in mine],
                    "text": [str(event["args"]["micro_batch"]) for event in mine],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textangle": 0,
                    "marker": {"color": color, "line": {"color": "#ffffff", "width": 1}},
                    "hovertemplate": "%{text}: %{x:.2f} ms<extra>" + name + "</extra>",
                }
            )
    length = max(event["ts"] + event["dur"] for event in spans)
    busy = sum(event["dur"] for event in spans)
    idle = 1.0 - busy / (length * len(names))
    words = f"One pass of {len(names)} stages: {length / 1e3:.1f} ms, of which the stages are idle {idle:.0%}."
    return {
        "data": data,
        "layout": {
            "title": {"text": "pipeline, one pass"},
            "barmode": "overlay",
            "xaxis": {"title": {"text": "ms; numbers are micro-batches"}},
            "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": [names[at] for at in sorted(names)]},
            "meta": {"words": words},
        },
    }
