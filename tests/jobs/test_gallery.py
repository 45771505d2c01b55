"""The figures in jobs/README.md are what the jobs reach."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raydist.config import load_config
from raydist.runners.local import train_local
from tests.jobs.test_data import JOBS, load

ROW = re.compile(r"^\| \[\w+\.yaml\]\((\w+)\.yaml\) .*\| (\w+) ([\d.]+) \|$", re.MULTILINE)
FIGURES = {name: (metric, float(figure)) for name, metric, figure in ROW.findall((JOBS / "README.md").read_text())}


def trained(name: str, folder: Path, *overrides: str) -> float:
    train_local(load_config(JOBS / f"{name}.yaml", [f"storage={folder}/runs", *overrides]))
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    figure: float = summary["metrics"][FIGURES[name][0]]
    return figure


def test_every_row_names_a_job_that_loads() -> None:
    assert len(FIGURES) == 6
    for name in FIGURES:
        assert load_config(JOBS / f"{name}.yaml").name == name


@pytest.mark.parametrize(("name", "tolerance"), [("breast_cancer", 0.02), ("diabetes", 0.04)])
def test_the_tables(name: str, tolerance: float, tmp_path: Path) -> None:
    load("tables").write_table(name, tmp_path)
    paths = [f"data.{part}.path={tmp_path}/{name}/{part}.parquet" for part in ("train", "eval")]
    assert trained(name, tmp_path, *paths) == pytest.approx(FIGURES[name][1], abs=tolerance)


@pytest.mark.nightly
def test_the_hugging_face_model(tmp_path: Path) -> None:
    assert trained("hf_text", tmp_path) == pytest.approx(FIGURES["hf_text"][1], abs=0.1)
