"""The learning-rate range test: its losses by the formula, where it stops, what it suggests, what it refuses."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from raydist.cli import main
from raydist.config import load_config
from raydist.errors import TrainError
from raydist.tuning.lr_range import RangeTest, range_test, suggest
from raydist.tuning.trial import as_yaml, one_process, section_line
from tests.runs import config_of, write_job

ONES = [1.0] * 8


def ranged(folder: Path, low: float, high: float, steps: int, **changes: object) -> RangeTest:
    config = config_of(folder, **{"xs": ONES, "global_size": 4, **changes})
    with one_process(config) as world:
        return range_test(config, world, low, high, steps)


def test_the_losses_are_those_of_an_exponentially_growing_rate(tmp_path: Path) -> None:
    test = ranged(tmp_path, 1e-4, 0.4, 40)
    # LIN on rows (1, 3): the error is 3 at first, and a step of rate lr multiplies it by 1 - 2 lr
    error, losses, lrs = 3.0, [], []
    for step in range(40):
        lr = 1e-4 * (0.4 / 1e-4) ** (step / 39)
        lrs.append(lr)
        losses.append(error**2)
        error *= 1 - 2 * lr
    assert test.lrs == pytest.approx(lrs) and test.losses == pytest.approx(losses, rel=1e-5, abs=1e-7)
    assert not test.diverged and test.ended == "step 40 of 40 was reached"


def test_it_stops_where_the_loss_diverges(tmp_path: Path) -> None:
    test = ranged(tmp_path, 1e-3, 100.0, 60)
    assert test.diverged and len(test.losses) < 60
    ratios = [value / min(test.smoothed[: at + 1]) for at, value in enumerate(test.smoothed)]
    assert ratios[-1] > 4 and max(ratios[:-1]) <= 4
    assert test.lrs[-1] > 1.0  # above 2 / (second derivative = 2) the error grows
    assert test.steepest is not None and test.tenth is not None and test.steepest < 1.0


def test_the_suggestion_is_where_a_known_curve_is_steepest() -> None:
    lrs = np.logspace(-6, 1, 100)
    fall = 2.3 - 2.0 / (1 + np.exp(-4 * (np.log10(lrs) + 3)))  # a logistic fall, steepest at 1e-3
    rise = np.maximum(0, np.log10(lrs)) ** 2 * 8 + np.where(lrs > 0.3, (lrs - 0.3) * 5, 0)
    noise = np.random.default_rng(0).normal(0, 0.03, 100)
    steepest, tenth = suggest(lrs.tolist(), (fall + rise + noise).tolist())
    assert steepest is not None and abs(math.log10(steepest) + 3) < 0.4
    assert tenth is not None and 1e-3 < tenth < 0.1


def test_noise_and_a_rising_loss_give_no_suggestion() -> None:
    lrs = np.logspace(-6, 1, 100).tolist()
    assert suggest(lrs, np.random.default_rng(1).normal(2.3, 0.1, 100).tolist()) == (None, None)
    assert suggest(lrs, np.linspace(2, 8, 100).tolist()) == (None, None)
    assert suggest(lrs, [2.0] * 100) == (None, None)


def test_the_command_prints_the_line_for_the_job_file_and_leaves_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    changes = {"optimizer__momentum": 0.5, "schedule": {"name": "cosine"}, "checkpoint__every": {"steps": 1}}
    job = write_job(tmp_path, xs=ONES, global_size=4, **changes)
    assert main(["tune", "lr", str(job), "--low", "1e-4", "--steps", "40"]) == 0
    told = capsys.readouterr().out.splitlines()
    line = told[told.index("in the job file:") + 1].strip()
    override = told[told.index("or on the command line:") + 1].strip()
    section = yaml.safe_load(line)["optimizer"]
    assert section["name"] == "sgd" and section["momentum"] == 0.5 and 1e-4 < section["lr"] < 1
    job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), "optimizer": section}))
    assert load_config(job).optimizer == load_config(job, [override]).optimizer
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["job.yaml", "runs/lin.tune/lr.csv", "runs/lin.tune/lr.html"]
    rows = list(csv.DictReader((tmp_path / "runs/lin.tune/lr.csv").read_text().splitlines()))
    assert float(rows[0]["lr"]) == 1e-4 and float(rows[0]["loss"]) == 9.0
    page = (tmp_path / "runs/lin.tune/lr.html").read_text()
    assert "learning-rate range test" in page and "steepest descent" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--low", "1", "--high", "0.1"], "the range is backwards: --low 1 must be below --high 0.1"),
        (["--low", "0"], "--low 0 is no learning rate: give a number above 0"),
        (["--high", "nan", "--steps", "5"], "--high nan is no learning rate: give a number above 0; --steps 5 are too few"),
        (["--steps", "many"], "Invalid value for '--steps'"),
        (["optimizer.lr=-1"], "optimizer.lr"),
    ],
)
def test_a_wrong_range_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["tune", "lr", str(write_job(tmp_path)), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_nan_from_the_start_is_an_error_with_its_rows(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"not finite from the first step on, at a learning rate of 0\.001: .*the loss is nan"):
        ranged(tmp_path, 1e-3, 1.0, 20, xs=[math.nan] * 8)


def test_no_rows_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "lr", str(write_job(tmp_path, xs=[]))]) == 1
    assert "data.train: no rows at all in tests.support:line" in capsys.readouterr().err


def test_a_loss_that_never_falls_is_exit_code_1_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, xs=[0.0] * 8)  # rows (0, 0): nothing to learn
    assert main(["tune", "lr", str(job), "--steps", "20"]) == 1
    assert "no suggestion. Give another --low and --high" in capsys.readouterr().out


def test_numbers_are_written_as_yaml_reads_them(tmp_path: Path) -> None:
    assert as_yaml(1e-5) == "1.0e-05" and yaml.safe_load(as_yaml(1e-5)) == 1e-5 and as_yaml(0.0032) == "0.0032"
    config = config_of(tmp_path, optimizer={"name": "adamw", "lr": 0.1, "weight_decay": 0.01})
    assert section_line(config, "optimizer", lr=1e-5) == "optimizer: {name: adamw, lr: 1.0e-05, weight_decay: 0.01}"
