"""Whether a run starts, goes on, is refused or is done, and what the user is told."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest

from raydist.config import load_config
from raydist.errors import ConfigError
from raydist.start import locked, prepare, run_root
from tests.runs import config_of, local_run


@pytest.fixture(autouse=True)
def recorder_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")  # train_local sets it for the process


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of one epoch (3 steps), with checkpoints."""
    return local_run(tmp_path)


def unfinished(run: Path) -> None:
    (run / "summary.json").unlink()


def test_a_new_run_starts_from_scratch_and_writes_its_settings(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    root = tmp_path / "runs" / "lin"
    assert run_root(config) == str(root)
    start = prepare(config)
    assert (start.root, start.resume, start.notes, start.finished) == (str(root), None, [], None)
    assert load_config(root / "config.yaml") == config
    # started, but nothing was saved: from scratch again, with any settings
    assert prepare(config_of(tmp_path, "optimizer.lr=0.5")).resume is None


def test_resume_auto_without_a_run_says_so(tmp_path: Path) -> None:
    start = prepare(config_of(tmp_path), resume="auto")
    assert start.resume is None
    assert start.notes == [f"nothing to resume in {tmp_path}/runs/lin: starting from scratch"]


def test_a_finished_run_is_left_alone_and_an_unfinished_one_goes_on(tmp_path: Path, run: Path) -> None:
    start = prepare(config_of(tmp_path))
    assert start.finished is not None and start.finished["status"] == "finished"
    unfinished(run)
    start = prepare(config_of(tmp_path))
    assert (start.resume, start.notes, start.finished) == ("auto", [], None)


def test_other_settings_are_refused_with_both_values_and_the_ways_out(tmp_path: Path, run: Path) -> None:
    before = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(tmp_path, "optimizer.lr=0.5", "seed=4", "clip_grad_norm=1"))
    first, *changed, last = str(caught.value).split("\n")
    assert first == f"{run} holds a run with other settings:"
    assert sorted(changed) == [
        "  clip_grad_norm: (unset) there, 1.0 now",
        "  optimizer.lr: 0.01 there, 0.5 now",
        "  seed: 0 there, 4 now",
    ]
    assert last == "Choose another name=…, go on with the new settings by --resume auto, or move the old run aside by --fresh"
    assert (run / "config.yaml").read_text() == before


def test_resume_auto_goes_on_with_other_settings_and_says_which(tmp_path: Path, run: Path) -> None:
    start = prepare(config_of(tmp_path, "train.epochs=2", "schedule={name: cosine}"), resume="auto")
    assert start.resume == "auto" and start.finished is None
    assert "resuming with train.epochs = 2, was 1" in start.notes
    assert "resuming with schedule.name = 'cosine', was 'constant'" in start.notes
    # from now on these are the run's settings
    assert prepare(config_of(tmp_path, "train.epochs=2", "schedule={name: cosine}")).finished is not None


def test_settings_that_do_not_change_the_run_need_no_permission(tmp_path: Path, run: Path) -> None:
    unfinished(run)
    start = prepare(
        config_of(tmp_path, "scaling.workers=3", "checkpoint.keep=5", "failure.max_restarts=0", "train.log_every.steps=2")
    )
    assert start.resume == "auto"
    assert "resuming with scaling.workers = 3, was 1" in start.notes


@pytest.mark.parametrize("where", ["run", "checkpoints", "checkpoint"])
def test_a_new_run_can_start_from_a_checkpoint_of_another(tmp_path: Path, run: Path, where: str) -> None:
    folder = {"run": run, "checkpoints": run / "checkpoints", "checkpoint": run / "checkpoints" / "step-00000003"}[where]
    start = prepare(config_of(tmp_path, "name=second"), resume=str(folder))
    expected = folder if where == "checkpoint" else run / "checkpoints"
    assert (start.resume, start.root) == (str(expected), str(tmp_path / "runs" / "second"))


def test_resume_paths_that_do_not_work_are_named(tmp_path: Path, run: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"--resume .*: {re.escape(str(run))} holds a run already; choose another name=…, or --fresh"
    ):
        prepare(config_of(tmp_path), resume=str(run))
    with pytest.raises(
        ConfigError, match=r"--resume .*nothing_here: no committed checkpoint there; give a run folder or a check"
    ):
        prepare(config_of(tmp_path, "name=second"), resume=str(tmp_path / "nothing_here"))
    with pytest.raises(ConfigError, match="no committed checkpoint there"):
        prepare(config_of(tmp_path, "name=second"), resume=str(run / "checkpoints" / "step-00000099"))


def test_fresh_moves_the_earlier_run_aside_and_deletes_nothing(tmp_path: Path, run: Path) -> None:
    saved = sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.name != ".lock")
    for number in (1, 2):  # twice in a second
        start = prepare(config_of(tmp_path), fresh=True)
        (note,) = start.notes
        aside = Path(note.removeprefix("the earlier run was moved to "))
        assert aside.is_dir() and start.resume is None
        if number == 1:
            assert sorted(str(p.relative_to(aside)) for p in aside.rglob("*")) == saved
    assert len(list((tmp_path / "runs").glob("lin.before-*"))) == 2
    with pytest.raises(
        ConfigError, match=r"--fresh cannot rename memory://bucket/lin on remote storage; choose another name=…"
    ):
        prepare(config_of(tmp_path, storage="memory://bucket"), fresh=True)


def test_fresh_without_an_earlier_run_moves_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with locked(run_root(config)):
        assert prepare(config, fresh=True).notes == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["lin"]


def try_lock(root: str, results: Any) -> None:
    try:
        with locked(root):
            results.put("locked")
    except ConfigError as error:
        results.put(str(error))


def attempt(root: str) -> str:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=try_lock, args=(root, results))
    process.start()
    words = results.get(timeout=30)
    process.join()
    return str(words)


def test_a_run_folder_has_one_writer_also_after_fresh(tmp_path: Path, run: Path) -> None:
    import os

    words = f"{run} is being written by another run (process {os.getpid()}); wait for it, or choose another name=…"
    with locked(str(run)):
        assert attempt(str(run)) == words
        prepare(config_of(tmp_path), fresh=True)
        assert attempt(str(run)) == words
    assert attempt(str(run)) == "locked"
    with locked("memory://bucket/run"):  # nothing to lock
        pass
