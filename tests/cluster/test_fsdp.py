"""Shards on Ray: a worker that runs out of memory and one that is killed; the run ends with the undisturbed weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from raydist.checkpoint import load_latest
from raydist.config import parse_config
from raydist.faults import VARIABLE
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from raydist.screen import Screen
from tests.pipeline.jobs import wide
from tests.support import train_here

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,  # three starts of the workers
    pytest.mark.usefixtures("ray_cluster", "plain_environment"),
    # Ray's own: copying a DataContext reads its deprecated fields
    pytest.mark.filterwarnings(r"ignore:`use_\w+` is deprecated:DeprecationWarning"),
]


def test_out_of_memory_halves_the_micro_batch_and_a_killed_worker_comes_back_from_the_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 rows on 2 workers are 6 a share; both faults are of rank 1, whose shards rank 0 does not have."""
    job = wide(
        "fsdp",
        steps=8,
        scaling={"workers": 2},
        checkpoint={"every": {"steps": 4}, "memory": {"steps": 1}, "keep": 9},
        storage=str(tmp_path),
    )
    faults = [{"kind": "oom", "rank": 1, "step": 2}, {"kind": "kill", "rank": 1, "step": 7}]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    train_ray(parse_config(job, tmp_path), screen=Screen(stream=io.StringIO()))
    events = RunDir(str(tmp_path / "wide")).read_events()
    first, second = (event["reason"] for event in events if event["kind"] == "failure")
    assert first.startswith("rank 1: OutOfMemoryError: injected") and "going on with micro-batches of 3" in first
    assert second.startswith("rank 1 died: its process ended without a word")
    restarts = [(event["step"], event["reason"]) for event in events if event["kind"] == "restart"]
    assert restarts[0][0] == 1
    assert restarts[1][0] == 6 and "which a copy in memory held" in restarts[1][1]
    found = load_latest(str(tmp_path / "wide" / "checkpoints"), pytest.fail)
    assert found is not None and found[0].counters["step"] == 8 and found[0].extra["micro_size"] == 3
    plain = train_here({**job, "strategy": "ddp"})
    for name, tensor in plain["model"].items():
        torch.testing.assert_close(found[0].model[name], tensor, rtol=0, atol=1e-10)
