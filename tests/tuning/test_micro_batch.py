"""Micro-batch sizes: which are tried, where it ends, what is suggested, what is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.cli import main
from raydist.errors import TrainError
from raydist.tuning.micro_batch import Size, Sizes, try_sizes
from raydist.tuning.trial import one_process
from tests.runs import config_of, write_job

ROWS = [1.0, 2.0] * 32


def full(most: int) -> dict[str, Any]:
    return {"target": "tests.tuning.models:Full", "args": {"most": most}}


def tried(folder: Path, largest: int | None = None, memory_mb: float | None = None, **changes: Any) -> Sizes:
    config = config_of(folder, **{"xs": ROWS, "global_size": 12, **changes})
    with one_process(config) as world:
        return try_sizes(config, world, 5, largest, memory_mb)


def test_sizes_double_until_one_does_not_fit(tmp_path: Path) -> None:
    sizes = tried(tmp_path, task__model=full(20))
    assert [(size.rows, size.fits) for size in sizes.tried] == [
        (1, True), (2, True), (4, True), (8, True), (12, True), (16, True), (32, False),
    ]  # fmt: skip
    assert sizes.ended == "32 rows did not fit" and sizes.largest == 16 and sizes.share == 12
    assert all(size.rows_per_s == pytest.approx(size.rows / size.step_s) for size in sizes.tried if size.fits and size.step_s)


def test_the_rows_of_the_training_set_and_max_end_the_search(tmp_path: Path) -> None:
    assert tried(tmp_path).ended == "the training set has 64 rows"
    sizes = tried(tmp_path, largest=4, scaling__workers=3)
    assert sizes.ended == "--max is 4 rows" and [size.rows for size in sizes.tried] == [1, 2, 4] and sizes.share == 4


def test_memory_ends_the_search_before_it_is_used_up(tmp_path: Path) -> None:
    sizes = tried(tmp_path, memory_mb=1.0)  # this process holds more than that already
    assert [size.rows for size in sizes.tried] == [1]
    assert sizes.ended.startswith("2 rows would need about ") and sizes.ended.endswith(" MiB, and 1 MiB are allowed")


def test_one_row_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="not one micro-batch size fits: 1 rows did not fit; use a smaller model"):
        tried(tmp_path, task__model=full(0))


def test_the_suggestion_is_the_smallest_of_the_fastest_that_come_up() -> None:
    speeds = {1: 10.0, 2: 96.0, 4: 100.0, 8: 80.0, 16: 300.0}
    sizes = Sizes(8, [*(Size(rows, True, rows / speed, speed, 1.0) for rows, speed in speeds.items()), Size(32, False)])
    assert (sizes.largest, sizes.fastest, sizes.suggested) == (16, 16, 2)  # 96 is 95 % of 100; 16 rows never come up


def test_the_command_prints_a_row_a_size_and_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    job = write_job(tmp_path, xs=ROWS, global_size=12, task__model=full(20))
    assert main(["tune", "batch", str(job), "--steps", "5"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[2:9]] == ["1", "2", "4", "8", "12", "16", "32"]
    assert told[8].split() == ["32", "out", "of", "memory"]
    section = yaml.safe_load(told[told.index("in the job file:") + 1])["batch"]
    assert section["global_size"] == 12 and section["micro_size"] in (1, 2, 4, 8, 12)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["job.yaml", "runs/lin.tune/batch.csv", "runs/lin.tune/batch.html"]
    rows = list(csv.DictReader((tmp_path / "runs/lin.tune/batch.csv").read_text().splitlines()))
    assert [row["fits"] for row in rows] == ["True"] * 6 + ["False"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "4"], "--steps 4 are too few: the first 3 are not timed, so at least 5"),
        (["--max", "0"], "--max 0 is no size: at least 1 row"),
        (["strategy={name: pipeline, stages: 2}", "scaling={}"], "tune batch times one worker with the whole model"),
        (["strategy=fsdp"], "one worker of fsdp holds the whole model"),
    ],
)
def test_a_wrong_command_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["tune", "batch", str(write_job(tmp_path)), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_no_rows_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "batch", str(write_job(tmp_path, xs=[]))]) == 1
    assert "data.train: no rows at all in tests.support:line" in capsys.readouterr().err
