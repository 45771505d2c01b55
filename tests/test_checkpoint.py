"""Committed or absent: what is saved comes back equal, what is damaged is found, and a dead writer leaves nothing listed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist import commit as commit_module
from raydist import storage
from raydist.checkpoint import (
    TrainState,
    best_of,
    check_model_matches,
    list_checkpoints,
    load,
    load_latest,
    prune,
    save,
    verify,
)
from raydist.errors import CheckpointError
from raydist.manifest import render


@dataclass(frozen=True)
class Best:
    metric: str = "eval_loss"
    mode: str = "min"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints") if request.param == "local" else f"memory://{uuid.uuid4().hex}/checkpoints"


def small(step: int, value: float | None = None) -> TrainState:
    weight = torch.full((4, 3), float(step) if value is None else value)
    return TrainState(model={"w": weight}, ema={"w": weight}, optimizer={"state": {0: {"m": weight}}}, counters={"step": step})


def steps(store: str) -> list[int]:
    return [found.step for found in list_checkpoints(store)]


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


# -- round trip -------------------------------------------------------------------------------------------------------


def test_a_whole_state_comes_back_equal(store: str) -> None:
    state = TrainState(
        model={
            "bf16": torch.randn(3, 2).bfloat16(), "half": torch.randn(2).half(), "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4), "ints": torch.arange(5), "bool": torch.tensor([True, False]),
            "u8": torch.arange(3, dtype=torch.uint8), "c64": torch.randn(2, dtype=torch.complex64),
            "f8": torch.randn(4).to(torch.float8_e4m3fn).view(torch.uint8), "f64": torch.randn(2, dtype=torch.float64),
        },
        optimizer={
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(3)}, 1: {"momentum_buffer": None, "n": 3}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "fused": None, "name": "a", "params": [0, 1], "on": True}],
        },
        schedule={"last_epoch": 4, "base_lrs": [0.1], "_last_lr": [0.05]},
        scaler={"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0},
        ema={"bf16": torch.randn(3, 2).bfloat16()},
        position={"epoch": 2, "index": 17},
        counters={"step": 42, "applied": 41, "skipped": 1, "rows_seen": 2688, "loss_total": float("nan"), "x": float("inf")},
        best={"step": 40, "metric": "eval_loss", "value": 0.25},
        rng={"torch": torch.get_rng_state(), "python": (3, (1, 2, 3), None), "blob": b"\x00\xff"},
        data={"fingerprint": "abc", "fit": {"mean": [0.1, -2e300], "index": {"label": ["a", "ü"]}}},
        config={"name": "digits", "train": {"epochs": 3, "max_steps": None}},
        extra={"nested": {"list": [1, 2.5, "x", None, True]}},
        buffers=["scalar"],
    )  # fmt: skip
    uri = save(store, state, 42, metrics={"eval_loss": 0.25, "odd": float("nan")})
    loaded, manifest = load(uri)
    assert np.isnan(loaded.counters.pop("loss_total")) and np.isnan(state.counters.pop("loss_total"))
    assert_equal(vars(loaded), vars(state))
    assert manifest["step"] == 42 and manifest["metrics"] == {"eval_loss": 0.25, "odd": None} and manifest["finite"] is True
    assert uri == storage.join(store, "step-00000042") and verify(uri) == []
    assert set(storage.sizes(uri)) == {"manifest.json", "model.safetensors", "ema.safetensors", "optimizer.pt", "state.json"}


def test_without_ema_there_is_no_ema_file(store: str) -> None:
    uri = save(store, TrainState(model={}), 1)
    assert set(storage.sizes(uri)) == {"manifest.json", "model.safetensors", "optimizer.pt", "state.json"}
    assert_equal(vars(load(uri)[0]), vars(TrainState(model={})))


def test_an_optimizer_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 0, 5)
    uri = save(str(tmp_path), TrainState(model=model.state_dict(), optimizer=optimizer.state_dict()), 5)
    train(model, optimizer, 5, 9)
    again, optimizer_again = make()
    state, _ = load(uri)
    check_model_matches(again.state_dict(), state.model)
    again.load_state_dict(state.model)
    optimizer_again.load_state_dict(state.optimizer)
    train(again, optimizer_again, 5, 9)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_tied_and_overlapping_tensors_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    model = {
        "embed": parameter, "head": parameter, "alias": parameter.detach(),
        "whole": base, "flat": base.view(-1), "rows": base[1:], "transposed": base.t(), "strided": base[:, ::2],
        "expanded": torch.tensor([2.0]).expand(5), "empty_a": torch.zeros(0), "empty_b": torch.zeros(0),
        "conj": torch.tensor([1 + 2j]).conj(),
    }  # fmt: skip
    uri = save(str(tmp_path), TrainState(model=model, ema=dict(model)), 1)
    state, _ = load(uri)
    for part in (state.model, state.ema):
        assert part is not None and set(part) == set(model)
        assert all(torch.equal(part[name], model[name]) for name in model)
        assert part["embed"].data_ptr() == part["head"].data_ptr() == part["alias"].data_ptr()
        assert part["whole"].data_ptr() != part["flat"].data_ptr()
    assert os.path.getsize(f"{uri}/model.safetensors") < 2000


def test_values_that_only_look_special_are_saved_plainly(tmp_path: Path) -> None:
    class Kind(int, Enum):
        A = 3

    group = {"lr": np.float64(0.1), "n": np.int32(2), "kind": Kind.A, "dtype": torch.float32, "size": torch.Size([1, 2])}
    state, _ = load(save(str(tmp_path), TrainState(model={}, optimizer={"param_groups": [group]}, extra={"n": np.int64(3)}), 1))
    assert state.optimizer["param_groups"] == [
        {"lr": 0.1, "n": 2, "kind": 3, "dtype": torch.float32, "size": torch.Size([1, 2])}
    ]
    assert state.extra == {"n": 3} and type(state.optimizer["param_groups"][0]["kind"]) is int


# -- refused at save time ---------------------------------------------------------------------------------------------


class Odd:
    pass


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (TrainState({}, optimizer={"param_groups": [{"lr": 0.1, "hook": Odd()}]}),
         r"optimizer\['param_groups'\]\[0\]\['hook'\] is a .*Odd, which a checkpoint cannot hold: only tensors, numbers"),
        (TrainState({}, schedule={"lr_lambdas": [lambda step: 1.0]}), r"schedule\['lr_lambdas'\]\[0\] is a builtins.function"),
        (TrainState({}, rng={"numpy": np.zeros(3)}), r"rng\['numpy'\] is a numpy.ndarray.*torch.from_numpy"),
        (TrainState({}, optimizer={"state": {(1, 2): 3}}), r"optimizer\['state'\] has the key \(1, 2\) \(tuple\)"),
        (TrainState({}, extra={"x": Odd()}), r"extra\['x'\] is a .*Odd; this part of a checkpoint is JSON"),
        (TrainState({}, data={"fit": {1: 2}}), r"data\['fit'\] has the key 1; this part of a checkpoint is JSON"),
        (TrainState({"w": torch.eye(3).to_sparse()}), r"model\['w'\] is a torch.sparse_coo tensor"),
        (TrainState({"w": torch.empty(3, device="meta")}), r"model\['w'\] is a meta tensor"),
        (TrainState({"w": torch.zeros(3, dtype=torch.complex128)}), r"model\['w'\] is complex128"),
    ],
)  # fmt: skip
def test_a_value_that_could_not_be_read_back_is_refused_with_its_name(tmp_path: Path, state: TrainState, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        save(str(tmp_path / "c"), state, 1)
    assert not (tmp_path / "c").exists()


# -- damage -----------------------------------------------------------------------------------------------------------

FILES = ["manifest.json", "model.safetensors", "ema.safetensors", "optimizer.pt", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found(tmp_path: Path, name: str) -> None:
    uri = save(str(tmp_path), small(1), 1, metrics={"eval_loss": 0.5})
    path = Path(uri, name)
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 400)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
            assert verify(uri), f"{name}: byte {at} flipped by {flip:#x}"
    with pytest.raises(CheckpointError, match=f"{uri}.*{name}"):
        load(uri)
    path.write_bytes(good)
    assert verify(uri) == []


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_addition_is_found(tmp_path: Path, name: str) -> None:
    uri = save(str(tmp_path), small(1), 1)
    path = Path(uri, name)
    good = path.read_bytes()
    for content in [good[:at] for at in range(0, len(good), max(1, len(good) // 50))] + [good[:-1], good + b"\n", good + b"x"]:
        path.write_bytes(content)
        assert verify(uri), f"{name}: {len(content)} of {len(good)} bytes"
        with pytest.raises(CheckpointError):
            load(uri)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_the_one_before_is_loaded(store: str, name: str) -> None:
    save(store, small(1), 1)
    uri = save(store, small(2), 2)
    storage.remove(storage.join(uri, name))
    assert name in verify(uri)[0]
    said: list[str] = []
    loaded = load_latest(store, said.append)
    assert loaded is not None and loaded[1]["step"] == 1 and torch.equal(loaded[0].model["w"], torch.full((4, 3), 1.0))
    assert len(said) == 1 and uri in said[0] and ("falling back" in said[0] or "never finished" in said[0])


def test_verify_says_everything_in_words(tmp_path: Path) -> None:
    uri = save(str(tmp_path), small(1), 1)
    Path(uri, "model.safetensors").unlink()
    os.truncate(f"{uri}/ema.safetensors", 10)
    with open(f"{uri}/optimizer.pt", "ab") as file:
        file.write(b"x")
    text = Path(uri, "state.json").read_bytes()
    Path(uri, "state.json").write_bytes(text.replace(b"1", b"2"))
    Path(uri, "rank-00001.pt").write_bytes(b"")
    said = verify(uri)
    for words in (
        "model.safetensors is missing",
        "ema.safetensors is truncated: 10 bytes instead of",
        "optimizer.pt is too long",
        "state.json has other content than was written (xxh3_128 differs)",
        "rank-00001.pt is a stray file",
    ):
        assert any(words in problem for problem in said), (words, said)
    assert len(said) == 5


def test_a_stray_file_is_reported_and_does_not_stop_a_resume(store: str) -> None:
    uri = save(store, small(1), 1)
    storage.write_bytes(storage.join(uri, "notes.txt"), b"mine")
    assert verify(uri) == ["notes.txt is a stray file: the manifest does not name it"]
    assert load_latest(store, pytest.fail) is not None


def rewrite_manifest(uri: str, **changes: Any) -> None:
    manifest = json.loads(Path(uri, "manifest.json").read_bytes())
    manifest.update(changes)
    Path(uri, "manifest.json").write_bytes(render(manifest))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "has format version 2; this raydist reads version 1"),
        ({"step": 2}, "manifest.json is that of step 2"),
        ({"files": {}}, "does not name model.safetensors, optimizer.pt, state.json"),
        ({"files": [], "metrics": None}, "lacks files, metrics"),
        ({"files": {"../../x": {"size": 1, "sha256": ""}}}, r"names a file outside the checkpoint: '\.\./\.\./x'"),
        ({"files": {"x": {"size": 1, "sha256": "", "at": "../x"}}}, "names a file outside the checkpoint: 'x'"),
        ({"files": {"x": {"size": 1}}}, "has an entry without size or hash: 'x'"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    uri = save(str(tmp_path), small(1), 1)
    rewrite_manifest(uri, **changes)
    with pytest.raises(CheckpointError, match=words):
        load(uri)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000009 is not complete: manifest.json cannot be read"):
        load(str(tmp_path / "step-00000009"))


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    """Even where the manifest vouches for it: an attacker can write a manifest too."""
    import hashlib

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "pwned",)

    uri = save(str(tmp_path), small(1), 1)
    zipped = tmp_path / "evil.pt"
    torch.save({"optimizer": Evil()}, zipped)
    for content in (zipped.read_bytes(), pickle.dumps(Evil(), protocol=2)):
        Path(uri, "optimizer.pt").write_bytes(content)
        files = json.loads(Path(uri, "manifest.json").read_bytes())["files"]
        files["optimizer.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite_manifest(uri, files=files)
        assert verify(uri) == []
        with pytest.raises(CheckpointError, match="cannot be read: UnpicklingError"):
            load(uri)
        with pytest.raises(CheckpointError, match="none is good"):
            load_latest(str(tmp_path), lambda message: None)
    assert not (tmp_path / "pwned").exists()


# -- the newest good one ----------------------------------------------------------------------------------------------


def test_no_checkpoints_at_all_is_none(store: str) -> None:
    assert load_latest(store, pytest.fail) is None and list_checkpoints(store) == [] and prune(store, 1) == []


def test_when_none_is_good_nothing_starts_from_scratch(tmp_path: Path) -> None:
    uris = [save(str(tmp_path), small(step), step, keep=9) for step in (1, 2, 3)]
    for uri in uris[:2]:
        os.truncate(f"{uri}/model.safetensors", 5)
    Path(uris[2], "manifest.json").unlink()
    said: list[str] = []
    with pytest.raises(
        CheckpointError, match=r"(?s)has checkpoints, but none is good.*step-00000003.*step-00000002.*step-00000001"
    ):
        load_latest(str(tmp_path), said.append)
    assert len(said) == 3


def test_weights_that_are_not_finite_are_flagged_and_never_chosen(store: str) -> None:
    save(store, small(1), 1, metrics={"eval_loss": 0.5}, best=Best())
    save(store, small(2, float("nan")), 2, metrics={"eval_loss": 0.1}, best=Best())
    uri = save(store, small(3, float("inf")), 3, metrics={"eval_loss": 0.1}, best=Best())
    assert load(uri)[1]["finite"] is False and steps(store) == [1, 3] and best_of(store, Best()) == (1, 0.5)
    said: list[str] = []
    loaded = load_latest(store, said.append)
    assert loaded is not None and loaded[1]["step"] == 1
    assert "step-00000003 holds weights that are not finite; falling back" in said[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_finite_looks_at_every_floating_dtype_and_allows_infinite_buffers(tmp_path: Path, dtype: torch.dtype) -> None:
    def flag(value: float, **more: Any) -> bool:
        tensor = torch.zeros(5).to(dtype)
        tensor[3] = value
        return bool(load(save(str(tmp_path), TrainState(model={"x": tensor, "n": torch.arange(3)}, **more), 1))[1]["finite"])

    assert flag(1.0)
    assert not flag(float("nan")) and not flag(float("inf")) and not flag(float("-inf"))
    assert flag(float("-inf"), buffers=["x"]) and not flag(float("nan"), buffers=["x"])


def test_a_different_model_is_refused_with_five_names_and_both_shapes() -> None:
    saved = {f"l{i}": torch.zeros(i + 1) for i in range(8)}
    check_model_matches(dict(saved), saved)
    model = {"l0": torch.zeros(1), "l1": torch.zeros(2, 3), "new": torch.zeros(())}
    with pytest.raises(CheckpointError) as caught:
        check_model_matches(model, saved)
    text = str(caught.value)
    assert "different model" in text and "l1: model has [2, 3], checkpoint has [2]" in text
    assert "new: model has [], checkpoint has no such key" in text and "l2: checkpoint has [3], model has no such key" in text
    assert text.count("\n  l") + text.count("\n  new") == 5 and "and 3 more" in text and "another name or storage" in text


# -- keeping and replacing --------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(store: str) -> None:
    losses = {1: 0.9, 2: 0.2, 3: 0.5, 4: float("nan"), 5: 0.2, 6: 0.7}
    for step, loss in losses.items():
        save(store, small(step), step, metrics={"eval_loss": loss}, keep=2, best=Best())
    assert steps(store) == [2, 5, 6]
    assert json.loads(storage.read_bytes(storage.join(store, "best.json"))) == {
        "step": 2, "value": 0.2, "metric": "eval_loss", "mode": "min",
    }  # fmt: skip
    save(store, small(7), 7, metrics={"eval_loss": 0.1}, keep=1, best=Best())
    assert steps(store) == [7]


def test_best_by_maximum_and_a_metric_that_is_not_there(store: str) -> None:
    for step, accuracy in {1: 0.5, 2: 0.9, 3: 0.1}.items():
        save(store, small(step), step, metrics={"eval_accuracy": accuracy}, keep=1, best=Best("eval_accuracy", "max"))
    assert steps(store) == [2, 3] and best_of(store, Best()) is None


def test_prune_keeps_what_is_protected_and_counts_only_good_ones(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(str(tmp_path), small(step, float("nan") if step == 6 else None), step, keep=99)
    os.truncate(tmp_path / "step-00000005" / "optimizer.pt", 3)
    Path(tmp_path, "step-00000004", "manifest.json").write_text("{}")
    assert prune(str(tmp_path), 1, {1, 6}) == [2, 4, 5] and steps(str(tmp_path)) == [1, 3, 6]


def test_prune_removes_nothing_when_no_checkpoint_is_good(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(str(tmp_path), small(step, float("nan")), step, keep=1)
    assert prune(str(tmp_path), 1) == [] and steps(str(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("exchange", [True, False])
def test_saving_a_step_again_replaces_it_whole(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:  # as on a file system without renameat2(RENAME_EXCHANGE)
        monkeypatch.setattr(commit_module, "_exchange", lambda one, other: False)
    save(store, small(5), 5)
    for value in (7.0, 8.0):
        uri = save(store, TrainState(model={"w": torch.full((2,), value)}), 5, metrics={"n": value})
        state, manifest = load(uri)
        assert torch.equal(state.model["w"], torch.full((2,), value)) and manifest["metrics"] == {"n": value}
        assert verify(uri) == [] and storage.names(store) == ["step-00000005"]


def test_a_writer_that_died_between_the_two_renames_is_repaired(tmp_path: Path) -> None:
    save(str(tmp_path), small(5), 5)
    os.rename(tmp_path / "step-00000005", tmp_path / f".tmp-replaced-step-00000005-{commit_module._host()}-{dead_pid()}-ab")
    loaded = load_latest(str(tmp_path), pytest.fail)
    assert loaded is not None and loaded[1]["step"] == 5


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_temporary_folders_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    host = commit_module._host()
    dead = tmp_path / f".tmp-step-00000003-{host}-{dead_pid()}-00"
    own = tmp_path / f".tmp-step-00000003-{host}-{os.getpid()}-00"  # of a process of the same number before us
    alive = tmp_path / f".tmp-step-00000003-{host}-{os.getppid()}-00"
    elsewhere = tmp_path / ".tmp-step-00000003-otherhost-7-00"
    old = tmp_path / ".tmp-step-00000004-otherhost-7-00"
    for folder in (dead, own, alive, elsewhere, old):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"part")
    day_ago = time.time() - commit_module.STALE_AFTER_S - 60
    for path in (old / "model.safetensors", old):
        os.utime(path, (day_ago, day_ago))
    save(str(tmp_path), small(1), 1)
    assert sorted(os.listdir(tmp_path)) == sorted([alive.name, elsewhere.name, "step-00000001"])


def test_a_removal_that_is_cut_short_leaves_nothing_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path), small(1), 1)
    save(str(tmp_path), small(2), 2)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(commit_module.shutil, "rmtree", die)
        prune(str(tmp_path), 1)
    assert steps(str(tmp_path)) == [2] and len(os.listdir(tmp_path)) == 2
    prune(str(tmp_path), 1)
    assert os.listdir(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_remote_writer_that_dies_leaves_the_old_checkpoint(monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    """Cut the power before each single write to the object store, in turn."""
    real_upload, real_write = storage.upload, storage.write_bytes
    for survive in range(6):
        store = f"memory://{uuid.uuid4().hex}/c"
        save(store, small(1), 1)
        if existing:
            save(store, small(2), 2)
        left = survive

        def cut(real: Any) -> Any:
            def call(*args: Any) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                real(*args)

            return call

        finished = False
        with monkeypatch.context() as patch:
            patch.setattr(storage, "upload", cut(real_upload))
            patch.setattr(storage, "write_bytes", cut(real_write))
            try:
                save(store, small(2, 9.0), 2)
                finished = True
            except KeyboardInterrupt:
                pass
        assert finished == (survive == 5)
        loaded = load_latest(store, lambda message: None)
        assert loaded is not None
        expected = 9.0 if finished else 2.0 if existing else 1.0
        assert torch.equal(loaded[0].model["w"], torch.full((4, 3), expected))
        save(store, small(2, 5.0), 2)
        assert verify(storage.join(store, "step-00000002")) == []


_KILLED_WRITER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from raydist.checkpoint import TrainState, list_checkpoints, load, load_latest, verify
from raydist.saver import Saver

store, wanted = sys.argv[1], int(sys.argv[2])
random.seed(0)
cut_short = 0

def state(step):
    w = torch.full((150_000,), float(step))
    return TrainState(model={"w": w}, ema={"w": w}, optimizer={"state": {0: {"m": w}}}, counters={"step": step})

turn, listed = 0, []
while cut_short < wanted or listed[-1].step < 3:
    turn += 1
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = load_latest(store, lambda message: None)
        step = found[1]["step"] if found else 0
        saver = Saver(store, keep=2, asynchronous=bool(turn % 2))
        os.write(tell, b"x")
        while True:
            saver.save(state(step), step)  # the first one saves over the step that is there
            step += 1
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    time.sleep(random.uniform(0.0, 0.08))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    listed = list_checkpoints(store)
    cut_short += any(name.startswith(".tmp-step-") for name in os.listdir(store))
    for found in listed:
        assert verify(found.uri) == [], (turn, found, verify(found.uri))
        loaded, manifest = load(found.uri)
        for tensor in (loaded.model["w"], loaded.ema["w"], loaded.optimizer["state"][0]["m"]):
            assert bool((tensor == found.step).all()), (turn, found)
    if listed:
        said = []
        latest = load_latest(store, said.append)
        assert latest[1]["step"] == listed[-1].step and not said, (turn, said)
print(listed[-1].step, len(listed), len(os.listdir(store)))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_the_newest_listed_checkpoint_good(tmp_path: Path) -> None:
    """Until 30 kills fell into a save: every listed checkpoint is whole, the newest one is loaded, nothing piles up."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_WRITER, str(tmp_path), "30"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    newest, listed, entries = (int(word) for word in done.stdout.split())
    assert newest >= 3 and listed <= 3 and entries <= listed + 2  # what the dead left behind is cleared, not collected


def test_the_defaults_of_a_state_are_not_shared() -> None:
    TrainState({}).position["epoch"] = 9
    assert asdict(TrainState({}))["position"] == {"epoch": 0, "index": 0}
