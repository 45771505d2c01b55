"""A run's numbers as gauges of `ray.util.metrics`: every Ray node exports them to Prometheus, with the prefix `ray_`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from raydist.errors import ConfigError

PREFIX = "raydist_"
RANK_KEYS = ("data_wait_s", "compute_s", "sync_wait_s", "memory_mb", "memory_reserved_mb")
"""Of each rank, with the tag `rank`."""


class Gauges:
    """One gauge a number, tagged with the run's name; `<key>/rank3` becomes `raydist_rank_<key>{rank="3"}`."""

    def __init__(self, run: str) -> None:
        ray: Any = sys.modules.get("ray")  # where Ray is not loaded, it does not run
        if ray is None or not ray.is_initialized():
            raise ConfigError("prometheus exports through Ray's nodes, and this run is not on Ray; leave out --local")
        self._run = run
        self._gauges: dict[str, Any] = {}

    def line(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        for key, value in {"step": float(step), **values}.items():
            name, _, rank = key.partition("/rank")
            tags = {"run": self._run, **({"rank": rank} if rank else {})}
            self._gauge(f"{PREFIX}rank_{name}" if rank else f"{PREFIX}{name}", tuple(tags)).set(value, tags=tags)

    def _gauge(self, name: str, tags: tuple[str, ...]) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            words = name.removeprefix(PREFIX).replace("_", " ")
            self._gauges[name] = Gauge(name, description=f"raydist: {words}", tag_keys=tags)
        return self._gauges[name]

    def close(self, status: str) -> None:
        """Nothing to write: Ray forgets a gauge when its process ends."""
