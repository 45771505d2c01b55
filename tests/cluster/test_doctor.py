"""The doctor on one real node."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raydist.cli import main
from raydist.doctor.run import examine
from raydist.errors import ConfigError
from tests.runs import config_of, write_job
from tests.support import free_port

pytestmark = pytest.mark.cluster


def test_one_machine_is_well(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y\n1,3\n")
    config = config_of(tmp_path, data={"train": {"path": "data.csv"}}, task__inputs=["x"], task__targets="y")
    found = {finding.check: finding for finding in examine(None, config)}
    assert {finding.status for finding in found.values()} <= {"ok", "warn"}, found
    for check in ("nodes", "versions", "clock", "all-reduce gloo", "storage", "data", "job"):
        assert found[check].status == "ok", found[check]
    assert "right on 2 ranks" in found["all-reduce gloo"].found
    assert not (tmp_path / "runs").exists()  # the folder that was tried is gone again


def test_absent_data_and_too_many_workers_fail(ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, data={"train": {"path": "absent.csv"}}, task__inputs=["x"], task__targets="y")
    assert main(["doctor", str(job), "scaling.workers=99", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    failed = {f["check"]: f["found"] for f in told["findings"] if f["status"] == "fail"}
    assert failed == {
        "data": f"{tmp_path}/absent.csv: not there",
        "job": failed["job"],
    }
    assert "at least 99 workers are asked for and 6 fit" in failed["job"]


def test_a_node_that_is_not_there_fails(ray_cluster: None, tmp_path: Path) -> None:
    found = examine(None, storage=str(tmp_path), nodes=["10.1.2.3"])
    assert [(f.where, f.status) for f in found if f.check == "nodes"] == [("10.1.2.3", "fail")]
    assert {f.status for f in examine(None, nodes=["2"]) if f.check == "nodes"} == {"fail"}
    with pytest.raises(ConfigError, match="--nodes 2,a: give one number of nodes, or"):
        examine(None, nodes=["2", "a"])


def test_a_plan_for_the_cluster_as_it_is(ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write_job(tmp_path)), "scaling.workers=[1,9]", "--address", "auto", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["elastic"] == {"least": 1, "most": 9, "fit": 6}
    assert [node["cpus"] for node in plan["placement"]["nodes"]] == [6]


def test_a_bad_address_is_told_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert main(["doctor", "--address", f"127.0.0.1:{free_port()}"]) == 1
    told = capsys.readouterr().out
    assert "fail  address" in told and "refused" in told and "ray start --head" in told
    assert main(["doctor", "--address", "::1:6379"]) == 2
    assert "write [::1]:6379" in capsys.readouterr().err
    assert main(["doctor", "--address", "http://127.0.0.1:8265"]) == 2
    assert "is the dashboard's" in capsys.readouterr().err
    assert os.environ.get("RAY_ADDRESS") is None
