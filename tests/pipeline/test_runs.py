"""Whole runs of a pipeline: what is told, exported and drawn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raydist.cli import main
from raydist.config import parse_config
from raydist.pipeline.timeline import figure
from raydist.report.build import collect
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from raydist.screen import Screen, summary_rows
from tests.pipeline.jobs import stages, wide
from tests.support import RankPool


def train(job: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    return train_local(parse_config(job, Path(job["storage"])), resume=resume, screen=Screen(stream=io.StringIO()))


def test_a_run_tells_its_cut_and_its_bubble_and_is_exported_as_one_file(ranks: RankPool, tmp_path: Path) -> None:
    job = wide(stages(3, checkpoint_activations=True), storage=str(tmp_path))
    summary = ranks(3, train, job)[0]
    run = tmp_path / "wide"
    (told,) = [event for event in RunDir(str(run)).read_events() if event["kind"] == "pipeline"]
    assert [part["stage"] for part in told["runs"]] == [0, 1, 2]
    assert [name for part in told["runs"] for name in part["layers"]] == [str(at) for at in range(8)]
    assert "slowest layer" in told["reason"] and f"expected bubble: {told['bubble']:.0%}" in told["reason"]
    pipeline = summary["pipeline"]
    assert (pipeline["schedule"], pipeline["stages"], pipeline["micro_batches"]) == ("1f1b", 3, 6)
    assert 0 < pipeline["limit"] < 1 and 0 < pipeline["bubble"] < 1
    assert len(pipeline["busy_s"]) == len(pipeline["wait_s"]) == len(summary["peak_memory_mb"]) == 3
    assert any(name == "bubble" and "the schedule's limit" in value for name, value in summary_rows(summary))

    trace = json.loads((run / "pipeline-trace.json").read_text())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == 3 * 6 * 2
    drawn = figure(str(run))
    assert drawn is not None and sum(len(trace["x"]) for trace in drawn["data"]) == len(bars)
    titles = {chart.title: chart.words for chart in collect([str(run)])[2]}
    assert titles["pipeline, one pass"].startswith("One pass of 3 stages:")

    plain = train({**job, "strategy": "ddp", "name": "plain"})
    assert summary["metrics"] == pytest.approx(plain["metrics"], rel=1e-9)
    exported = [tmp_path / "pipeline.safetensors", tmp_path / "plain.safetensors"]
    for name, file in zip(("wide", "plain"), exported, strict=True):
        assert main(["export", str(tmp_path / name), str(file)]) == 0
    one, other = (load_file(file) for file in exported)
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-10)


def test_a_run_without_a_trace_has_no_picture(tmp_path: Path) -> None:
    assert figure(str(tmp_path)) is None
