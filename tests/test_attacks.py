"""A run's folder that an attacker wrote: nothing in it is executed, and nothing outside it is read."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.cli import main
from raydist.errors import CheckpointError
from raydist.manifest import read_manifest, render, verify
from tests.runs import write_job

FILES = ("model.safetensors", "ema.safetensors", "optimizer.pt", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job of two steps that is half done."""
    folder = tmp_path_factory.mktemp("trained")
    job = write_job(folder, train__ema={"decay": 0.5}, checkpoint={"every": {"steps": 1}, "keep": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "200")
        assert main(["train", str(job), "--local"]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, whose run folder may be changed."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    shutil.copytree(trained, tmp_path / "copy")
    write_job(tmp_path / "copy", train__ema={"decay": 0.5}, checkpoint={"every": {"steps": 1}, "keep": 1})
    return tmp_path / "copy/runs/lin"


def evil(mark: Path) -> dict[str, bytes]:
    """Files that create `mark` when they are unpickled, or read as unsafe YAML."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (mark,)

    zipped, tensors = io.BytesIO(), io.BytesIO()
    torch.save(Evil(), zipped)
    torch.save({"optimizer": {"state": torch.zeros(2)}, "more": Evil()}, tensors)
    return {
        "pickle": pickle.dumps(Evil(), protocol=4),
        "old pickle": pickle.dumps(Evil(), protocol=0),
        "torch.save": zipped.getvalue(),
        "torch.save among tensors": tensors.getvalue(),
        "yaml": f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{mark}]]\n".encode(),
        "nothing": b"",
    }


def vouch(checkpoint: Path) -> None:
    """Write a manifest that the files as they are agree with."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_bytes(render(manifest))


@pytest.mark.parametrize("kind", ["pickle", "old pickle", "torch.save", "torch.save among tensors", "yaml", "nothing"])
def test_no_file_of_a_checkpoint_is_executed(run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "pwned"
    checkpoint = next((run / "checkpoints").glob("step-*"))
    assert {path.name for path in checkpoint.iterdir()} == set(FILES)
    before = {name: (checkpoint / name).read_bytes() for name in FILES}
    for name in FILES:
        (checkpoint / name).write_bytes(evil(mark)[kind])
        if name != "manifest.json":
            vouch(checkpoint)
            assert verify(str(checkpoint)) == []
        assert main(["train", str(run.parents[1] / "job.yaml"), "--local", "train.epochs=2", "--resume", "auto"]) == 1, name
        assert "none is good" in capsys.readouterr().err
        assert main(["export", str(run), str(tmp_path / "weights.safetensors"), "--ema"]) == 1
        assert not mark.exists(), name
        for other, content in before.items():
            (checkpoint / other).write_bytes(content)
    assert verify(str(checkpoint)) == []


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "yaml"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "events.jsonl", "metrics.jsonl"])
def test_no_other_file_of_a_run_is_executed(
    run: Path, tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "pwned"
    (run / name).write_bytes(evil(mark)[kind])
    assert main(["train", str(run.parents[1] / "job.yaml"), "--local"]) in (0, 1, 2)
    assert main(["report", str(run)]) in (0, 1, 2)
    assert not mark.exists()


@pytest.mark.parametrize(
    "at",
    [
        "../secret",
        "/etc/passwd",
        "..",
        "a/../../secret",
        "a/../secret",
        "./x",
        "a//b",
        "~/x",
        "a/b/c",
        "x\n",
        "a\\..\\b",
        "",
        "é",
        ["x"],
    ],
)
def test_file_names_of_a_manifest_stay_in_the_run(run: Path, at: Any) -> None:
    checkpoint = next((run / "checkpoints").glob("step-*"))
    (run.parent / "secret").write_text("s")
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    entry = manifest["files"]["state.json"]
    for files in (
        {**manifest["files"], "state.json": {**entry, "at": at}},
        {**manifest["files"], str(at): {"size": 1, "sha256": hashlib.sha256(b"s").hexdigest()}},
    ):
        (checkpoint / "manifest.json").write_bytes(render({**manifest, "files": files}))
        with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
            read_manifest(str(checkpoint))


@pytest.mark.parametrize("entry", [None, 7, "x", [], {}, {"size": "1", "sha256": "x"}, {"size": 1, "sha256": 2}])
def test_entries_of_a_manifest_that_are_no_entries(run: Path, entry: Any) -> None:
    checkpoint = next((run / "checkpoints").glob("step-*"))
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    (checkpoint / "manifest.json").write_bytes(render({**manifest, "files": {**manifest["files"], "state.json": entry}}))
    with pytest.raises(CheckpointError, match=r"has an entry without size or hash: 'state\.json'"):
        read_manifest(str(checkpoint))
