"""One process and torchrun: the run's folder, stopping and going on, and what one rank's trouble means for the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import load_latest
from raydist.config import load_config
from raydist.errors import ConfigError, DataError, Interrupted
from raydist.rundir import RunDir
from raydist.runners.local import stop_on_signals, train_local, under_torchrun
from raydist.start import locked
from tests.runs import config_of, kinds, lines, local_run, write_job
from tests.support import RankError, run_ranks

REPOSITORY = Path(__file__).parents[2]
XS = [float(i % 5) for i in range(12)]
JOB: dict[str, Any] = {
    "train": {"epochs": 2, "log_every": {"steps": 1}},
    "optimizer__momentum": 0.9,
    "global_size": 4,
    "data__train": {"target": "tests.support:line", "args": {"xs": XS}, "shuffle": True},
    "data__eval": {"target": "tests.support:line", "args": {"xs": [1.0, 2.0, 3.0]}},
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")  # train_local sets it for the process
    for name in ("RANK", "WORLD_SIZE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def signalled(folder: Path, number: str, times: int = 1, at: int = 7) -> dict[str, Any]:
    """JOB, with a data set that once sends a signal to the process that reads row `at`."""
    args = {"xs": XS, "at": at, "number": number, "file": str(folder / "sent"), "times": times}
    return {**JOB, "data__train": {"target": "tests.runs:Signals", "args": args, "shuffle": True}}


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = load_latest(str(run / "checkpoints"), pytest.fail)
    assert found is not None
    return found[0].model


def same_run(one: Path, two: Path) -> None:
    assert lines(one) == lines(two)
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- one process ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_folder_as_promised(tmp_path: Path) -> None:
    config = config_of(tmp_path, **JOB)
    summary = train_local(config)
    run = tmp_path / "runs" / "lin"
    assert load_config(run / "config.yaml") == config
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(run) if "eval_loss" in line] == [3, 6]
    assert kinds(run)[0] == "start" and kinds(run)[-1] == "finish"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert RunDir(str(run)).read_summary() == summary
    expected = {"status": "finished", "steps": 6, "applied": 6, "skipped": 0, "rows_seen": 24, "epochs": 2, "workers": 1}
    assert expected.items() <= summary.items()
    assert summary["metrics"]["eval_loss"] == lines(run)[-1]["eval_loss"] and summary["run"] == str(run)
    # done: nothing is trained again
    assert train_local(config) == summary and len(lines(run)) == 6


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_stopped_run_goes_on_by_the_same_command_and_equals_one_that_was_not(tmp_path: Path, number: str) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    (tmp_path / "whole").mkdir()
    (tmp_path / "sent").touch()  # so that the first run gets no signal
    whole = local_run(tmp_path / "whole", **signalled(tmp_path, number))
    (tmp_path / "sent").unlink()
    config = config_of(tmp_path, **signalled(tmp_path, number))
    reason = {"SIGTERM": "SIGTERM", "SIGINT": "Ctrl-C"}[number]
    with pytest.raises(
        Interrupted, match=rf"^stopped at step (\d) by {reason}; the same command goes on from there$"
    ) as caught:
        train_local(config)
    run = tmp_path / "runs" / "lin"
    step = int(re.findall(r"step (\d)", str(caught.value))[0])
    assert 1 <= step <= 3  # the row comes in the first epoch
    summary = RunDir(str(run)).read_summary()
    assert summary is not None and (summary["status"], summary["reason"], summary["steps"]) == ("interrupted", reason, step)
    assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert train_local(config)["status"] == "finished"
    assert "resume" in kinds(run)
    same_run(run, whole)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_local(config_of(tmp_path, **signalled(tmp_path, "SIGINT", times=2, at=3)))
    summary = RunDir(str(tmp_path / "runs" / "lin")).read_summary()
    assert summary is not None and summary["status"] == "failed"
    assert train_local(config_of(tmp_path, **signalled(tmp_path, "SIGINT", times=2, at=3)))["status"] == "finished"


def test_signals_are_taken_in_the_main_thread_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def other() -> None:
        with stop_on_signals(seen.append):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]
    with stop_on_signals(seen.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one does not hurry it
    assert seen[1:] == ["SIGTERM", "SIGTERM"]


def test_a_run_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run = tmp_path / "runs" / "lin"
    with (
        locked(str(run)),
        pytest.raises(ConfigError, match=rf"{run} is being written by another run \(process {os.getpid()}\)"),
    ):
        train_local(config)
    assert not (run / "config.yaml").exists()


def test_a_failure_is_in_the_summary_and_the_next_start_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    broken = {"target": "tests.runs:Breaks", "args": {"xs": XS, "at": 9}}
    config = config_of(tmp_path, **{**JOB, "data__train": broken, "checkpoint": {"every": {"steps": 1}}})
    with pytest.raises(DataError, match=r"row 9 of Breaks: FileNotFoundError: image 9.png"):
        train_local(config)
    run = tmp_path / "runs" / "lin"
    summary = RunDir(str(run)).read_summary()
    assert summary is not None and summary["status"] == "failed" and summary["steps"] == 2
    assert "row 9 of Breaks" in summary["reason"]
    assert kinds(run)[-1] == "failed"
    with pytest.raises(DataError):
        train_local(config)
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert RunDir(str(run)).read_events()[-2]["kind"] != "start" and kinds(run).count("resume") == 1


def test_warnings_are_events_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run = local_run(tmp_path, task__model__target="tests.runners.test_local:Warns")
    told = [event for event in RunDir(str(run)).read_events() if event["kind"] == "warning"]
    assert [(event["rank"], event["reason"]) for event in told] == [(0, "UserWarning: odd model")]


class Warns(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import warnings

        warnings.warn("odd model", stacklevel=1)
        return super().forward(x)


# -- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node=2 -m raydist job.yaml …`, from the repository."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "raydist"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(folder / "job.yaml"), *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.cluster
@pytest.mark.slow
def test_two_processes_under_torchrun_stop_together_go_on_and_equal_one_process(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "sent").touch()
    one = local_run(tmp_path / "one", **signalled(tmp_path, "SIGTERM"))
    (tmp_path / "sent").unlink()

    write_job(tmp_path / "two", **signalled(tmp_path, "SIGTERM"))
    stopped = torchrun(tmp_path / "two")
    assert stopped.returncode != 0
    run = tmp_path / "two" / "runs" / "lin"
    summary = RunDir(str(run)).read_summary()
    assert summary is not None and summary["status"] == "interrupted", stopped.stderr
    assert summary["workers"] == 2 and summary["reason"] == "SIGTERM"
    assert "exitcode  : 3" in stopped.stderr and f"stopped at step {summary['steps']} by SIGTERM" in stopped.stderr

    finished = torchrun(tmp_path / "two")
    assert finished.returncode == 0, finished.stderr
    shown = [line.split()[1] for line in finished.stderr.splitlines() if line.startswith("step ")]
    assert shown == [f"{step}/6" for step in range(summary["steps"] + 1, 7)]  # each line once, though there are two processes
    assert finished.stderr.count("status") == 1 and "\x1b" not in finished.stderr

    assert len(lines(run)) == len(lines(one)) == 6
    for ours, theirs in zip(lines(run), lines(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-5, atol=1e-6)


def train(folder: str, overrides: tuple[str, ...]) -> Any:
    os.chdir(folder)
    summary = train_local(load_config(Path(folder) / "job.yaml", overrides))
    return {key: summary[key] for key in ("status", "steps", "workers")}


@pytest.mark.cluster
def test_what_rank_0_decides_or_finds_wrong_holds_for_all(tmp_path: Path) -> None:
    write_job(tmp_path, **JOB)
    assert under_torchrun() is False
    expected = {"status": "finished", "steps": 6, "workers": 2}
    assert run_ranks(2, train, str(tmp_path), ()) == [expected, expected]
    assert run_ranks(2, train, str(tmp_path), ()) == [expected, expected]  # nothing is left to do, on any rank
    with pytest.raises(RankError) as caught:
        run_ranks(2, train, str(tmp_path), ("optimizer.lr=0.5",), timeout=60)
    for words in caught.value.ranks.values():
        assert words.startswith("ConfigError: ") and "optimizer.lr: 0.01 there, 0.5 now" in words


@pytest.mark.cluster
def test_an_error_of_one_rank_ends_all_and_is_told_in_its_own_words(tmp_path: Path) -> None:
    broken = {"target": "tests.runs:Breaks", "args": {"xs": XS, "at": 7, "rank": 1}}
    write_job(tmp_path, **{**JOB, "data__train": broken})
    with pytest.raises(RankError) as caught:
        run_ranks(2, train, str(tmp_path), (), timeout=60)
    assert caught.value.ranks[1].startswith("DataError: row 7 of Breaks: FileNotFoundError: image 7.png")
    assert "no answer in" not in caught.value.ranks[0]
