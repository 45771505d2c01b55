"""`trials.csv` of a sweep's folder, read for charts."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import Any

import yaml

from raydist import storage

TABLE = "trials.csv"
_LAST = "error"
"""The column after which the swept keys come."""


@dataclass(frozen=True)
class Trial:
    """One row. `value` is the metric, None where there is none or it is not finite; `settings` the swept keys that it has."""

    name: str
    status: str
    value: float | None
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trials:
    """All rows of a sweep in the order they were begun, what they are compared by, and the swept keys."""

    metric: str
    mode: str
    keys: list[str]
    rows: list[Trial]

    @property
    def scored(self) -> list[Trial]:
        """Those with a finite metric that did not fail."""
        return [row for row in self.rows if row.value is not None and row.status in ("finished", "stopped")]

    @property
    def best(self) -> Trial | None:
        """The best of those that finished; of those that were stopped where none did. None where no trial has a number."""
        found = [row for row in self.scored if row.status == "finished"] or self.scored
        return min(found, key=self.cost) if found else None

    def cost(self, row: Trial) -> float:
        """The metric with its sign such that less is better."""
        assert row.value is not None
        return -row.value if self.mode == "max" else row.value


def is_sweep(folder: str) -> bool:
    """Whether the folder is a sweep's."""
    return storage.exists(storage.join(folder, TABLE))


def read_trials(folder: str) -> Trials | None:
    """The sweep's trials; None where the folder is no sweep's."""
    if not is_sweep(folder):
        return None
    lines = list(csv.reader(io.StringIO(storage.read_bytes(storage.join(folder, TABLE)).decode())))
    header = lines[0] if lines else ["trial", "status", "eval_loss", _LAST]
    settings = _settings(folder)
    metric = str(settings.get("metric") or header[2])
    keys = header[header.index(_LAST) + 1 :] if _LAST in header else []
    rows = [_trial(dict(zip(header, cells, strict=False)), metric, keys) for cells in lines[1:] if cells]
    return Trials(metric, str(settings.get("mode") or "min"), keys, rows)


def _trial(cells: dict[str, str], metric: str, keys: list[str]) -> Trial:
    value = _value(cells.get(metric, ""))
    number = float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    facts = {key: text for key, text in cells.items() if key not in (*keys, "trial", "status", metric, _LAST)}
    settings = {key: _value(cells[key]) for key in keys if cells.get(key, "") != ""}
    return Trial(cells.get("trial", ""), cells.get("status", ""), number, cells.get(_LAST, ""), settings, facts)


def _value(text: str) -> Any:
    """A cell as a number where it is one, else as it stands."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _settings(folder: str) -> dict[str, Any]:
    """What the sweep was told about its metric, wherever its folder says so."""
    for name in ("sweep.yaml", "best.yaml"):
        where = storage.join(folder, name)
        found = yaml.safe_load(storage.read_bytes(where)) if storage.exists(where) else None
        for section in (found.get("sweep"), found) if isinstance(found, dict) else ():
            if isinstance(section, dict) and section.get("metric"):
                return section
    return {}
