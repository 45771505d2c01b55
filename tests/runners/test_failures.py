"""Whose error came first, and whether another attempt can help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.errors import CheckpointError, DataError, TrainError
from raydist.heartbeat import FOLDER, Beat, write_beat
from raydist.keeper import Attempt
from raydist.rundir import RunDir
from raydist.runners.failures import failure_of, words_of, worker_failures
from raydist.start import Start
from raydist.storage import join
from raydist.watchdog import Verdict, Watchdog
from tests.runs import config_of

BROKEN = "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:5"


class ActorDiedError(Exception):
    """Named as Ray names the death of a process."""


class WorkerGroupError(Exception):
    """Named as Ray Train names it: what happened to each rank."""

    def __init__(self, failures: dict[int, BaseException]) -> None:
        super().__init__("worker group")
        self.worker_failures = failures


def tell(root: Path, rank: int, error: str, reason: str, raised: bool = False, micro_size: int | None = None) -> None:
    run = RunDir(str(root))
    run.append_event("worker_failed", rank=rank, error=error, reason=reason, raised=raised, micro_size=micro_size)


def failure(root: Path, error: BaseException, since: float = 0.0, *overrides: str) -> Any:
    (root / "job").mkdir(exist_ok=True)
    return failure_of(error, Attempt(Start(str(root), None)), since, config_of(root / "job", *overrides))


def test_a_ranks_own_error_beats_a_neighbours_broken_connection(tmp_path: Path) -> None:
    tell(tmp_path, 0, "RuntimeError", BROKEN)
    tell(tmp_path, 1, "KeyError", "KeyError: 'label'")
    found = failure(tmp_path, WorkerGroupError({0: RuntimeError(BROKEN), 1: KeyError("label")}))
    assert (found.rank, str(found.error), found.retry) == (1, "rank 1: KeyError: 'label'", True)


def test_a_silent_death_beats_the_broken_connections_it_causes(tmp_path: Path) -> None:
    tell(tmp_path, 0, "RuntimeError", BROKEN)
    found = failure(tmp_path, WorkerGroupError({0: RuntimeError(BROKEN), 1: ActorDiedError("gone")}))
    assert found.rank == 1 and found.retry
    assert str(found.error) == "rank 1 died: its process ended without a word (killed, out of memory, or its node is gone)"


def test_a_rank_that_holds_a_part_of_the_model_is_named_with_it(tmp_path: Path) -> None:
    attempt = Attempt(Start(str(tmp_path), None))
    (tmp_path / "job").mkdir()
    for key, words in (
        (attempt.key, "stage 1 (layers a … b), rank 1 died: its process"),
        ("earlier", "rank 1 died: its process"),
    ):
        beat = Beat(1, 7, "step", 1, 9.0, 1, 1, "host", attempt=key, holds="stage 1 (layers a … b)")
        write_beat(join(str(tmp_path), FOLDER), beat)
        found = failure_of(WorkerGroupError({1: ActorDiedError("gone")}), attempt, 0.0, config_of(tmp_path / "job"))
        assert str(found.error).startswith(words)


def test_the_watchdogs_verdict_beats_everything(tmp_path: Path) -> None:
    attempt = Attempt(Start(str(tmp_path), None))
    beat = Beat(2, 7, "step", 1, 9.0, 1, 1, "host", attempt=attempt.key)
    write_beat(join(str(tmp_path), FOLDER), beat)
    Watchdog(str(tmp_path), 3, 1.0, attempt.key).give_order(Verdict(2, "rank 2 is stuck", beat))
    tell(tmp_path, 0, "KeyError", "KeyError: 'label'")
    (tmp_path / "job").mkdir()
    found = failure_of(WorkerGroupError({0: KeyError()}), attempt, 0.0, config_of(tmp_path / "job"))
    assert (found.rank, str(found.error), found.retry) == (2, "rank 2 is stuck", True)


@pytest.mark.parametrize(
    ("name", "kind"), [("DataError", DataError), ("TrainError", TrainError), ("CheckpointError", CheckpointError)]
)
def test_an_error_of_the_job_is_raised_again_as_it_was_and_not_tried_again(tmp_path: Path, name: str, kind: type) -> None:
    tell(tmp_path, 0, "RuntimeError", BROKEN)
    tell(tmp_path, 1, name, "data.train: no rows", raised=True)
    found = failure(tmp_path, WorkerGroupError({}))
    assert type(found.error) is kind and str(found.error) == "data.train: no rows" and not found.retry


def test_out_of_memory_goes_on_smaller_only_where_the_size_is_raydists_to_choose(tmp_path: Path) -> None:
    tell(tmp_path, 1, "OutOfMemoryError", "OutOfMemoryError: 1 GiB", micro_size=4)
    found = failure(tmp_path, WorkerGroupError({}), 0.0, "batch.micro_size=auto")
    assert found.retry and found.micro_size == 4 and "going on with micro-batches of 4" in str(found.error)
    found = failure(tmp_path, WorkerGroupError({}), 0.0, "batch.micro_size=2")
    assert not found.retry and "Lower batch.micro_size, or set it to auto" in str(found.error)


def test_words_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    tell(tmp_path, 1, "KeyError", "KeyError: 'before'")
    found = failure(tmp_path, ValueError("the controller"), since=float("inf"))
    assert str(found.error) == "Ray Train failed: ValueError: the controller" and found.rank is None and found.retry


def test_when_every_rank_tells_of_a_broken_connection_the_first_one_is_named(tmp_path: Path) -> None:
    for rank in (1, 0):
        tell(tmp_path, rank, "RuntimeError", BROKEN)
    found = failure(tmp_path, WorkerGroupError({rank: RuntimeError(BROKEN) for rank in (0, 1)}))
    assert found.rank == 1 and "Connection closed" in str(found.error) and found.retry


def test_rays_account_is_found_in_whatever_it_is_wrapped_in() -> None:
    inner = WorkerGroupError({3: ValueError("x")})
    outer = RuntimeError("trainer")
    outer.__cause__ = inner
    wrapped = RuntimeError("result")
    wrapped.error = outer  # type: ignore[attr-defined]
    assert list(worker_failures(wrapped)) == [3]
    assert worker_failures(ValueError("nothing")) == {}


def test_words_are_the_first_line_without_rays_traceback() -> None:
    assert words_of(ValueError("\n  bad value\n  more\n")) == "ValueError: bad value"
    assert words_of(ValueError()) == "ValueError"
