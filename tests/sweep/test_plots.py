"""A sweep's charts: what is drawn from `trials.csv`, and the page that holds them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from raydist.report.build import report
from raydist.report.charts import Chart
from raydist.sweep.importance import importance
from raydist.sweep.plots import figures
from raydist.sweep.trials import read_trials
from tests.report.test_page import Parsed

HEAD = "trial,status,eval_loss,steps,epochs,rows,seconds,global_batch,lr,seed,error,optimizer.lr,batch.global_size,precision"
ROWS = [
    "0,finished,0.5,8,2,512,1.0,64,0.001,0,,0.001,64,fp32",
    '1,failed,,3,0,192,0.4,64,9.0,0,"step 3, rank 0: the <b>loss</b> is nan",9.0,64,bf16',
    "2,stopped,0.7,4,1,256,0.5,32,0.0001,0,,0.0001,32,bf16",
    "3,finished,0.25,8,2,512,1.0,64,0.01,0,,0.01,64,fp32",
    "4,finished,0.4,8,2,512,1.0,32,0.1,0,,0.1,32,bf16",
    "5,finished,nan,8,2,512,1.0,32,0.1,0,,0.1,32,",
    "6,running,,2,0,64,0.1,32,0.1,0,,0.1,32,fp32",
]


def sweep(folder: Path, rows: list[str] = ROWS, settings: str | None = "metric: eval_loss\nmode: min\n") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trials.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    if settings is not None:
        (folder / "sweep.yaml").write_text(settings)
    return str(folder)


def charts(folder: str) -> dict[str, Chart]:
    made = figures(folder)
    assert made is not None
    return {chart.title: chart for chart in made}


def test_history_has_the_trials_and_the_best_so_far(tmp_path: Path) -> None:
    chart = charts(sweep(tmp_path))["trials: eval_loss"]
    finished, stopped, best = chart.data
    assert (finished["x"], finished["y"]) == ([1, 4, 5], [0.5, 0.25, 0.4])
    assert (stopped["x"], stopped["y"]) == ([3], [0.7])
    assert (best["x"], best["y"]) == ([1, 4, 5, 7], [0.5, 0.25, 0.25, 0.25])
    assert "Best: trial 3 with 0.25 (optimizer.lr 0.01, batch.global_size 64, precision fp32)." in chart.words
    assert [row[0] for row in chart.rows] == ["3", "4", "0", "2", "1", "5", "6"]  # the best first, no number last


def test_the_highest_is_best_where_the_sweep_says_so(tmp_path: Path) -> None:
    folder = sweep(tmp_path, settings="sweep: {metric: eval_loss, mode: max, samples: 7}\n")
    chart = charts(folder)["trials: eval_loss"]
    assert chart.data[-1]["y"] == [0.5, 0.5, 0.5, 0.5] and chart.rows[0][0] == "2"
    assert "Best: trial 0 with 0.5" in chart.words  # trial 2 has more, and was stopped


def test_parallel_coordinates_place_words_and_wide_ranges(tmp_path: Path) -> None:
    trace = charts(sweep(tmp_path))["settings and metric"].data[0]
    lr, size, precision, metric = trace["dimensions"]
    assert lr["values"] == pytest.approx([math.log10(x) for x in (1e-3, 1e-4, 1e-2, 1e-1)])
    assert lr["ticktext"] == ["0.0001", "0.001", "0.01", "0.1"]
    assert size["values"] == [64, 32, 64, 32] and size["ticktext"] == ["32", "64"]
    assert precision["values"] == [1, 0, 1, 0] and precision["ticktext"] == ["bf16", "fp32"]
    assert metric["values"] == [0.5, 0.7, 0.25, 0.4] == trace["line"]["color"] and trace["line"]["reversescale"]


def test_a_key_that_some_trials_lack_has_a_place_for_that(tmp_path: Path) -> None:
    rows = [
        "0,finished,1,1,1,1,1,1,1,0,,,64,fp32",
        "1,finished,2,1,1,1,1,1,1,0,,0.5,64,",
        "2,finished,2,1,1,1,1,1,1,0,,0.9,64,fp32",
    ]
    lr, size, precision, _ = charts(sweep(tmp_path, rows))["settings and metric"].data[0]["dimensions"]
    assert lr["ticktext"] == ["(unset)", "0.5", "0.9"] and lr["values"][0] < 0.5
    assert size["range"] == [63, 65] and precision["ticktext"] == ["(unset)", "fp32"]


def test_importance_finds_the_setting_that_matters(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    draw = np.random.default_rng(0)
    rows = []
    for trial in range(40):
        lr, size, kind = 10 ** draw.uniform(-4, -1), draw.choice([32, 64]), draw.choice(["fp32", "bf16"])
        loss = (math.log10(lr) + 2.2) ** 2 + 0.05 * draw.normal()
        rows.append(f"{trial},finished,{loss},1,1,1,1,1,1,0,,{lr},{size},{kind}")
    trials = read_trials(sweep(tmp_path, rows))
    assert trials is not None
    found = importance(trials)
    assert found is not None and found.trials == 40 and found.left_out == []
    assert sum(found.shares.values()) == pytest.approx(1) and found.shares["optimizer.lr"] > 0.8
    assert importance(read_trials(sweep(tmp_path, rows[:3]))) is None  # type: ignore[arg-type]


def test_failed_trials_are_counted_and_listed_with_their_errors(tmp_path: Path) -> None:
    chart = charts(sweep(tmp_path))["how the trials ended"]
    assert chart.words.startswith("1 of 7 failed. Of 7 trials: 4 finished, 1 stopped, 1 failed, 1 running. trial 1: step 3")
    assert chart.rows == [["1", "step 3, rank 0: the <b>loss</b> is nan", "9", "64", "bf16"]]


def test_nothing_finished_and_nothing_at_all(tmp_path: Path) -> None:
    assert list(charts(sweep(tmp_path / "a", ROWS[1:2]))) == ["how the trials ended"]
    assert figures(sweep(tmp_path / "b", [])) is None and figures(str(tmp_path)) is None


def test_the_report_of_a_sweep_is_one_page_and_needs_no_runs(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = Parsed(Path(report([sweep(tmp_path)])).read_text())
    figures = json.loads(page.scripts[1])
    assert figures[0]["data"][-1]["name"] == "best so far" and figures[1]["data"][0]["type"] == "parcoords"
    assert "1 of 7 failed" in page.text and "the <b>loss</b> is nan" in page.text and "b" not in [tag for tag, _ in page.tags]
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & set(attributes)]
