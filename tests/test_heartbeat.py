"""Each rank's account of itself: written whole, read by others, right even when the process is stopped between two beats."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from raydist.heartbeat import FOLDER, Heart, Progress, clear, end_process, last_collective, read_beats, stack_of
from raydist.storage import join
from tests.support import run_ranks


def test_a_beat_says_where_the_training_thread_is(tmp_path: Path) -> None:
    progress = Progress()
    heart = Heart(str(tmp_path), 3, progress, 0.05, "a", lambda: None)
    progress.enter("step", 12)
    heart.beat()
    found = read_beats(str(tmp_path))[3]
    assert (found.step, found.phase, found.moves, found.pid, found.attempt) == (12, "step", 1, os.getpid(), "a")
    assert found.stack == [], "only a rank that stands still gives its stack"
    progress.since -= 10.0
    heart.beat()
    found = read_beats(str(tmp_path))[3]
    assert found.count == 2 and 9.9 < found.stuck_s < 60
    assert any("test_heartbeat.py" in line and "in test_a_beat_says" in line for line in found.stack)


def test_the_place_is_newer_than_the_beat_when_the_process_stopped_in_between(tmp_path: Path) -> None:
    progress = Progress()
    heart = Heart(str(tmp_path), 0, progress, 60.0, "a", lambda: None)
    progress.enter("step", 4)
    heart.beat()
    progress.enter("evaluation", 5)
    found = read_beats(str(tmp_path))[0]
    assert (found.step, found.phase, found.moves) == (5, "evaluation", 2)


def test_an_object_store_has_the_beats_too() -> None:
    root = f"memory://raydist-beats-{os.getpid()}"
    progress = Progress()
    progress.enter("data", 9)
    Heart(root, 1, progress, 60.0, "a", lambda: None).beat()
    assert read_beats(root)[1].phase == "data"
    clear(root)
    assert read_beats(root) == {}


def test_the_heart_beats_and_watches_until_it_is_stopped(tmp_path: Path) -> None:
    looked = threading.Event()
    heart = Heart(str(tmp_path), 0, Progress(), 0.01, "a", looked.set)
    heart.start()
    assert looked.wait(10)
    heart.stop()
    assert not heart.is_alive()
    count = read_beats(str(tmp_path))[0].count
    time.sleep(0.05)
    assert read_beats(str(tmp_path))[0].count == count >= 2


def test_half_a_beat_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "rank-0.json").write_text('{"rank": 0, "st')
    assert read_beats(str(tmp_path)) == {}
    assert read_beats(join(str(tmp_path), "nowhere")) == {}


def test_a_stack_ends_with_the_innermost_frame_and_is_cut_at_the_outer_end() -> None:
    def deep(levels: int) -> list[str]:
        return deep(levels - 1) if levels else stack_of(threading.get_ident(), limit=3)

    lines = deep(10)
    assert len(lines) == 3
    assert lines[-1].endswith("in stack_of") and lines[-2].endswith("in deep") and lines[-3].endswith("in deep")
    assert stack_of(-1) == []


def test_ending_a_process_that_is_gone_is_no_error() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    end_process(child)


def _collective() -> str | None:
    import torch

    from raydist.watchdog import flight_recorder
    from raydist.world import from_env

    flight_recorder()
    world = from_env("gloo")
    try:
        torch.distributed.all_reduce(torch.zeros(5, 2))
        return last_collective()
    finally:
        world.close()


def test_the_flight_recorder_knows_the_last_collective_on_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert last_collective() is None
    for words in run_ranks(2, _collective):
        assert words is not None
        assert words.startswith("gloo:all_reduce #") and " of [5, 2] (" in words
