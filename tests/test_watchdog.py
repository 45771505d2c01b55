"""Who is behind: four situations, four sentences, and the order that ends every rank once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist import storage
from raydist.heartbeat import FOLDER, Beat, write_beat
from raydist.storage import join
from raydist.watchdog import Guard, Watchdog, check_interval, in_collective, is_stopped, judge, odd_one, verdict_of

BACKWARD = ["raydist/passes.py:112 in _pass", "raydist/precision.py:60 in backward", "torch/autograd/graph.py:9 in _engine_run"]
AGREES = ["raydist/loop.py:80 in fit", "raydist/world.py:120 in sum", "torch/distributed/c10d.py:5 in all_reduce"]
ODD = ["my/task.py:3 in loss", "torch/distributed/c10d.py:7 in barrier"]
PYTHON = ["raydist/passes.py:112 in _pass", "my/task.py:9 in loss"]


def beat(rank: int, step: int = 7, phase: str = "step", stack: list[str] | None = None, **more: object) -> Beat:
    told = {"moves": step * 10, "stuck_s": 12.0, "count": 3, "pid": os.getpid(), "host": socket.gethostname(), "attempt": "a"}
    return Beat(rank=rank, step=step, phase=phase, stack=BACKWARD if stack is None else stack, **{**told, **more})  # type: ignore[arg-type]


@pytest.fixture
def stopped() -> Iterator[int]:
    """The process id of a child in state T."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    yield child.pid
    child.kill()
    child.wait()
    child.stdout.close()
    child.stdin.close()


# -- the sentence -----------------------------------------------------------------------------------------------------


def test_a_rank_outside_of_any_collective_is_the_one_behind() -> None:
    found = judge([beat(0), beat(1, stack=PYTHON), beat(2), beat(3)], {})
    assert found.rank == 1
    assert "is stuck in Python (step)" in found.words and "my/task.py:9 in loss" in found.words
    assert "waiting for it: rank 0 step of step 7, rank 2" in found.words


def test_waiting_for_data_has_its_own_sentence() -> None:
    found = judge([beat(0), beat(1), beat(2, phase="data", stack=["torch/utils/data/dataloader.py:1 in __next__"])], {})
    assert found.rank == 2 and "waits for data since 12 s" in found.words


def test_of_several_ranks_outside_the_earliest_step_is_the_one_behind() -> None:
    assert judge([beat(0, step=8, stack=PYTHON), beat(1, step=7, stack=PYTHON)], {}).rank == 1


def test_a_stopped_process_is_told_from_one_that_runs_no_python(stopped: int) -> None:
    words = judge([beat(0), beat(1, pid=stopped)], {1: 9.0}).words
    assert words.startswith("rank 1 ") and "is stopped (SIGSTOP" in words and "9 s ago" in words
    words = judge([beat(0), beat(1)], {1: 9.0}).words
    assert "runs no Python since 9 s" in words
    assert is_stopped(beat(1, pid=stopped)) and not is_stopped(beat(1))
    assert not is_stopped(beat(1, pid=stopped, host="another-machine")), "process ids of another machine mean nothing here"


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_rank_in_a_collective_of_its_own_is_named_among_three(odd: int) -> None:
    found = judge([beat(rank, stack=ODD if rank == odd else BACKWARD) for rank in range(3)], {})
    assert found.rank == odd
    assert "is in a collective that the others do not enter, at my/task.py:3 in loss" in found.words


@pytest.mark.parametrize("odd", [0, 1])
def test_among_two_the_one_in_user_code_is_odd_and_not_the_one_where_every_step_waits(odd: int) -> None:
    for usual in (BACKWARD, AGREES):
        assert odd_one([beat(rank, stack=ODD if rank == odd else usual) for rank in range(2)]).rank == odd


def test_what_counts_as_waiting_in_a_collective() -> None:
    assert in_collective(beat(0)) and in_collective(beat(0, stack=AGREES)) and in_collective(beat(0, stack=ODD))
    assert not in_collective(beat(0, stack=PYTHON)) and not in_collective(beat(0, stack=[]))
    assert not in_collective(beat(0, phase="data", stack=ODD))


# -- when it looks ------------------------------------------------------------------------------------------------------


def put(root: Path, *beats: Beat) -> None:
    for one in beats:
        write_beat(join(str(root), FOLDER), one)


