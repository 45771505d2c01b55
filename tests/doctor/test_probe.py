"""What a node tells of itself, on this one."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path

import pytest
import torch

import raydist
from raydist.doctor.net import Listeners, ephemeral_range, reach, source_of
from raydist.doctor.probe import OFFSET, addresses_of, clock, facts, remove, storage, unreadable
from raydist.doctor.reduce import FLOATS, _words, all_reduce
from tests.support import free_port, run_ranks


def test_facts_of_this_machine() -> None:
    found = facts()
    assert found["host"] == socket.gethostname()
    versions = found["versions"]
    assert (versions["python"], versions["torch"]) == (platform.python_version(), torch.__version__)
    assert versions["raydist"] == raydist.__version__
    assert "127.0.0.1" in found["interfaces"]["lo"]
    assert found["shm"]["total"] >= found["shm"]["free"] > 0
    assert found["cpus"] == os.cpu_count()
    assert len(found["gpus"]["seen"]) == torch.cuda.device_count()


def test_names_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_of("no-such-host.invalid") == []
    assert {"127.0.0.1", "::1"} & set(addresses_of("localhost"))
    assert abs(clock() - time.time()) < 5
    monkeypatch.setenv(OFFSET, "-3600")
    assert abs(clock() - time.time() + 3600) < 5


def test_storage_is_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text("abc")
    found = storage(str(tmp_path), "abc", "me")
    assert (found["reads"], found["writes"], found["error"]) == (True, True, None) and found["free"] > 0
    assert (tmp_path / "me").read_text() == "abc"
    assert storage(str(tmp_path), "other", "me")["reads"] is False


def test_storage_that_is_another_one_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    found = storage(str(folder), "abc", "me")
    assert (found["reads"], found["writes"]) == (False, True)
    remove(str(folder), "me")
    assert not folder.exists()


def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = storage(str(tmp_path / "file" / "under"), "abc", "me")
    assert found["writes"] is False and found["error"].startswith("NotADirectoryError")


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.csv").touch()
    (tmp_path / "empty").mkdir()
    good = [
        str(tmp_path / "deep"),
        str(tmp_path / "deep/er/*.csv"),
        f"file://{tmp_path}/deep/er/x.csv",
        f"memory://{tmp_path}/m",
    ]
    import fsspec

    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/m", b"1")
    assert unreadable(good) == {}
    bad = [str(tmp_path / name) for name in ("absent", "*.parquet", "empty")]
    assert unreadable([*bad, "memory:///absent"]) == {
        bad[0]: "not there",
        bad[1]: "not there",
        bad[2]: "an empty folder",
        "memory:///absent": "not there",
    }


def test_listeners_greet_whoever_connects() -> None:
    mine, other = Listeners("hello"), Listeners("stranger")
    try:
        low, high = ephemeral_range()
        assert len(set(mine.ports + other.ports)) == 12 and all(low <= port <= high for port in mine.ports)
        closed = free_port()
        base = {"node": "me", "ip": "127.0.0.1", "what": "test"}
        tried = reach(
            [
                *({**base, "port": port, "greeting": "hello"} for port in mine.ports),
                {**base, "port": mine.ports[0], "greeting": None},
                {**base, "port": other.ports[0], "greeting": "hello"},
                {**base, "port": closed, "greeting": "hello"},
            ]
        )
        assert [link["error"] for link in tried] == [None] * 7 + [
            "another machine answers at this address",
            "Connection refused",
        ]
        assert tried[0]["node"] == "me"
    finally:
        mine.close()
        other.close()
    assert reach([{**base, "port": mine.ports[0], "greeting": None}])[0]["error"] == "Connection refused"


def test_the_own_address_towards_another() -> None:
    assert source_of("127.0.0.1") == "127.0.0.1"
    assert source_of("::1") in ("::1", None)


@pytest.mark.cluster
def test_an_all_reduce_of_two_ranks() -> None:
    port = free_port()
    found = run_ranks(2, reduced, port)
    assert [(rank["right"], rank["error"]) for rank in found] == [(True, None)] * 2
    assert all(rank["bytes_per_s"] > 0 for rank in found)
    assert 4 * FLOATS == 2**22


def reduced(port: int) -> dict[str, object]:
    return all_reduce(int(os.environ["RANK"]), 2, "127.0.0.1", port, "gloo", 30.0)


def test_gloo_s_errors_without_the_place_in_its_source() -> None:
    said = "[enforce fail at /gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable\nmore"
    assert _words(RuntimeError(said)) == "connect: Network is unreachable"
    assert (
        _words(RuntimeError("Timed out after 16 seconds. 2/3 clients joined."))
        == "Timed out after 16 seconds. 2/3 clients joined."
    )
    assert _words(ValueError()) == "ValueError"


def test_a_rank_that_never_comes_ends_it_in_time() -> None:
    began = time.monotonic()
    found = all_reduce(0, 2, "127.0.0.1", free_port(), "gloo", 1.0)
    assert found["right"] is False and found["error"]
    assert time.monotonic() - began < 20
