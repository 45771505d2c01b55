"""A Ray cluster trains the same run as one process, and what goes wrong is said in the words of the rank it happened to."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import load_latest
from raydist.errors import ConfigError, DataError
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from raydist.screen import Screen
from tests.runs import config_of, kinds, lines, local_run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster", "plain_environment"),
    # Ray's own: copying a DataContext reads its deprecated fields
    pytest.mark.filterwarnings(r"ignore:`use_\w+` is deprecated:DeprecationWarning"),
]

DIGITS = 40


class Pictures(torch.utils.data.Dataset[Any]):
    """`rows` random pictures of 64 pixels whose brightest pixel of the first three tells the class."""

    def __init__(self, rows: int, seed: int) -> None:
        self.x = torch.rand(rows, 64, generator=torch.Generator().manual_seed(seed))
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


def pictures_job(**changes: Any) -> dict[str, Any]:
    """A small job with all that could tell runners apart: shuffle, accumulation, warm-up, EMA, clipping, a metric."""
    accuracy = {"target": "torchmetrics.classification:MulticlassAccuracy", "args": {"num_classes": 3}}
    return {
        "task": {
            "model": {"target": "raydist.models:MLP", "args": {"in_features": 64, "hidden": [8], "out_features": 3}},
            "loss": {"target": "torch.nn.functional:cross_entropy"},
            "metrics": {"accuracy": accuracy},
        },
        "data": {
            "train": {"target": "tests.cluster.test_ray_train:Pictures", "args": {"rows": DIGITS, "seed": 1}, "shuffle": True},
            "eval": {"target": "tests.cluster.test_ray_train:Pictures", "args": {"rows": 15, "seed": 2}},
        },
        "global_size": 7,
        "batch__micro_size": 3,
        "train": {"epochs": 2, "log_every": {"steps": 2}, "ema": {"decay": 0.9}},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "schedule": {"name": "cosine", "warmup_steps": 3},
        "clip_grad_norm": 1.0,
        **changes,
    }


def alive() -> float:
    import ray

    assert ray.is_initialized()
    return float(ray.cluster_resources()["CPU"])


def test_two_workers_on_ray_train_the_run_of_one_process(tmp_path: Path) -> None:
    for name in ("local", "ray"):
        (tmp_path / name).mkdir()
    local = local_run(tmp_path / "local", **pictures_job())
    stream = io.StringIO()
    config = config_of(tmp_path / "ray", "scaling.workers=2", **pictures_job())
    summary = train_ray(config, screen=Screen(stream=stream))

    run = tmp_path / "ray" / "runs" / "lin"
    assert [line["step"] for line in lines(local)] == [line["step"] for line in lines(run)] == [2, 4, 6, 8, 10, 12]
    for ours, theirs in zip(lines(run), lines(local), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    found, expected = load_latest(str(run / "checkpoints"), pytest.fail), load_latest(str(local / "checkpoints"), pytest.fail)
    assert found is not None and expected is not None and expected[0].ema is not None and found[0].ema is not None
    for name, tensor in expected[0].ema.items():
        torch.testing.assert_close(found[0].ema[name], tensor, rtol=1e-4, atol=1e-6)

    assert {"status": "finished", "steps": 12, "workers": 2, "restarts": 0}.items() <= summary.items()
    assert summary == RunDir(str(run)).read_summary()
    assert not (run / ".ray").exists() and not (run / ".stop").exists()
    shown = [text.split()[1] for text in stream.getvalue().splitlines() if text.startswith("step ")]
    assert shown == [f"{line['step']}/12" for line in lines(run)]
    assert "\x1b" not in stream.getvalue()
    assert alive() == 6.0  # the cluster was there before and is there still
    # done: no workers are started
    assert train_ray(config) == summary


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["scaling.workers=9"], r"scaling.workers: 9 workers need 9 CPU, and the cluster has 6 CPU"),
        (["scaling.workers=2", "scaling.cpus_per_worker=4"], r"2 workers need 8 CPU, and the cluster has 6 CPU"),
        (["scaling.workers=[7, 9]"], r"7 workers need 7 CPU, and the cluster has 6 CPU"),
        (
            ["scaling.workers=2", "scaling.resources={tpu: 1}"],
            r"2 workers need 2 CPU, 2 tpu, and the cluster has 6 CPU,.* 0 tpu",
        ),
        (["scaling.gpus_per_worker=1"], r"1 workers need 1 CPU, 1 GPU, and the cluster has 6 CPU, 0 GPU"),
    ],
)
def test_what_does_not_fit_the_cluster_is_refused_with_asked_for_and_available(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words + r".*\. Lower scaling.workers, scaling.cpus_per_worker"):
        train_ray(config_of(tmp_path, *overrides))
    assert alive() == 6.0


class Fussy(torch.utils.data.Dataset[Any]):
    """On rank 1: the first one cannot be built, and later ones cannot read row 7."""

    def __init__(self, folder: str) -> None:
        self.here = os.environ.get("RANK") == "1"
        first = Path(folder) / "built"
        if self.here and not first.exists():
            first.touch()
            raise KeyError("no such split")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        if self.here and row == 7:
            raise FileNotFoundError("image 7.png")
        return torch.ones(1), torch.ones(1)


def test_an_error_of_the_users_code_is_tried_again_and_one_in_the_data_is_not(tmp_path: Path) -> None:
    data = {"target": "tests.cluster.test_ray_train:Fussy", "args": {"folder": str(tmp_path)}}
    with pytest.raises(DataError, match=r"^row 7 of Fussy: FileNotFoundError: image 7.png$"):
        train_ray(config_of(tmp_path, "scaling.workers=2", data__train=data, global_size=4))
    run = tmp_path / "runs" / "lin"
    (failure,) = [event for event in RunDir(str(run)).read_events() if event["kind"] == "failure"]
    assert failure["rank"] == 1 and failure["reason"] == "rank 1: KeyError: 'no such split'; restart 1 of 3"
    summary = RunDir(str(run)).read_summary()
    assert summary is not None and summary["restarts"] == 1 and summary["status"] == "failed"
    assert summary["reason"] == "row 7 of Fussy: FileNotFoundError: image 7.png"
    assert alive() == 6.0


def test_an_error_in_the_job_is_the_workers_own_and_is_not_tried_again(tmp_path: Path) -> None:
    model = {"target": "torch.nn:Dropout", "args": {"p": 7.0}}
    with pytest.raises(ConfigError, match=r"^task.model: torch.nn:Dropout refused its args: ValueError: dropout probability"):
        train_ray(config_of(tmp_path, task__model=model))
    run = tmp_path / "runs" / "lin"
    assert kinds(run).count("worker_failed") == 1 and "failure" not in kinds(run)
