"""Attempt after attempt, without a cluster: what failures, resizes and stops mean for the run."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.config import JobConfig
from raydist.errors import ConfigError, Interrupted, TrainError
from raydist.keeper import Attempt
from raydist.rundir import RunDir
from raydist.runners import attempts as module
from raydist.runners.attempts import Attempts, StopFile
from raydist.screen import Screen
from raydist.start import Start
from tests.runs import config_of

Act = Callable[[Attempt], None]


class Room:
    """A cluster on which so many workers fit, one number an attempt (the last one stays)."""

    owned = False

    def __init__(self, *room: int) -> None:
        self.room = list(room)
        self.going: set[str] = set()

    def fit_workers(self, config: JobConfig) -> int:
        asked = config.scaling.workers
        low, high = (asked, asked) if isinstance(asked, int) else asked
        fits = self.room.pop(0) if len(self.room) > 1 else self.room[0]
        if fits < low:
            raise ConfigError(f"{low} workers wanted, {fits} fit")
        return min(fits, high)

    def fits(self, config: JobConfig) -> int:
        return self.room[0]

    def draining(self) -> set[str]:
        return self.going


class Workers:
    """Plays each attempt by the next of `acts`, and notes with how many workers it was started."""

    def __init__(self, *acts: Act) -> None:
        self.acts, self.started = list(acts), list[tuple[int, int, int | None]]()

    def __call__(self, config: JobConfig, attempt: Attempt, workers: int) -> Any:
        self.started.append((workers, attempt.restarts, attempt.micro_size))
        self.acts.pop(0)(attempt)


def finishes(attempt: Attempt) -> None:
    RunDir(attempt.start.root).write_summary({"status": "finished", "steps": 9})


def stops(reason: str) -> Act:
    return lambda attempt: RunDir(attempt.start.root).write_summary({"status": "interrupted", "steps": 5, "reason": reason})


def fails(error: str = "RuntimeError", **fields: Any) -> Act:
    def act(attempt: Attempt) -> None:
        told = {"rank": 1, "error": error, "reason": f"{error}: x", "raised": False, "micro_size": None, **fields}
        RunDir(attempt.start.root).append_event("worker_failed", **told)
        raise RuntimeError("x")

    return act


def attempts(folder: Path, room: Room, workers: Workers, *overrides: str) -> Attempts:
    (folder / "job").mkdir()
    config = config_of(folder / "job", *overrides)
    return Attempts(config, Start(str(folder / "run"), None), room, Screen(stream=io.StringIO()), workers)  # type: ignore[arg-type]


def events(run: Attempts, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDir(run.start.root).read_events() if event["kind"] == kind]


def test_a_run_that_ends_well_is_one_attempt(tmp_path: Path) -> None:
    workers = Workers(finishes)
    run = attempts(tmp_path, Room(2), workers, "scaling.workers=2")
    assert run.run()["steps"] == 9
    assert workers.started == [(2, 0, None)] and not events(run, "failure")


def test_failures_are_tried_again_as_often_as_allowed_and_then_raised(tmp_path: Path) -> None:
    workers = Workers(fails(), fails(), fails())
    run = attempts(tmp_path, Room(2), workers, "scaling.workers=2", "failure.max_restarts=2")
    with pytest.raises(TrainError, match=r"^rank 1: RuntimeError: x$"):
        run.run()
    assert [restarts for _, restarts, _ in workers.started] == [0, 1, 2]
    assert [event["reason"] for event in events(run, "failure")] == [
        f"rank 1: RuntimeError: x; restart {n} of 2" for n in (1, 2)
    ]
    summary = RunDir(run.start.root).read_summary()
    assert summary is not None and (summary["status"], summary["restarts"]) == ("failed", 2)


def test_an_error_of_the_job_is_not_tried_again(tmp_path: Path) -> None:
    workers = Workers(fails("TrainError", raised=True))
    with pytest.raises(TrainError):
        attempts(tmp_path, Room(2), workers, "scaling.workers=2").run()
    assert len(workers.started) == 1


def test_a_smaller_micro_batch_is_remembered(tmp_path: Path) -> None:
    workers = Workers(fails("OutOfMemoryError", micro_size=2), fails(), finishes)
    attempts(tmp_path, Room(2), workers, "scaling.workers=2", "batch.micro_size=auto").run()
    assert [micro for _, _, micro in workers.started] == [None, 2, 2]


def test_a_planned_stop_goes_on_with_the_workers_that_fit_and_is_no_restart(tmp_path: Path) -> None:
    workers = Workers(stops("resize: 2 workers fit now, 1 run"), stops("preemption notice for node n"), finishes)
    run = attempts(tmp_path, Room(1, 2, 1), workers, "scaling.workers=[1, 2]")
    run.run()
    assert workers.started == [(1, 0, None), (2, 0, None), (1, 0, None)]
    assert [event["reason"] for event in events(run, "resize")] == ["1 → 2 workers", "2 → 1 workers"]


def test_the_users_stop_ends_the_run(tmp_path: Path) -> None:
    run = attempts(tmp_path, Room(2), Workers(stops("Ctrl-C")), "scaling.workers=2")
    with pytest.raises(Interrupted, match="stopped at step 5 by Ctrl-C; the same command goes on from there"):
        run.run()


def test_a_failure_after_the_users_stop_is_not_tried_again(tmp_path: Path) -> None:
    run = attempts(tmp_path, Room(2), Workers(), "scaling.workers=2")

    def act(attempt: Attempt) -> None:
        run.stop.ask("SIGTERM")
        fails()(attempt)

    run.fit = Workers(act)
    with pytest.raises(
        Interrupted, match="stopped by SIGTERM, but a worker failed before it could save: rank 1: RuntimeError: x"
    ):
        run.run()


def test_a_restart_waits_for_nodes_and_then_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(fails(), finishes)
    attempts(tmp_path, Room(2, 0, 1, 2), workers, "scaling.workers=2").run()
    assert [number for number, _, _ in workers.started] == [2, 2]
    monkeypatch.setattr(module, "_NODE_PATIENCE_S", 0.0)
    with pytest.raises(TrainError, match="no restart is possible: 2 workers wanted, 1 fit"):
        (tmp_path / "second").mkdir()
        attempts(tmp_path / "second", Room(2, 1), Workers(fails()), "scaling.workers=2").run()


@pytest.mark.parametrize(
    ("going", "room", "words"),
    [({"node-9"}, 1, "preemption notice for node node-9"), (set(), 2, "resize: 2 workers fit now, 1 run")],
)
def test_notices_and_new_nodes_ask_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, going: set[str], room: int, words: str
) -> None:
    monkeypatch.setattr(module, "_CLUSTER_POLL_S", 0.0)
    there = Room(1, room)

    seen: list[str] = []

    def act(attempt: Attempt) -> None:
        there.going = going
        while (reason := StopFile(attempt.start.root).asked()) is None:
            time.sleep(0.01)
        there.going = set()
        seen.append(reason)
        stops(reason)(attempt)

    attempts(tmp_path, there, Workers(act, finishes), "scaling.workers=[1, 2]").run()
    assert seen[0] == words


def test_the_users_reason_outdoes_a_planned_one_and_the_first_counts(tmp_path: Path) -> None:
    stop = StopFile(str(tmp_path))
    assert stop.asked() is None
    for reason, counts in [
        ("resize: 2", "resize: 2"),
        ("preemption notice", "resize: 2"),
        ("Ctrl-C", "Ctrl-C"),
        ("SIGTERM", "Ctrl-C"),
    ]:
        stop.ask(reason)
        assert stop.asked() == counts
    stop.clear()
    assert stop.asked() is None and stop.reason is None


def test_workers_that_do_not_stop_in_time_are_given_up(tmp_path: Path) -> None:
    run = attempts(tmp_path, Room(1), Workers(), "scaling.workers=1", "failure.grace=0.1")
    over = threading.Event()

    def act(attempt: Attempt) -> None:
        run.stop.ask("SIGTERM")
        over.wait(30)

    run.fit = Workers(act)
    try:
        with pytest.raises(Interrupted, match=r"the workers did not save within failure.grace = 0.1 s"):
            run.run()
    finally:
        over.set()
