"""`raydist plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raydist.cli import main
from raydist.data.job import open_sources
from raydist.loop import total_steps
from raydist.world import World
from tests.runs import config_of, write_job
from tests.support import Lin


def planned(job: Path, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["plan", str(job), "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


def test_a_plan_tells_batches_steps_and_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, xs=[1.0] * 11, global_size=4, train={"epochs": 3})
    plan = planned(job, capsys, "scaling.workers=2", "--nodes", "2x1cpu")
    assert plan["epoch"] == {"rows": 11, "steps": 3, "tail_rows": 3, "problem": None}
    assert plan["total_steps"] == 9
    assert [row["tail"] for row in plan["batches"]] == [[2, 1]]
    assert [node["ranks"] for node in plan["placement"]["nodes"]] == [[0], [1]]
    assert (plan["memory"]["parameters"], plan["memory"]["weights"]) == (1, 4)
    assert plan["problems"] == [] and plan["pipeline"] is None


def test_the_steps_are_the_run_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes in ({"train": {"epochs": 2}}, {"train": {"epochs": 9, "max_steps": 5}}, {"data__train__drop_last": True}):
        config = config_of(tmp_path, xs=[1.0] * 7, **changes)
        plan = planned(tmp_path / "job.yaml", capsys)
        assert plan["total_steps"] == total_steps(config, open_sources(config, World(), None).train)


def test_an_elastic_job_shows_its_range_and_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, xs=[1.0] * 12, global_size=12)
    plan = planned(job, capsys, "scaling.workers=[2,4]", "--nodes", "1x3cpu")
    assert plan["elastic"] == {"least": 2, "most": 4, "fit": 3}
    assert [(row["workers"], row["largest"]) for row in plan["batches"]] == [(2, 6), (3, 4), (4, 3)]


def test_a_job_that_cannot_start_there_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert planned(job, capsys, "scaling.workers=3", "--nodes", "1x2cpu", code=1)["problems"]
    assert main(["plan", str(job), "--nodes", "nonsense"]) == 2
    assert "--nodes 'nonsense' is no shape" in capsys.readouterr().err
    assert main(["plan", str(job), "--nodes", "1x1cpu", "--address", "auto"]) == 2
    assert "give one of the two" in capsys.readouterr().err


def test_a_model_too_large_for_the_gpu_says_so_and_auto_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # each of eight activations takes 4096 rows × 65,536 × 4 B = 1 GiB
    job = write_job(tmp_path, xs=[1.0] * 4096, global_size=4096, optimizer={"name": "sgd", "lr": 0.1})
    content = yaml.safe_load(job.read_text())
    content["task"] = {"target": "tests.planning.test_plan:Wide"}
    job.write_text(yaml.safe_dump(content))
    plan = planned(job, capsys, "--nodes", "1x1xSMALL:4")
    assert plan["memory"]["micro"] in (1024, 2048) and plan["memory"]["total"] <= 4 * 2**30
    assert any("4096 rows do not fit" in note for note in plan["notes"])
    assert plan["batches"][0]["accumulation"] == 4096 // plan["memory"]["micro"]
    refused = planned(job, capsys, "--nodes", "1x1xSMALL:4", "batch.micro_size=4096", code=1)
    assert "lower batch.micro_size" in refused["problems"][0]


class Wide:
    """One weight, and eight activations of 65,536 numbers a row."""

    def build_model(self) -> Any:
        return Lin()

    def loss(self, model: Any, batch: Any) -> Any:
        x = model(batch[0]).expand(-1, 65_536)
        for _ in range(8):
            x = torch.sin(x)
        return x.mean()


def test_data_that_is_not_here_leaves_the_rest_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, data={"train": {"path": "absent.parquet"}}, task__inputs=[["x"]], task__targets="y")
    plan = planned(job, capsys, "--nodes", "1x1cpu")
    assert "absent.parquet" in plan["epoch"]["problem"]
    assert (plan["epoch"]["steps"], plan["total_steps"], plan["memory"]["activations"]) == (None, None, None)
    assert plan["memory"]["weights"] == 4


def test_the_text_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, xs=[1.0] * 11, global_size=4, train={"epochs": 3})
    assert main(["plan", str(job), "scaling.workers=[1,2]", "--nodes", "1x2xA100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lin: strategy ddp, precision fp32"
    assert [line.split() for line in lines if line.startswith("  2 ")] == [
        ["2", "2", "2", "1", "1–2", "each", "4", "=", "2", "×", "2", "×", "1"]
    ]
    assert "  epoch: 11 rows, 3 steps, the last with 3 rows" in lines
    assert "  node 0  2 × A100  ranks 0–1" in lines
    assert "  elastic: 1 to 2 workers, 2 here" in lines


def test_a_pipeline_is_planned_with_its_stages_and_shared_by_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = {"name": "pipeline", "stages": 2, "replicas": 2, "micro_batches": 2}
    model = {"target": "tests.pipeline.models:Pp2"}
    job = write_job(tmp_path, xs=[1.0] * 8, global_size=4, strategy=strategy, task__model=model)
    plan = planned(job, capsys, "--nodes", "1x4cpu")
    assert [(row["workers"], row["largest"]) for row in plan["batches"]] == [(2, 2)]
    assert plan["placement"]["nodes"][0]["ranks"] == [0, 1, 2, 3]
    assert [(run["stage"], run["layers"]) for run in plan["pipeline"]["runs"]] == [(0, ["0"]), (1, ["1"])]
    assert 0 < plan["pipeline"]["bubble"] < 1
    assert main(["plan", str(job), "--nodes", "1x4cpu"]) == 0
    text = capsys.readouterr().out
    assert "  replicas  rows each" in text and "2 stages x 2 replicas, 1f1b, 2 micro-batches" in text
    assert "expected bubble" in text


def test_a_model_that_cannot_be_cut_is_a_problem_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, global_size=4, strategy={"name": "pipeline", "stages": 2})
    plan = planned(job, capsys, "--nodes", "1x4cpu", code=1)
    assert plan["problems"] == [
        "strategy pipeline: cannot cut a Lin: make it an nn.Sequential, or give it a method pipeline_layers() that returns its "
        "layers in order (modules, or raydist.pipeline.Layer)"
    ]
