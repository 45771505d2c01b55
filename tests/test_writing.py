"""A checkpoint's files: what the library reads of them, and when the files of a pruned checkpoint are written over."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raydist.checkpoint import load, verify
from raydist.commit import dispose_stale
from raydist.saver import Saver
from raydist.state import TrainState
from raydist.writing import write_tensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    named = {f"a.{n}é": (torch.arange(3 * n).reshape(3, n) % 2).to(dtype) for n, dtype in enumerate(DTYPES)}
    named |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    entry = write_tensors(tmp_path / "x.safetensors", named)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == named.keys() and entry["size"] == os.path.getsize(tmp_path / "x.safetensors")
    for name, tensor in named.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(
            read[name].float() if tensor.itemsize == 1 else read[name], tensor.float() if tensor.itemsize == 1 else tensor
        )


def state(value: float, size: int = 1000) -> TrainState:
    return TrainState(model={"w": torch.full((size,), value)}, optimizer={"m": torch.full((size,), -value)})


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(str(tmp_path), keep=1, asynchronous=False)


def weights(store: Path, step: int) -> Path:
    return store / f"step-{step:08d}" / "model.safetensors"


def test_a_pruned_checkpoints_files_are_written_over_and_none_stays(tmp_path: Path, saver: Saver) -> None:
    saver.save(state(1), 1)
    pages = weights(tmp_path, 1).stat().st_ino
    saver.save(state(2), 2)
    assert sum(name.startswith(".tmp-removed-") for name in os.listdir(tmp_path)) == 1
    dispose_stale(str(tmp_path))  # another saver of this process may do so
    saver.save(state(3, size=10), 3)  # shorter than what it overwrites
    assert weights(tmp_path, 3).stat().st_ino == pages
    assert verify(str(weights(tmp_path, 3).parent)) == []
    loaded = load(str(weights(tmp_path, 3).parent))[0]
    assert torch.equal(loaded.model["w"], torch.full((10,), 3.0)) and torch.equal(
        loaded.optimizer["m"], torch.full((10,), -3.0)
    )
    saver.close()
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_file_with_another_name_is_left_alone(tmp_path: Path, saver: Saver) -> None:
    saver.save(state(1), 1)
    backup = tmp_path.with_name("backup.safetensors")
    os.link(weights(tmp_path, 1), backup)
    before = backup.read_bytes()
    for step in (2, 3, 4):
        saver.save(state(step), step)
    assert backup.read_bytes() == before
    saver.close()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_somebody_reads_is_left_alone(tmp_path: Path, saver: Saver, mapped: bool) -> None:
    saver.save(state(1), 1)
    before = weights(tmp_path, 1).read_bytes()
    file = open(weights(tmp_path, 1), "rb")  # noqa: SIM115
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if mapped:
        file.close()
    for step in (2, 3, 4):
        saver.save(state(step), step)
    assert view[:] == before
    view.close()
    file.close()
    saver.close()


def test_what_cannot_be_written_over_is_written_anew(tmp_path: Path, saver: Saver) -> None:
    saver.save(state(1), 1)
    saver.save(state(2), 2)
    (spare,) = tmp_path.glob(".tmp-removed-*")
    (spare / "model.safetensors").unlink()
    (spare / "model.safetensors").symlink_to(weights(tmp_path, 2))
    saver.save(state(3), 3)
    assert verify(str(weights(tmp_path, 3).parent)) == [] and not weights(tmp_path, 3).is_symlink()
    saver.close()
