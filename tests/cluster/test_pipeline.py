"""A stage that is killed, stopped or raises: the run says which, goes on from the last save, and ends with the same weights."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import load_latest
from raydist.config import parse_config
from raydist.errors import TrainError
from raydist.faults import VARIABLE
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from raydist.screen import Screen
from tests.pipeline.jobs import stages, wide
from tests.support import train_here

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster", "plain_environment"),
    # Ray's own: copying a DataContext reads its deprecated fields
    pytest.mark.filterwarnings(r"ignore:`use_\w+` is deprecated:DeprecationWarning"),
]

STEPS = 8


def job_in(folder: Path, count: int, **more: Any) -> dict[str, Any]:
    return wide(stages(count), steps=STEPS, checkpoint={"every": {"steps": 2}, "keep": 9}, storage=str(folder), **more)


def train(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *faults: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with faults; the events."""
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    folder = Path(job["storage"])
    try:
        train_ray(parse_config(job, folder), screen=Screen(stream=io.StringIO()))
    finally:
        nothing_is_left()
    return RunDir(str(folder / "wide")).read_events()


def nothing_is_left() -> None:
    """All CPUs are free again; Ray's account of them lags by some seconds."""
    import ray

    deadline = time.monotonic() + 20.0
    while ray.available_resources().get("CPU") != 6.0:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)


def check(job: dict[str, Any], events: list[dict[str, Any]], words: str) -> None:
    failures = [event["reason"] for event in events if event["kind"] == "failure"]
    assert len(failures) == 1 and re.match(words, failures[0]), failures
    (recovered,) = [event for event in events if event["kind"] == "recovered"]
    print(f"{words}: {recovered['reason']}")
    found = load_latest(str(Path(job["storage"]) / "wide" / "checkpoints"), pytest.fail)
    assert found is not None and found[0].counters["step"] == STEPS
    plain = train_here({**job, "strategy": "ddp"})
    for name, tensor in plain["model"].items():
        torch.testing.assert_close(found[0].model[name], tensor, rtol=0, atol=1e-10)


def test_a_killed_stage_is_replaced_and_the_run_ends_with_the_undisturbed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, 2)
    events = train(job, monkeypatch, {"kind": "kill", "rank": 1, "step": 6})
    check(job, events, r"stage 1 \(layers \d … 7\), rank 1 died: its process ended without a word")


FAULTS = {
    "kill": r"stage {0} \(layers .*\), rank {0} died: its process ended without a word",
    "stop": r"stage {0} \(layers .*\), rank {0} \(step \d+, process \d+ on \S+\) is stopped \(SIGSTOP",
    "exception": r"stage {0} \(layers .*\), rank {0}: RuntimeError: injected exception on rank {0} at step 6",
}


@pytest.mark.nightly
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_happens_to_any_of_three_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rank: int) -> None:
    job = job_in(tmp_path, 3)
    check(job, train(job, monkeypatch, {"kind": kind, "rank": rank, "step": 6}), FAULTS[kind].format(rank))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAULTS)
def test_without_restarts_left_the_run_ends_with_the_stages_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    job = job_in(tmp_path, 3, failure={"max_restarts": 0})
    with pytest.raises(TrainError, match=FAULTS[kind].format(1)):
        train(job, monkeypatch, {"kind": kind, "rank": 1, "step": 6})
