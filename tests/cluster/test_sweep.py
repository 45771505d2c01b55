"""Sweeps on a Ray cluster: warm slots train the runs of `raydist train`, and what goes wrong costs a trial, not the sweep."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.config import JobConfig, load_config, parse_config, to_yaml
from raydist.errors import ConfigError, TrainError
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from raydist.screen import Screen
from raydist.sweep.run import run_sweep
from raydist.sweep.table import result
from tests.runs import lines
from tests.support import lin_job

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster", "plain_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]


def job(folder: Path, space: dict[str, Any], changes: dict[str, Any] | None = None, **sweep: Any) -> JobConfig:
    own = {"train": {"epochs": 2, "log_every": {"steps": 1}}, "optimizer": {"name": "sgd", "lr": 0.01}}
    data = lin_job(ROWS, 2, **{**own, **(changes or {})})
    data["data"]["eval"] = {"target": "tests.support:line", "args": {"xs": [1.0, 2.0]}}
    return parse_config({**data, "storage": str(folder), "sweep": {"space": space, **sweep}}, folder)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "lin" / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_asha_stops_the_worse_the_best_runs_to_the_end_and_trains_alone_to_the_same_bits(tmp_path: Path) -> None:
    """8 rows in batches of 2 are 4 steps an epoch: 8 epochs are 32 steps."""
    space = {"optimizer.lr": {"grid": [0.03, 1e30, 0.001, 0.0001]}}
    stream = io.StringIO()
    asha = {"name": "asha", "max": 8, "grace": 1, "reduction": 2}
    config = job(tmp_path, space, search="grid", scheduler=asha, concurrency=1)
    journal = run_sweep(config, screen=Screen(stream=stream))

    found = rows(tmp_path)
    assert [row["status"] for row in found] == ["finished", "failed", "stopped", "stopped"]
    assert (found[0]["steps"], found[0]["epochs"], found[0]["rows"]) == ("32", "8", "64")
    assert [row["epochs"] for row in found[2:]] == ["1", "1"]  # worse than the first at the first rung
    assert [row["eval_loss"] != "" for row in found] == [True, False, True, True]
    summaries = [RunDir(str(tmp_path / "lin" / "trials" / f"{k:05d}")).read_summary() or {} for k in range(4)]
    assert [summary["status"] for summary in summaries] == ["finished", "failed", "stopped", "stopped"]
    assert (summaries[2]["steps"], summaries[2]["rows_seen"]) == (4, 8)
    assert summaries[2]["reason"] == "stopped by the scheduler (asha)"
    assert found[1]["error"].startswith("step ") and "rank" in found[1]["error"]
    assert [row["lr"] for row in found] == [row["optimizer.lr"] for row in found] == ["0.03", "1e+30", "0.001", "0.0001"]
    told = "\n".join(result(journal))
    assert "1 of 4 failed\n  trial 00001: step " in told and "best: trial 00000" in told
    assert len(stream.getvalue().splitlines()) == 4  # a line a trial

    best = load_config(tmp_path / "lin" / "best.yaml")
    train_local(best)  # a process of its own for one worker: the same bits
    alone = lines(tmp_path / "lin-best")
    assert lines(tmp_path / "lin" / "trials" / "00000") == alone and len(alone) == 32
    with pytest.raises(ConfigError, match="holds a sweep; go on with it by --resume"):
        run_sweep(config)
    assert run_sweep(config, resume=True).table() == journal.table()  # nothing left to do


@pytest.mark.nightly
def test_gangs_of_two_share_the_cluster_and_a_slot_that_crashes_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    changes = {"scaling": {"workers": 2}, "failure": {"max_restarts": 0, "hang_timeout": None}}
    crash = {"target": "tests.cluster.test_sweep:Crashing", "args": {}}
    model = {"choice": [{"target": "tests.support:Lin"}, crash]}
    config = job(tmp_path, {"task.model": {"grid": model["choice"]}, "seed": {"grid": [1, 2]}}, changes, search="grid")
    journal = run_sweep(config, screen=Screen(stream=io.StringIO()))
    found = rows(tmp_path)
    assert sorted(row["status"] for row in found) == ["failed", "failed", "finished", "finished"]
    assert all("died" in row["error"] for row in found if row["status"] == "failed")
    assert journal.best() is not None


class Crashing:
    """No model: the process that builds it dies."""

    def __new__(cls) -> Any:
        os._exit(9)


def test_pbt_copies_weights_optimizer_and_settings(tmp_path: Path) -> None:
    """Two trials take turns in the only slot: one worker needs four of the six CPUs."""
    changes = {"train": {"epochs": 4, "log_every": {"steps": 1}}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.5}}
    changes["scaling"] = {"workers": 1, "cpus_per_worker": 4}
    pbt = {"name": "pbt", "interval": 1, "quantile": 0.5, "resample": 0.0}
    found = raydist.sweep(
        job(tmp_path, {"seed": {"choice": [0]}}, changes),
        {"optimizer.lr": {"uniform": [1e-4, 0.02]}},
        samples=2,
        scheduler=pbt,
        quiet=True,
    )
    trials = tmp_path / "lin" / "trials"
    copied = [
        (name, event)
        for name in ("00000", "00001")
        for event in RunDir(str(trials / name)).read_events()
        if event["kind"] == "exploit"
    ]
    assert copied
    name, event = copied[0]
    source, step = "00001" if name == "00000" else "00000", event["step"]
    assert event["reason"].startswith(f"trial {source} at step {step} copied")
    mine, theirs = ({line["step"]: line for line in lines(trials / one)} for one in (name, source))
    assert mine[step + 1]["train_loss"] == theirs[step + 1]["train_loss"]  # from the same weights, on the same batch
    assert mine[step + 1]["lr"] / theirs[step]["lr"] in (pytest.approx(1.2), pytest.approx(0.8))
    assert mine[step + 2]["train_loss"] != theirs[step + 2]["train_loss"]
    assert [(trial.name, trial.status) for trial in found.trials] == [("00000", "finished"), ("00001", "finished")]
    frame = found.frame()
    assert list(frame["steps"]) == [16, 16] and frame["eval_loss"].min() == found.best.value
    assert found.best.config is not None and found.best.config.optimizer.lr == found.best.settings["optimizer.lr"]


@pytest.mark.nightly
def test_no_finite_trial_is_a_failure(tmp_path: Path) -> None:
    config = job(tmp_path, {"optimizer.lr": {"choice": [1e30]}}, samples=1)
    with pytest.raises(TrainError, match=r"no trial has a finite eval_loss: 1 of 1 failed; trial 00000: step "):
        run_sweep(config, screen=Screen(stream=io.StringIO()))
    assert rows(tmp_path)[0]["status"] == "failed" and not (tmp_path / "lin" / "best.yaml").exists()


@pytest.mark.nightly
def test_a_killed_sweep_goes_on_with_every_trial_once(tmp_path: Path) -> None:
    """SIGKILL of the whole command while the second of four trials runs."""
    longer = {"train": {"epochs": 8, "log_every": {"steps": 1}}}
    slow = {**longer, "data": {"train": {"target": "tests.runs:Slow", "args": {"xs": ROWS}}}}
    sweep = {"samples": 4, "search": "optuna", "concurrency": 1}
    space = {"optimizer.lr": {"loguniform": [1e-3, 1e-2]}}
    config = job(tmp_path, space, slow, **sweep)
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml(config))
    command = [sys.executable, "-m", "raydist", "sweep", str(path)]
    folder = Path(raydist.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    env.pop("RAY_ADDRESS", None)
    began = time.monotonic()
    with subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        journal = tmp_path / "lin" / "sweep.jsonl"
        while not journal.exists() or '"report", "trial": 1' not in journal.read_text():
            assert running.poll() is None and time.monotonic() - began < 120
            time.sleep(0.1)
            if journal.exists():
                with pytest.raises(ConfigError, match="is being written by another run"):
                    run_sweep(config, resume=True)
        running.send_signal(signal.SIGKILL)
    first = (tmp_path / "lin" / "trials" / "00000" / "events.jsonl").read_text()
    done = subprocess.run([*command, "--resume"], env=env, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [(row["trial"], row["status"]) for row in rows(tmp_path)] == [(f"{k:05d}", "finished") for k in range(4)]
    assert (tmp_path / "lin" / "trials" / "00000" / "events.jsonl").read_text() == first  # not touched again
    events = RunDir(str(tmp_path / "lin" / "trials" / "00001")).read_events()
    starts = [event["step"] for event in events if event["kind"] in ("start", "resume")]
    assert starts[0] == 0 and starts[1] in (4, 8, 12, 16, 20, 24, 28) and len(starts) == 2  # from its checkpoint

    run_sweep(job(tmp_path / "whole", space, longer, **sweep), screen=Screen(stream=io.StringIO()))
    drawn, expected = ([row["optimizer.lr"] for row in rows(at)] for at in (tmp_path, tmp_path / "whole"))
    assert drawn == expected  # Optuna was where it would have been
