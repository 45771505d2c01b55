"""Where else numbers go: each logger is read back by its own library, offline; a failing one costs the run nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raydist.config import parse_config, to_plain
from raydist.errors import ConfigError
from raydist.loggers import Loggers, check_loggers, numbers_of
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from tests.runs import config_of, local_run
from tests.support import lin_job


class Keeps:
    """Remembers what it is given; raises at step `breaks`."""

    def __init__(self, breaks: int | None = None) -> None:
        self.breaks, self.lines, self.ended = breaks, [], ""  # type: tuple[int | None, list[tuple[int, dict[str, float]]], str]

    def line(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.breaks:
            raise OSError("no route to host")
        self.lines.append((step, dict(values)))

    def close(self, status: str) -> None:
        self.ended = status


def test_numbers_are_flat_and_ranks_have_names() -> None:
    line = {"step": 3, "train_loss": 1.5, "epoch": 1, "eval_loss": None, "ranks": {"compute_s": [0.1, 0.2]}, "devices": {}}
    assert numbers_of(line) == {"train_loss": 1.5, "epoch": 1.0, "compute_s/rank0": 0.1, "compute_s/rank1": 0.2}
    assert numbers_of({"step": 3, "ranks": {"compute_s": [0.1]}}) == {}  # one rank is the line itself
    assert numbers_of({"step": 3, "ranks": {"compute_s": [0.1] * 1000}}) == {}


def test_a_logger_that_fails_is_told_once_and_left_out_and_the_others_go_on() -> None:
    good, bad, told = Keeps(), Keeps(breaks=2), []  # type: tuple[Keeps, Keeps, list[str]]

    def refuses() -> Keeps:
        raise ValueError("no key")

    loggers = Loggers([("good", lambda: good), ("bad", lambda: bad), ("ugly", refuses)], told.append)
    for step in (1, 2, 3):
        loggers.line({"step": step, "lr": 0.5})
    loggers.close("finished")
    loggers.close("failed")  # the end has been told
    assert [step for step, _ in good.lines] == [1, 2, 3] and good.ended == "finished"
    assert [step for step, _ in bad.lines] == [1] and bad.ended == ""
    assert told == [
        "loggers: ugly failed and is left out from here on: ValueError: no key",
        "loggers: bad failed and is left out from here on: OSError: no route to host",
    ]


def test_loggers_are_names_or_sections_and_wrong_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = lin_job([1.0], 1, loggers=["tensorboard", {"name": "wandb", "project": "p", "mode": "offline"}])
    config = parse_config(job, tmp_path)
    assert [logger.name for logger in config.loggers] == ["tensorboard", "wandb"]
    assert parse_config(to_plain(config), tmp_path) == config
    with pytest.raises(ConfigError, match=r"loggers.*comet"):
        parse_config(lin_job([1.0], 1, loggers=["comet"]), tmp_path)
    with pytest.raises(ConfigError, match=r"loggers.*entitty"):
        parse_config(lin_job([1.0], 1, loggers=[{"name": "wandb", "entitty": "x"}]), tmp_path)
    with pytest.raises(ConfigError, match=re.escape("loggers.0.dir: missing; tensorboard writes to a local folder")):
        check_loggers(parse_config({**job, "storage": "memory://runs"}, tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("loggers.0: tensorboard is not installed: pip install 'raydist[loggers]'")):
        check_loggers(config)


@pytest.mark.slow
def test_tensorboard_reads_what_was_written_and_a_resume_repeats_nothing(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    local_run(tmp_path, loggers=["tensorboard"], train__max_steps=2, train__epochs=None)
    run = RunDir(str(tmp_path / "runs" / "lin"))
    train_local(config_of(tmp_path, loggers=["tensorboard"], train__max_steps=4, train__epochs=None), resume="auto")
    found = events.EventAccumulator(str(tmp_path / "runs" / "lin" / "tensorboard")).Reload()
    expected = [(line["step"], line["train_loss"]) for line in run.read_metrics()]
    assert [(event.step, event.value) for event in found.Scalars("train_loss")] == [
        (step, pytest.approx(value)) for step, value in expected
    ]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    assert "warning" not in [event["kind"] for event in run.read_events()]


@pytest.mark.slow
def test_mlflow_reads_what_was_written_and_a_resume_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    local_run(tmp_path, loggers=["mlflow"], train__max_steps=2, train__epochs=None)
    train_local(config_of(tmp_path, loggers=["mlflow"], train__max_steps=4, train__epochs=None), resume="auto")
    run = RunDir(str(tmp_path / "runs" / "lin"))
    assert [event["reason"] for event in run.read_events() if event["kind"] == "warning"] == []
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("raydist")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1 and runs[0].info.status == "FINISHED" and runs[0].info.run_name == "lin"
    assert runs[0].data.params["optimizer.lr"] == "0.01"
    history = sorted((metric.step, metric.value) for metric in client.get_metric_history(runs[0].info.run_id, "train_loss"))
    assert history == [(line["step"], line["train_loss"]) for line in run.read_metrics()]


def leveldb_records(data: bytes) -> list[bytes]:
    """The records of a W&B transaction log: LevelDB's log format (blocks of 32 KiB; per piece checksum, length, kind)."""
    block, at, parts = 32768, 7, [b""]  # seven bytes say that it is W&B's
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts[-1] += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            parts.append(b"")
    return parts[:-1]


@pytest.mark.slow
def test_wandb_offline_holds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("HOME", str(tmp_path))
    root = local_run(tmp_path, loggers=[{"name": "wandb", "mode": "offline", "project": "p"}])
    run = RunDir(str(root))
    assert [event["reason"] for event in run.read_events() if event["kind"] == "warning"] == []
    files = list((root / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    found: dict[int, float] = {}
    for data in leveldb_records(files[0].read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            found[int(record.history.step.num)] = float(items["train_loss"])
    assert found == {line["step"]: pytest.approx(line["train_loss"]) for line in run.read_metrics()}


def test_prometheus_outside_of_ray_is_told_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # the tests' own cluster may be up in this process
    run = RunDir(str(local_run(tmp_path, loggers=["prometheus"])))
    told = [event["reason"] for event in run.read_events() if event["kind"] == "warning"]
    assert len(told) == 1 and "this run is not on Ray" in told[0]
    assert (run.read_summary() or {})["status"] == "finished"
