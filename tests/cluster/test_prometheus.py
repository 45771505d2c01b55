"""A run's numbers as Ray's nodes export them to Prometheus, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest

from raydist.loggers import numbers_of
from raydist.runners.prometheus import PREFIX, RANK_KEYS
from tests.report.runs import line

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def expressions() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])]


def exported() -> set[str]:
    """Names as a run on two ranks exports them."""
    names = set()
    for key in ("step", *numbers_of(line(1, eval_loss=1.0, compute_s=0.3, data_wait_s=0.0, sync_wait_s=0.2))):
        name, _, rank = key.partition("/rank")
        names.add(f"ray_{PREFIX}rank_{name}" if rank else f"ray_{PREFIX}{name}")
    return names


def test_the_dashboard_asks_for_what_is_exported() -> None:
    asked = {name for expression in expressions() for name in re.findall(r"ray_raydist_\w+", expression)}
    assert asked <= exported() and {f"ray_{PREFIX}rank_{key}" for key in RANK_KEYS} <= asked
    assert f"ray_{PREFIX}train_loss" in asked


@pytest.mark.cluster
def test_a_node_exports_what_a_run_logs(ray_cluster: None) -> None:
    import ray

    @ray.remote(num_cpus=1)
    class Rank0:
        def log(self) -> None:
            from raydist.runners.prometheus import Gauges

            gauges = Gauges("digits")
            gauges.line(7, numbers_of(line(7, train_loss=0.25)))

    actor = Rank0.remote()  # type: ignore[attr-defined]
    ray.get(actor.log.remote())
    ports = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}
    text, deadline = "", time.monotonic() + 60
    while "ray_raydist_train_loss" not in text and time.monotonic() < deadline:
        time.sleep(1)
        text = "".join(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode() for port in ports)
    values = re.findall(r'ray_raydist_train_loss\{[^}]*run="digits"[^}]*\} (\S+)', text)
    assert [float(value) for value in values] == [0.25]
    waits = dict(re.findall(r'ray_raydist_rank_data_wait_s\{[^}]*rank="(\d)"[^}]*\} (\S+)', text))
    assert {rank: float(value) for rank, value in waits.items()} == {"0": 0.0, "1": 0.1}
    ray.kill(actor)
