"""The run directory: lines that survive crashes and restarts, several writers, and a tail of what is new."""

from __future__ import annotations

import json
import multiprocessing
import time
import uuid
from pathlib import Path

import pytest

from raydist import jsonl, storage
from raydist.errors import RaydistError
from raydist.rundir import RunDir


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


def steps(run: RunDir) -> list[int]:
    return [record["step"] for record in run.read_metrics()]


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "run"))
    assert run.read_metrics() == [] and run.read_events() == [] and run.read_summary() is None
    run.truncate_metrics(0)
    assert run.follow().new() == [] and not (tmp_path / "run").exists()


def test_metrics_are_strict_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    run.append_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "nested": {"x": [float("-inf"), 0.5]}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "grad_norm": None, "nested": {"x": [None, 0.5]},
    }  # fmt: skip
    assert run.read_metrics()[0]["loss"] is None


def test_scalars_of_torch_and_numpy_become_numbers() -> None:
    import numpy as np
    import torch

    line = jsonl.encode({"a": torch.tensor(2.0), "b": np.float32(0.5), "c": np.int64(3), "d": True, "e": None, "f": "x"})
    assert json.loads(line) == {"a": 2.0, "b": 0.5, "c": 3, "d": True, "e": None, "f": "x"}
    with pytest.raises(TypeError, match="not JSON serializable"):
        jsonl.encode({"a": object()})


@pytest.mark.parametrize("step", [None, 1.0, True, "1"])
def test_a_metrics_record_needs_an_integer_step(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="needs an integer 'step'"):
        RunDir(str(tmp_path)).append_metrics({"step": step})


def test_steps_strictly_increase_also_in_a_new_process(root: str) -> None:
    run = RunDir(root)
    run.append_metrics({"step": 3})
    run.append_metrics({"step": 7})
    run.flush()
    for again in (run, RunDir(root)):
        with pytest.raises(ValueError, match=r"already reaches step 7, so step 7 cannot follow.*truncate_metrics"):
            again.append_metrics({"step": 7})
    assert steps(run) == [3, 7]


def test_a_restart_drops_later_lines_and_goes_on(root: str) -> None:
    run = RunDir(root)
    for step in range(1, 7):
        run.append_metrics({"step": step, "life": 1})
    run.flush()
    again = RunDir(root)
    again.truncate_metrics(4)
    again.append_metrics({"step": 5, "life": 2})
    again.flush()
    assert [(r["step"], r["life"]) for r in RunDir(root).read_metrics()] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    again.truncate_metrics(0)
    assert steps(again) == []


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    run.append_metrics({"step": 1})
    run.append_event("start")
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 2, "los')
    assert steps(run) == [1] and len(run.read_events()) == 1
    again = RunDir(str(tmp_path))
    again.append_event("restart")  # without a repair first: its own line stays whole
    assert [e["kind"] for e in again.read_events()] == ["start", "restart"]
    again.truncate_metrics(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_events_carry_time_kind_and_fields(root: str) -> None:
    run = RunDir(root)
    before = time.time()
    run.append_event("skip", rank=3, step=12, reason="loss is nan")
    run.flush()
    (event,) = RunDir(root).read_events()
    assert event["kind"] == "skip" and event["rank"] == 3 and event["step"] == 12 and event["reason"] == "loss is nan"
    from datetime import datetime

    when = datetime.fromisoformat(event["time"])
    assert when.tzinfo is not None and before - 0.01 <= when.timestamp() <= time.time()


def _write_events(root: str, rank: int) -> None:
    run = RunDir(root)
    for n in range(200):
        run.append_event("skip", rank=rank, n=n, reason="x" * (rank * 997))


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_events, args=(str(tmp_path), rank)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    events = RunDir(str(tmp_path)).read_events()  # leaves out a line that is not whole, and would do so with an empty one
    for rank in range(4):
        assert [e["n"] for e in events if e["rank"] == rank] == list(range(200))
    assert len(events) == 800


def test_remote_lines_are_written_at_most_every_so_often_and_on_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    writes: list[str] = []
    real = storage.write_bytes
    monkeypatch.setattr(storage, "write_bytes", lambda uri, data: (writes.append(uri), real(uri, data)))
    run = RunDir(root, flush_every=3600)
    for step in range(1, 6):
        run.append_metrics({"step": step})
    assert len(writes) == 1 and steps(RunDir(root)) == [1] and steps(run) == [1, 2, 3, 4, 5]
    run.flush()
    run.flush()
    assert len(writes) == 2 and steps(RunDir(root)) == [1, 2, 3, 4, 5]


def test_remote_events_of_two_writers_are_all_kept() -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    one, two = RunDir(root, flush_every=0), RunDir(root, flush_every=0)
    for n in range(3):
        one.append_event("a", n=n)
        two.append_event("b", n=n)
    assert [(e["kind"], e["n"]) for e in one.read_events()] == [(k, n) for n in range(3) for k in "ab"]


def test_a_remote_line_that_could_not_be_written_is_kept_for_the_next_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(f"memory://{uuid.uuid4().hex}/run", flush_every=0)

    def refuse(uri: str, data: bytes) -> None:
        raise OSError("the network is away")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="away"):
        patch.setattr(storage, "write_bytes", refuse)
        run.append_event("skip", n=1)
    run.append_event("skip", n=2)
    assert [e["n"] for e in RunDir(run.root).read_events()] == [1, 2]


