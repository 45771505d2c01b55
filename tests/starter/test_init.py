"""`raydist init`: what it writes trains as it is, and what it is told wrong is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raydist.cli import main
from raydist.config import load_config


def table(rows: int = 400) -> pd.DataFrame:
    """y is a function of `size` and `city`; the other columns are of no use, each in its own way."""
    rng = np.random.default_rng(0)
    size, city = rng.normal(100, 20, rows), rng.choice(["Oslo", "Lima", "Rome"], rows)
    return pd.DataFrame(
        {
            "id": np.arange(rows),
            "size": size,
            "city": city,
            "garden": rng.random(rows) < 0.5,
            "same": 1.0,
            "note": [f"note {n}" for n in range(rows)],
            "rare": [1.0 + n if n % 4 == 0 else None for n in range(rows)],
            "when": pd.Timestamp("2026-01-01"),
            "price": size * 3 + 50 * (city == "Oslo"),
            "dear": np.where(size + 30 * (city == "Oslo") > 110, "yes", "no"),
        }
    )


def trained(folder: Path, *overrides: str) -> dict[str, float]:
    assert main(["train", str(folder / "job.yaml"), "--local", *overrides]) == 0
    run = next((folder / "runs").iterdir())
    metrics: dict[str, float] = json.loads((run / "summary.json").read_text())["metrics"]
    return metrics


def init(folder: Path, *arguments: str) -> int:
    return main(["init", "--out", str(folder), *arguments])


def test_classes_from_csv_train_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table().drop(columns="price").to_csv(tmp_path / "houses.csv", index=False)
    assert init(tmp_path / "job", "--data", str(tmp_path / "houses.csv"), "--target", "dear") == 0
    told = capsys.readouterr().out
    for name, why in (("id", "numbers the rows"), ("same", "the same value"), ("note", "an id, or free text")):
        assert f"left out: {name} ({why}" in told.replace("400 different texts in 400 rows: ", "")
    assert "left out: rare (300 of 400 rows have no value there)" in told
    config = load_config(tmp_path / "job" / "job.yaml")
    assert config.name == "houses"
    args = config.task.args
    assert (args["numbers"], args["categories"], args["classes"]) == ({"size": 1, "garden": 1}, {"city": 3}, 2)
    assert config.data.fit is not None
    assert (config.data.fit.normalize, config.data.fit.index) == (["size"], ["city", "dear"])
    parts = [pq.read_table(tmp_path / "job" / "split" / f"{part}.parquet") for part in ("train", "eval")]
    assert sorted(parts[0]["id"].to_pylist() + parts[1]["id"].to_pylist()) == list(range(400))
    assert [part.num_rows for part in parts] == [340, 60]
    assert trained(tmp_path / "job")["eval_accuracy"] > 0.9


def test_a_number_from_parquet_with_holes_trains_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table().drop(columns=["dear", "note", "when"])
    frame.loc[3, "size"] = np.inf
    frame.loc[5, "price"] = np.nan
    frame.to_parquet(tmp_path / "houses.parquet")
    assert init(tmp_path, "--data", str(tmp_path / "houses.parquet"), "--target", "price") == 0
    assert "2 rows with a missing value" in capsys.readouterr().out
    assert trained(tmp_path, "train.epochs=30")["eval_r2"] > 0.9


def test_evaluation_data_of_its_own_stays_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"x": np.arange(60) % 7, "target": np.arange(60) % 3 + 1})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame[:30].to_csv(tmp_path / "b.csv", index=False)
    assert init(tmp_path, "--data", str(tmp_path / "a.csv"), "--eval", str(tmp_path / "b.csv")) == 0
    config = load_config(tmp_path / "job.yaml")
    assert (config.data.train.path, config.data.eval and config.data.eval.path) == (f"{tmp_path}/a.csv", f"{tmp_path}/b.csv")
    assert config.data.fit is not None and "target" in config.data.fit.index  # 1, 2, 3 become 0, 1, 2
    assert not (tmp_path / "split").exists()
    assert trained(tmp_path, "train.epochs=1")["eval_loss"] > 0
    assert init(tmp_path, "--data", str(tmp_path / "a.csv"), "--eval", str(tmp_path / "b.csv")) == 2
    assert "job.yaml, task.py already; nothing was written" in capsys.readouterr().err
    assert init(tmp_path, "--data", str(tmp_path / "a.csv"), "--eval", str(tmp_path / "b.csv"), "--force") == 0


@pytest.mark.parametrize("parts", [False, True])
def test_images_train_as_they_are(tmp_path: Path, parts: bool) -> None:
    rng = np.random.default_rng(0)
    for part in ("train", "val") if parts else ("",):
        for label, light in (("dark", 40), ("light", 180)):
            folder = tmp_path / "pictures" / part / label
            folder.mkdir(parents=True)
            for number in range(20):
                pixels = rng.integers(light, light + 60, (12, 10 + number % 2, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    assert init(tmp_path / "job", "--data", str(tmp_path / "pictures")) == 0
    config = load_config(tmp_path / "job" / "job.yaml")
    assert config.data.train.images.size == [16, 8] and config.data.train.images.mode == "RGB"
    held_out = list((tmp_path / "job" / "split" / "eval").glob("*/*.png"))
    assert len(held_out) == (0 if parts else 6)
    assert trained(tmp_path / "job", "train.epochs=4")["eval_accuracy"] > 0.9


def test_a_text_trains_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("El perro de San Roque no tiene rabo. " * 300)
    assert init(tmp_path, "--data", str(tmp_path / "book.txt")) == 0
    assert trained(tmp_path, "train.epochs=2")["eval_loss"] < 2.5  # ln 256 = 5.5 for a model that knows nothing


def test_custom_trains_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--kind", "custom") == 0
    assert f"raydist train {tmp_path}/job.yaml" in capsys.readouterr().out
    assert trained(tmp_path)["eval_r2"] > 0.9


FRAMES = {
    "good": pd.DataFrame(
        {"price": np.arange(40.0) ** 2 % 11, "colour": ["red", "blue"] * 20, "one": 1, "when": pd.Timestamp("2026-01-01")}
    ),
    "short": pd.DataFrame({"x": [1, 2, 3], "target": [1, 2, 3]}),
    "only": pd.DataFrame({"target": [0, 1] * 20, "one": 1}),
    "ids": pd.DataFrame({"x": range(40), "target": [f"n{n}" for n in range(40)]}),
    "rowless": pd.DataFrame({"x": [], "target": []}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "good.csv"], "which column is to be predicted? Give --target NAME, one of: price, colour, one, when"),
        (
            ["--data", "good.csv", "--target", "Prize"],
            "no column 'Prize' (did you mean 'price'?); the columns are: price, colour",
        ),
        (["--data", "good.csv", "--target", "one"], "column 'one' is 1 in every row, so there is nothing to learn"),
        (["--data", "good.csv", "--target", "when"], "a target is a number, a text or true/false"),
        (
            ["--data", "good.csv", "--target", "colour", "--predict", "number"],
            "column 'colour' holds string values, not numbers",
        ),
        (["--data", "short.csv"], "has 3 rows without missing values; 10 are the least"),
        (["--data", "only.csv"], "has no column to predict 'target' from (one: the same value in every row)"),
        (["--data", "ids.csv"], "has 40 different values in 40 rows: an id or free text"),
        (["--data", "rowless.csv"], "has columns (x, target) and no rows"),
        (["--data", "absent.csv"], "no such file or folder"),
        (["--data", "empty.parquet"], "is empty (0 bytes)"),
        (["--data", "broken.parquet"], "cannot be read as parquet"),
        (["--data", "good.csv", "--kind", "vision"], "is no folder"),
        (["--data", ".", "--kind", "vision"], "no data files there"),
        (["--data", "good.csv", "--kind", "custom"], "looks at no data"),
        (["--kind", "tabular"], "--kind tabular needs --data"),
        ([], "give --data"),
        (["--data", "short.txt"], "has 5 bytes"),
        (["--data", "zero.txt"], "is no plain text"),
        (["--data", "short.txt", "--target", "x"], "--target and --predict are for --kind tabular"),
        (["--data", "only.csv", "--eval", "short.csv"], "has no column to predict"),
        (["--data", "good.csv", "--target", "price", "--eval", "short.csv"], "has no column 'price'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, frame in FRAMES.items():
        frame.to_csv(f"{name}.csv", index=False)
    Path("empty.parquet").touch()
    Path("broken.parquet").write_bytes(b"PAR1 and no more")
    Path("short.txt").write_text("words")
    Path("zero.txt").write_bytes(b"\0" * 5000)
    assert init(tmp_path / "job", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "job").exists()
