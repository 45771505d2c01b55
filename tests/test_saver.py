"""The background saver: training goes on at once, failures are told and harm nothing, memory is reused."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import commit as commit_module
from raydist import saver as saver_module
from raydist.checkpoint import TrainState, list_checkpoints, load, load_latest
from raydist.errors import CheckpointError
from raydist.rundir import RunDir
from raydist.saver import Saver, Staging
from raydist.trainer import Trainer
from tests.runs import local_run


@dataclass(frozen=True)
class Best:
    metric: str = "eval_loss"
    mode: str = "min"


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))

    @property
    def kinds(self) -> list[tuple[str, int]]:
        return [(kind, fields["step"]) for kind, fields in self]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "raydist-saver"]


def state(value: float) -> TrainState:
    return TrainState(model={"w": torch.full((1000,), value)}, optimizer={"state": {0: {"m": torch.full((7,), value)}}})


def steps(store: Path) -> list[int]:
    return [found.step for found in list_checkpoints(str(store))]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_keeps_and_tells(tmp_path: Path, asynchronous: bool) -> None:
    events = Events()
    saver = Saver(str(tmp_path), keep=1, best=Best(), asynchronous=asynchronous, on_event=events)
    for step, loss in {1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.3}.items():
        saver.save(state(float(step)), step, {"eval_loss": loss})
    saver.close()
    assert events.kinds == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3), ("checkpoint", 4)]
    assert [fields["best"] for _, fields in events] == [True, True, False, False]
    assert all(fields["finite"] and fields["seconds"] >= 0 for _, fields in events)
    assert steps(tmp_path) == [2, 4] and saver.last_saved == 4 and saver.failure is None


def test_protected_steps_stay(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), keep=1)
    for step in (1, 2, 3):
        saver.save(state(1.0), step, protect={1})
    saver.close()
    assert steps(tmp_path) == [1, 3]


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    real = saver_module.commit
    monkeypatch.setattr(saver_module, "commit", lambda *args: (held.wait(20), real(*args))[1])
    saver = Saver(str(tmp_path))
    live = state(1.0)
    live.model["tied"] = live.model["w"]
    live.counters["step"] = 1
    saver.save(live, 1)
    live.model["w"].fill_(2.0)
    live.optimizer["state"][0]["m"].fill_(2.0)
    live.counters["step"] = 2
    assert steps(tmp_path) == []
    held.set()
    saver.wait()
    loaded, _ = load(list_checkpoints(str(tmp_path))[0].uri)
    assert torch.equal(loaded.model["w"], torch.full((1000,), 1.0)) and loaded.counters["step"] == 1
    assert torch.equal(loaded.model["tied"], loaded.model["w"])
    assert torch.equal(loaded.optimizer["state"][0]["m"], torch.full((7,), 1.0))
    saver.close()


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = 0
    most = 0
    real = saver_module.commit

    def counted(*args: Any) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return real(*args)
        finally:
            running -= 1

    monkeypatch.setattr(saver_module, "commit", counted)
    saver = Saver(str(tmp_path), keep=99)
    for step in range(10):
        saver.save(state(float(step)), step)
    saver.close()
    assert most == 1 and steps(tmp_path) == list(range(10))
    for found in list_checkpoints(str(tmp_path)):
        assert torch.equal(load(found.uri)[0].model["w"], torch.full((1000,), float(found.step)))


def test_staging_memory_is_reused_and_follows_changes() -> None:
    staging = Staging()
    first = staging.pack(state(1.0))
    second = staging.pack(state(2.0))
    assert first.tensors["model"]["w"].data_ptr() == second.tensors["model"]["w"].data_ptr()
    assert torch.equal(second.tensors["model"]["w"], torch.full((1000,), 2.0))
    other = TrainState(model={"w": torch.zeros(5, dtype=torch.bfloat16), "v": torch.ones(2, 3).t()})
    third = staging.pack(other)
    assert third.tensors["model"]["w"].dtype == torch.bfloat16 and third.tensors["model"]["v"].is_contiguous()
    assert torch.equal(third.tensors["model"]["v"], torch.ones(3, 2))
    assert set(staging._buffers) == {"model.w", "model.v"}


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the writing of one file of a checkpoint fail as a full disk does."""
    error = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    if name == "model.safetensors":
        monkeypatch.setattr(commit_module, "write_tensors", refuse)
    elif name == "optimizer.pt":
        monkeypatch.setattr(commit_module.torch, "save", refuse)
    elif name == "rename":
        monkeypatch.setattr(commit_module, "_appear", refuse)
    else:
        real = commit_module.write_bytes
        monkeypatch.setattr(
            commit_module, "write_bytes", lambda path, data: refuse() if path.name == name else real(path, data)
        )


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json", "rename"])
def test_a_full_disk_is_told_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, asynchronous: bool
) -> None:
    events = Events()
    saver = Saver(str(tmp_path), keep=1, asynchronous=asynchronous, on_event=events)
    saver.save(state(1.0), 1)
    saver.wait()
    with monkeypatch.context() as patch:
        full_disk(patch, name)
        saver.save(state(2.0), 2)
        saver.save(state(1.5), 1)  # over the one that is there
        saver.wait()
    assert events.kinds == [("checkpoint", 1), ("checkpoint_failed", 2), ("checkpoint_failed", 1)]
    reason = events[1][1]["reason"]
    assert "cannot write checkpoint" in reason and "step-00000002: OSError" in reason and "No space left on device" in reason
    assert saver.failure is not None and saver.last_saved == 1
    assert os.listdir(tmp_path) == ["step-00000001"]
    loaded = load_latest(str(tmp_path), pytest.fail)
    assert loaded is not None and torch.equal(loaded[0].model["w"], torch.full((1000,), 1.0))
    saver.save(state(3.0), 3)
    saver.close()
    assert saver.failure is None and steps(tmp_path) == [3]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    at = tmp_path / "tiny"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield at
    subprocess.run(["umount", str(at)], check=True)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_disk_that_is_really_full(tiny_disk: Path, part: str) -> None:
    events = Events()
    saver = Saver(str(tiny_disk), on_event=events)
    saver.save(state(1.0), 1)
    big = torch.zeros(1_000_000)
    saver.save(TrainState(model={"w": big}) if part == "model" else TrainState(model={}, optimizer={"x": big}), 2)
    saver.close()
    assert events.kinds == [("checkpoint", 1), ("checkpoint_failed", 2)]
    assert "No space left on device" in events[1][1]["reason"]
    assert os.listdir(tiny_disk) == ["step-00000001"] and load_latest(str(tiny_disk), pytest.fail) is not None


