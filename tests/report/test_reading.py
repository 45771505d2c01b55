"""What a report reads: runs in folders, when steps were, names that tell runs apart, settings that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.errors import ConfigError
from raydist.report.reading import differences, find_runs, label, read_run, step_times
from tests.report.runs import event, write


def test_a_folder_is_a_run_or_holds_runs_two_levels_down(tmp_path: Path) -> None:
    one = write(tmp_path / "sweep", "one")
    two = write(tmp_path / "sweep" / "trials", "two")
    (tmp_path / "sweep" / "checkpoints").mkdir()
    assert find_runs(str(one)) == [str(one)]
    assert find_runs(f"{tmp_path}/sweep") == [str(one), str(two)]
    with pytest.raises(ConfigError, match="no run there; give the folder of a run"):
        find_runs(str(tmp_path / "sweep" / "checkpoints"))
    with pytest.raises(ConfigError, match="no run there"):
        find_runs(str(tmp_path / "nothing"))


def test_steps_are_placed_in_time_by_the_starts_and_their_own_seconds(tmp_path: Path) -> None:
    run = read_run(str(write(tmp_path)))
    # 0.5 s a step; step 4 was also evaluated for 0.25 s, before the checkpoint at 2.5 s; then the restart at 13 s
    assert run.times == pytest.approx({1: 0.5, 2: 1.0, 3: 1.5, 4: 2.25, 5: 13.5, 6: 14.0, 7: 14.5, 8: 15.25})
    assert step_times([], [event(0, "start", step=0)]) == {} and step_times(run.lines, []) == {}


def test_a_run_says_how_it_stands(tmp_path: Path) -> None:
    assert read_run(str(write(tmp_path, "done"))).status == "finished"
    assert read_run(str(write(tmp_path, "going", over=False))).status == "running or killed"
    run = read_run(str(write(tmp_path, "again")))
    assert run.series("eval_accuracy") == ([4, 8], [0.4, 0.8])
    assert [found["kind"] for found in run.trouble()] == ["failure", "restart", "bad_step"]


def test_labels_tell_runs_apart_and_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    runs = [read_run(str(write(tmp_path / folder, "same", lr))) for folder, lr in (("a", 0.1), ("b", 0.2), ("c", 0.1))]
    assert label(runs) == ["a/same", "b/same", "c/same"]
    assert label(runs[:1]) == ["same"]
    assert differences(runs) == [("optimizer.lr", [0.1, 0.2, 0.1])]
    assert differences(runs[:1]) == [] and differences([runs[0], runs[2]]) == []
