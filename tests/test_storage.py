"""The path abstraction: the same answers from a folder, from fsspec's memory store, and from S3 (moto on loopback)."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from raydist import storage
from raydist.checkpoint import TrainState, list_checkpoints, load_latest, save, verify
from raydist.rundir import RunDir


@pytest.fixture(params=["local", "file-uri", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "local": str(tmp_path / "root"),
        "file-uri": f"file://{tmp_path}/root",
        "memory": f"memory://{uuid.uuid4().hex}/root",
    }[request.param]


def check_store(root: str) -> None:
    at = storage.join(root, "a", "b.txt")
    assert storage.names(root) == [] and storage.sizes(root) == {} and not storage.exists(at)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(at)
    storage.write_bytes(at, b"one")
    storage.write_bytes(at, b"three")
    storage.write_bytes(storage.join(root, "c.txt"), b"")
    assert storage.read_bytes(at) == b"three" and b"".join(storage.read_chunks(at)) == b"three"
    assert storage.names(root) == ["a", "c.txt"] and storage.names(storage.join(root, "a")) == ["b.txt"]
    assert storage.sizes(root) == {"a/b.txt": 5, "c.txt": 0}
    assert storage.exists(at) and storage.exists(storage.join(root, "a"))
    storage.remove(storage.join(root, "a"))
    storage.remove(storage.join(root, "a"))
    storage.remove(storage.join(root, "c.txt"))
    assert storage.sizes(root) == {} and not storage.exists(at)


def test_a_store_answers_alike_on_every_kind_of_storage(root: str) -> None:
    check_store(root)


def test_join_and_is_local() -> None:
    assert storage.join("/runs/", "a", "b") == "/runs/a/b" and storage.join("/", "a") == "/a"
    assert storage.join("s3://bucket/runs", "a") == "s3://bucket/runs/a"
    assert storage.is_local("runs/a") and storage.is_local("file:///runs") and not storage.is_local("s3://bucket")
    assert storage.local_path("file:///runs/a") == Path("/runs/a")


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(storage.CHUNK + 5)
    storage.write_bytes(str(tmp_path / "x"), data)
    assert [len(chunk) for chunk in storage.read_chunks(str(tmp_path / "x"))] == [storage.CHUNK, 5]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = tmp_path / "x"
    storage.write_bytes(str(at), b"old")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        storage.write_bytes(str(at), b"new")
    assert at.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_upload_and_download(tmp_path: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}/x"
    (tmp_path / "a").write_bytes(b"bytes")
    storage.upload(tmp_path / "a", uri)
    storage.download(uri, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"bytes"


_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print('port', server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh bucket of a moto server in its own process."""
    import s3fs

    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        port = next(line.split()[1] for line in server.stdout if line.startswith("port "))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
        server.stdin.close()
        server.wait(20)


@pytest.mark.skipif(not (find_spec("moto") and find_spec("s3fs")), reason="needs moto[server] and s3fs (raydist[dev])")
def test_s3_store_run_directory_and_checkpoints(bucket: str) -> None:
    check_store(f"{bucket}/plain")

    run = RunDir(f"{bucket}/runs/digits", flush_every=0.0)
    follow = run.follow()
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 1.0 / step})
    run.append_event("start", rank=0)
    assert [kind for kind, _ in follow.new()] == ["event", "line", "line", "line"]
    run.truncate_metrics(2)
    assert [r["step"] for r in RunDir(run.root).read_metrics()] == [1, 2]
    run.write_summary({"status": "finished"})
    assert run.read_summary() == {"status": "finished"}

    weights = torch.randn(300, 1000)
    for step in (1, 2, 3, 3):  # the last one replaces
        save(run.checkpoints, TrainState(model={"w": weights + step}, counters={"step": step}), step, keep=2)
    found = list_checkpoints(run.checkpoints)
    assert [f.step for f in found] == [2, 3] and [verify(f.uri) for f in found] == [[], []]
    loaded = load_latest(run.checkpoints, warn=pytest.fail)
    assert loaded is not None and torch.equal(loaded[0].model["w"], weights + 3)

    manifest = loaded[1]["files"]["model.safetensors"]["at"]  # written beside the first one, which is gone
    assert manifest.startswith("r") and set(storage.sizes(found[1].uri)) == {
        "manifest.json",
        *(entry["at"] for entry in loaded[1]["files"].values()),
    }
    storage.write_bytes(storage.join(found[1].uri, manifest), b"short")
    said: list[str] = []
    fallback = load_latest(run.checkpoints, said.append)
    assert fallback is not None and fallback[1]["step"] == 2
    assert "model.safetensors is truncated: 5 bytes instead of" in said[0]

    storage.remove(storage.join(found[1].uri, "manifest.json"))  # a writer that died before its manifest
    said.clear()
    fallback = load_latest(run.checkpoints, said.append)
    assert fallback is not None and fallback[1]["step"] == 2 and "was never finished" in said[0]
    save(run.checkpoints, TrainState(model={"w": weights}), 3)
    assert verify(found[1].uri) == []
