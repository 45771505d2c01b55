"""Sweeps at their limits: small clusters, cold slots, budgets, Ctrl-C, memory that runs out, searchers from elsewhere."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.tune.search.searcher import Searcher
from torch.utils.data import Dataset

import raydist
from raydist.config import load_config, to_yaml
from raydist.errors import ConfigError
from raydist.rundir import RunDir
from raydist.screen import Screen
from raydist.sweep.journal import Journal
from raydist.sweep.run import run_sweep
from tests.cluster.test_sweep import ROWS, job, rows

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster", "plain_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FOLDER = Path(raydist.__file__).parents[1]


def swept(config: Any, **options: Any) -> Journal:
    return run_sweep(config, screen=Screen(stream=io.StringIO()), **options)


def test_a_gang_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"7 workers need 7 CPU, and the cluster has 6 CPU"):
        swept(job(tmp_path, {"seed": {"choice": [1]}}, {"scaling": {"workers": 7}}))
    assert not (tmp_path / "lin" / "trials").exists()


TWO_CPUS = """
import sys
import ray
from raydist.config import load_config
from raydist.errors import ConfigError
from raydist.sweep.run import run_sweep
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
run_sweep(load_config(sys.argv[1]))
try:
    run_sweep(load_config(sys.argv[1], ["scaling.workers=3", "name=wide"]))
except ConfigError as error:
    print(error)
"""


@pytest.mark.nightly
def test_on_two_cpus_four_trials_of_two_workers_finish_and_three_workers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        to_yaml(job(tmp_path, {"optimizer.lr": {"uniform": [0.001, 0.01]}}, {"scaling": {"workers": 2}}, samples=4))
    )
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", TWO_CPUS, str(path)], env=env, cwd=FOLDER, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows(tmp_path)] == ["finished"] * 4
    assert "scaling.workers: 3 workers need 3 CPU, and the cluster has 2 CPU" in done.stdout


class Noted(Dataset[Any]):
    """Rows (x, 3x); each process that opens them adds a line to `file`."""

    def __init__(self, xs: list[float], file: str) -> None:
        self.xs = xs
        with Path(file).open("a") as out:
            out.write(f"{os.getpid()}\n")

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, row: int) -> Any:
        x = torch.tensor([self.xs[row]])
        return x, 3 * x


class Ladder(Searcher):
    """0.001, 0.002, …, then no more; adds what it is told to `file`."""

    def __init__(self, space: dict[str, Any], metric: str, mode: str, file: str) -> None:
        super().__init__(metric=metric, mode=mode)
        assert list(space) == ["optimizer.lr"]
        self.file, self.given = Path(file), 0

    def suggest(self, trial_id: str) -> Any:
        if self.given == 2:
            return Searcher.FINISHED
        self.given += 1
        return {"optimizer.lr": 0.001 * self.given}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        with self.file.open("a") as out:
            out.write(f"{trial_id} {None if result is None else result[self.metric]} {error}\n")

    def save(self, checkpoint_path: str) -> None:
        """Nothing."""

    restore = save


@pytest.mark.nightly
def test_cold_slots_start_new_processes_and_a_searcher_is_told_what_came_of_its_settings(tmp_path: Path) -> None:
    """Of the ten trials asked for there are two, since the searcher has no more."""
    pids, told = tmp_path / "pids", tmp_path / "told"
    data = {"data": {"train": {"target": "tests.cluster.test_sweep_limits:Noted", "args": {"xs": ROWS, "file": str(pids)}}}}
    search = {"target": "tests.cluster.test_sweep_limits:Ladder", "args": {"file": str(told)}}
    space = {"optimizer.lr": {"uniform": [0.001, 0.01]}}
    journal = swept(job(tmp_path, space, data, search=search, slots="cold", samples=10, concurrency=1))
    assert [(row.status, row.settings["optimizer.lr"]) for row in journal.rows.values()] == [
        ("finished", 0.001),
        ("finished", 0.002),
    ]
    assert len(set(pids.read_text().split())) == 2
    assert told.read_text().splitlines() == [f"0000{k} {journal.rows[k].last['eval_loss']} False" for k in (0, 1)]


SLOW = {
    "train": {"epochs": 50, "log_every": {"steps": 1}},
    "data": {"train": {"target": "tests.runs:Slow", "args": {"xs": ROWS}}},
}


@pytest.mark.nightly
def test_a_budget_ends_a_sweep_and_more_of_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours pass once both trials were evaluated. Those that were not finished can be the best, and gone on with."""
    report = Journal.report

    def then_two_hours_pass(journal: Journal, number: int, row: Any) -> None:
        report(journal, number, row)
        journal.hours += 2.0 * all(one.last for one in journal.rows.values()) * (len(journal.rows) == 2)

    space = {"optimizer.lr": {"uniform": [0.0001, 0.001]}}
    stream = io.StringIO()
    config = job(tmp_path, space, SLOW, samples=2, budget={"worker_hours": 1.0}, concurrency=2)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "report", then_two_hours_pass)
        journal = run_sweep(config, screen=Screen(stream=stream))
    assert "the budget is used up with 0 of 2 trials done; --resume with a larger sweep.budget" in stream.getvalue()
    assert [row["status"] for row in rows(tmp_path)] == ["running", "running"] and (best := journal.best()) is not None
    assert load_config(tmp_path / "lin" / "best.yaml").optimizer.lr == best.settings["optimizer.lr"]
    steps = [row.last["steps"] for row in journal.rows.values()]
    assert max(steps) < 200  # of 50 epochs of 4 steps
    again = swept(job(tmp_path, space, SLOW, samples=2, concurrency=2), resume=True)
    assert [(row.status, row.last["steps"]) for row in again.rows.values()] == [("finished", 200)] * 2
    for number in (0, 1):
        events = RunDir(str(tmp_path / "lin" / "trials" / f"{number:05d}")).read_events()
        assert [event["kind"] for event in events if event["kind"] in ("start", "resume")] == ["start", "resume"]


@pytest.mark.nightly
def test_ctrl_c_stops_a_sweep_with_exit_code_3(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml(job(tmp_path, {"seed": {"grid": [1, 2]}}, SLOW, concurrency=1)))
    command = [sys.executable, "-m", "raydist", "sweep", str(path)]
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    env.pop("RAY_ADDRESS", None)
    began = time.monotonic()
    with subprocess.Popen(
        command, env=env, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        journal = tmp_path / "lin" / "sweep.jsonl"
        while not journal.exists() or '"report", "trial": 0' not in journal.read_text():
            assert running.poll() is None and time.monotonic() - began < 120
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, words = running.communicate(timeout=60)
    assert running.returncode == 3
    assert "stopped by Ctrl-C with 0 of 2 trials done; --resume goes on from there" in words
    assert rows(tmp_path)[0]["status"] == "running"