def test_nothing_is_said_while_one_rank_moves(tmp_path: Path) -> None:
    dog = Watchdog(str(tmp_path), 2, timeout=10.0, attempt="a")
    for second in range(0, 60, 4):
        put(tmp_path, beat(0, moves=second, count=second), beat(1, count=second, stack=PYTHON))
        assert dog.look(now=float(second)) is None


def test_a_verdict_comes_once_nothing_moved_for_the_timeout(tmp_path: Path) -> None:
    dog, counts = Watchdog(str(tmp_path), 2, timeout=10.0, attempt="a"), []
    for second in range(16):
        put(tmp_path, beat(0, count=second), beat(1, count=second, stack=PYTHON))
        counts.append(dog.look(now=float(second)))
    assert [second for second, found in enumerate(counts) if found is not None] == [10, 11, 12, 13, 14, 15]
    assert counts[10] is not None and counts[10].rank == 1


def test_a_process_that_is_plainly_stopped_is_named_long_before_the_timeout(tmp_path: Path, stopped: int) -> None:
    watchdog = Watchdog(str(tmp_path), 2, 45.0, "a")
    put(tmp_path, beat(0), beat(1, pid=stopped, phase="start", holds="stage 1 (layers b … c)"))
    assert watchdog.look(100.0) is None
    put(tmp_path, beat(0, count=4))
    assert watchdog.look(104.0) is None
    put(tmp_path, beat(0, count=5))
    verdict = watchdog.look(105.5)
    assert verdict is not None and verdict.rank == 1
    assert (
        verdict.words.startswith("stage 1 (layers b … c), rank 1 (step 7, process") and "is stopped (SIGSTOP" in verdict.words
    )


def test_slow_phases_get_more_time_but_a_silent_rank_does_not(tmp_path: Path) -> None:
    dog = Watchdog(str(tmp_path), 2, timeout=10.0, attempt="a")
    for second in range(0, 99, 3):
        put(tmp_path, beat(0, phase="checkpoint", count=second), beat(1, count=second))
        assert dog.look(now=float(second)) is None
    put(tmp_path, beat(0, phase="checkpoint", count=100), beat(1, count=100))
    found = dog.look(now=100.0)
    assert found is not None and found.rank == 0
    silent = Watchdog(str(tmp_path), 2, timeout=10.0, attempt="a")
    for second in range(11):
        put(tmp_path, beat(0, phase="checkpoint", count=200 + second), beat(1, count=100))
        found = silent.look(now=float(second))
    assert found is not None and found.rank == 1


def test_ranks_that_have_not_started_and_beats_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    dog = Watchdog(str(tmp_path), 2, timeout=1.0, attempt="a")
    put(tmp_path, beat(0, stack=PYTHON), beat(1, stack=PYTHON, attempt="before"))
    assert dog.look(now=0.0) is None and dog.look(now=50.0) is None


# -- the order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["local", "memory"])
def test_only_the_first_order_counts_and_only_for_its_attempt(tmp_path: Path, root: str) -> None:
    where = str(tmp_path) if root == "local" else f"memory://raydist-orders-{os.getpid()}"
    put_at = join(where, FOLDER)
    write_beat(put_at, beat(0))
    verdict = judge([beat(0), beat(1, stack=PYTHON)], {})
    other = judge([beat(0, stack=PYTHON), beat(1)], {})
    first, second = Watchdog(where, 2, 1.0, "a"), Watchdog(where, 2, 1.0, "a")
    assert first.order() is None
    assert first.give_order(verdict) and not second.give_order(other)
    assert verdict_of(where, "a") == (1, verdict.words)
    assert verdict_of(where, "b") is None
    storage.remove(where)


def test_looks_are_frequent_enough_to_name_a_stall_in_time() -> None:
    assert check_interval(60.0) == 1.0 and check_interval(60.0, local=False) == 3.0
    assert check_interval(2.0) == pytest.approx(0.1) and check_interval(0.1) == 0.05


@pytest.mark.parametrize(("workers", "looking"), [(1, 1), (8, 8), (15, 15), (16, 8), (64, 8), (1000, 8)])
def test_few_of_many_ranks_look_at_everyone(tmp_path: Path, workers: int, looking: int) -> None:
    watchdog = Watchdog(str(tmp_path), workers, 1.0, "a")
    looks = [rank for rank in range(workers) if Guard(watchdog, rank, lambda _: None).looks]
    assert len(looks) == looking and looks[0] == 0
    assert max(b - a for a, b in zip(looks, [*looks[1:], workers], strict=True)) <= -(-workers // 8)
