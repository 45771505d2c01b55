"""Profiler traces: of the steps that were asked for, one a rank, as Chrome's trace viewer reads them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from raydist.config import parse_config
from raydist.errors import ConfigError
from raydist.rundir import RunDir
from tests.runs import local_run
from tests.support import lin_job


@pytest.mark.parametrize(("steps", "name"), [([2, 2], "rank-0-steps-2-2"), ([3, 9], "rank-0-steps-3-6")])
def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path: Path, steps: list[int], name: str) -> None:
    run = local_run(tmp_path, train__epochs=2, profile={"steps": steps})  # six steps
    files = list((run / "profile").iterdir())
    assert [path.name for path in files] == [f"{name}.json.gz"]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    marks = [
        event["name"] for event in sorted(events, key=lambda e: e.get("ts", 0)) if str(event.get("name")).startswith("step ")
    ]
    assert list(dict.fromkeys(marks)) == [f"step {step}" for step in range(steps[0], min(steps[1], 6) + 1)]
    assert any("linear" in str(event.get("name")) for event in events)
    told = [event for event in RunDir(str(run)).read_events() if event["kind"] == "profile"]
    assert [event["rank"] for event in told] == [0] and name in told[0]["reason"]


def test_profiled_steps_must_be_a_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile\.steps.*first <= last"):
        parse_config(lin_job([1.0], 1, profile={"steps": [9, 2]}), tmp_path)