def test_a_store_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    events = Events()
    with_path = Saver(str(tmp_path / "file" / "checkpoints"), on_event=events)
    with_path.save(state(1.0), 1)
    with_path.close()
    assert events.kinds == [("checkpoint_failed", 1)] and "NotADirectoryError" in events[0][1]["reason"]


def test_a_failed_clearing_up_is_told_and_the_checkpoint_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", "step-00000001")

    events = Events()
    saver = Saver(str(tmp_path), on_event=events)
    monkeypatch.setattr(saver_module, "tidy", refuse)
    saver.save(state(1.0), 1)
    saver.close()
    assert events.kinds == [("checkpoint_prune_failed", 1), ("checkpoint", 1)]
    assert "PermissionError" in events[0][1]["reason"] and saver.last_saved == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_cannot_be_saved_raises_where_save_is_called(tmp_path: Path, asynchronous: bool) -> None:
    saver = Saver(str(tmp_path), asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match=r"extra\['x'\] is a builtins.object"):
        saver.save(TrainState(model={}, extra={"x": object()}), 1)
    saver.save(state(2.0), 2)
    saver.close()
    assert steps(tmp_path) == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_states_are_staged_in_pinned_memory(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path))
    weights = torch.full((1 << 22,), 1.0, device="cuda")
    for step in (1, 2):
        weights.fill_(float(step))
        saver.save(TrainState(model={"w": weights, "tied": weights, "n": torch.tensor(3)}), step)
        weights.fill_(-1.0)
    assert saver._staging._buffers["model.w"].is_pinned()
    saver.close()
    for found in list_checkpoints(str(tmp_path)):
        loaded, _ = load(found.uri)
        assert torch.equal(loaded.model["tied"], torch.full((1 << 22,), float(found.step)))


def test_the_whole_state_is_gathered_for_saves_alone_not_for_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    state = Trainer.state

    def counted(trainer: Trainer, *args: Any) -> TrainState:
        gathered.append(trainer.counters.step)
        return state(trainer, *args)

    monkeypatch.setattr(Trainer, "state", counted)
    run = local_run(tmp_path, xs=[1.0] * 5, global_size=1, checkpoint={"every": {"steps": 2}, "async": False})
    assert gathered == [2, 4, 5]
    summary = RunDir(str(run)).read_summary()
    assert summary is not None
    assert [summary[key] for key in ("steps", "applied", "skipped", "rows_seen", "epochs")] == [5, 5, 0, 5, 1]