def test_a_full_disk_is_an_error_and_not_a_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(str(tmp_path))
    run.append_metrics({"step": 1})
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"only 5 of 12 bytes fit: .*metrics\.jsonl"):
        patch.setattr(jsonl.os, "write", lambda fd, data: 5)
        run.append_metrics({"step": 2})
    run.append_metrics({"step": 2})
    assert steps(run) == [1, 2]


def test_summary_is_replaced_as_a_whole(root: str) -> None:
    run = RunDir(root)
    run.write_summary({"status": "running", "loss": float("nan")})
    run.write_summary({"status": "finished", "metrics": {"eval_loss": 0.5}})
    assert RunDir(root).read_summary() == {"status": "finished", "metrics": {"eval_loss": 0.5}}
    run.write_config("name: digits\n")
    assert storage.read_bytes(storage.join(root, "config.yaml")) == b"name: digits\n"
    assert storage.names(root) == ["config.yaml", "summary.json"]
    storage.write_bytes(storage.join(root, "summary.json"), b"{")
    with pytest.raises(RaydistError, match=r"summary\.json is not JSON"):
        run.read_summary()


def new_steps(follow: jsonl.Follower) -> list[int]:
    return [record["step"] for record in follow.new()]


def test_a_follower_gives_only_complete_new_lines(tmp_path: Path) -> None:
    at = tmp_path / "m.jsonl"
    follow = jsonl.Follower(str(at), key="step")
    assert new_steps(follow) == []
    at.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert new_steps(follow) == [1, 2] and new_steps(follow) == []
    at.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert new_steps(follow) == [3]


@pytest.mark.parametrize("again", [[], [3], [3, 4], [3, 4, 5, 6, 7, 8, 9]])
def test_a_follower_repeats_no_step_when_a_restart_cuts_the_file_back(root: str, again: list[int]) -> None:
    run = RunDir(root, flush_every=0)
    follow = run.follow()
    for step in range(1, 6):
        run.append_metrics({"step": step, "life": 1})
    assert [record["step"] for _, record in follow.new()] == [1, 2, 3, 4, 5]
    run.truncate_metrics(2)
    for step in again:  # shorter than before, or longer: then only the content tells
        run.append_metrics({"step": step, "life": 2, "longer": "x" * step})
    assert [record["step"] for _, record in follow.new()] == [step for step in again if step > 5]
    last = max([2, *again])
    run.append_metrics({"step": last + 10})
    assert [record["step"] for _, record in follow.new()] == [last + 10]


def test_a_follower_that_starts_now_skips_what_an_earlier_life_wrote(root: str) -> None:
    run = RunDir(root, flush_every=0)
    for step in range(1, 6):
        run.append_metrics({"step": step, "life": 1})
    run.append_event("start")
    time.sleep(0.01)
    follow = run.follow(since=time.time())
    assert follow.new() == []
    run.append_event("restart", step=3)
    run.truncate_metrics(3)
    run.append_metrics({"step": 4, "life": 2})
    assert [(kind, r["step"]) for kind, r in follow.new()] == [("event", 3), ("line", 4)]
    run.append_event("finish", step=4)
    assert [(kind, r["kind"]) for kind, r in follow.new()] == [("event", "finish")]
