"""Categories and statistics of the training set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raydist.config import FitConfig
from raydist.data.fit import Fitted, Scale, fit
from raydist.data.opening import open_eval
from raydist.data.source import Position
from raydist.errors import DataError
from tests.data.files import dataset, opened


def training_set(folder: Path, rows: int = 100) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    table = pa.table(
        {
            "id": np.arange(rows),
            "x": rng.normal(5, 3, rows),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(2, 7, rows * 3).astype(np.float32)), 3),
            "kind": [["red", "green", "blue"][i % 3] for i in range(rows)],
            "code": np.arange(rows) % 4 * 10,
            "flat": np.full(rows, 2.5),
        }
    )
    for number in range(3):
        pq.write_table(table.slice(number * 40, 40), folder / f"{number}.parquet", row_group_size=15)
    return folder


def test_statistics_of_the_whole_set(tmp_path: Path) -> None:
    folder = training_set(tmp_path / "d")
    found = fit(dataset(folder), FitConfig(index=["kind", "code"], normalize=["x", "v", "flat"]))
    table = pq.read_table(folder)
    x, v = table["x"].to_numpy(), np.array(table["v"].to_pylist(), dtype=np.float64)
    assert found.index == {"kind": ["blue", "green", "red"], "code": [0, 10, 20, 30]}
    assert found.scale["x"].mean == pytest.approx([x.mean()])
    assert found.scale["x"].std == pytest.approx([x.std()])
    assert found.scale["v"].mean == pytest.approx(v.mean(axis=0).tolist())
    assert found.scale["v"].std == pytest.approx(v.std(axis=0).tolist())
    assert found.scale["flat"] == Scale([2.5], [1.0])
    assert Fitted.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_both_data_sets_use_them(tmp_path: Path) -> None:
    config = dataset(training_set(tmp_path / "d"))
    found = fit(config, FitConfig(index=["kind", "code"], normalize=["x", "v"]))
    batch = next(opened(config, 100, fitted=found).steps(Position())).batch
    assert (batch["x"].dtype, batch["v"].dtype, batch["kind"].dtype) == (torch.float32, torch.float32, torch.int64)
    assert batch["x"].double().mean().item() == pytest.approx(0, abs=1e-5)
    assert batch["v"].double().std(dim=0, correction=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert batch["kind"][:3].tolist() == [2, 1, 0]
    assert batch["code"][:5].tolist() == [0, 1, 2, 3, 0]
    assert batch["flat"][0].item() == 2.5
    part = next(open_eval(config, batch_size=100, rank=0, world_size=1, fitted=found, columns=["x", "id"]).batches()).batch
    assert torch.equal(part["x"], batch["x"])


def test_a_value_that_training_has_not(tmp_path: Path) -> None:
    found = fit(dataset(training_set(tmp_path / "d")), FitConfig(index=["kind"]))
    pq.write_table(pa.table({"kind": ["red", "pink", "mauve"]}), tmp_path / "eval.parquet")
    source = open_eval(dataset(tmp_path / "eval.parquet"), batch_size=4, rank=0, world_size=1, fitted=found)
    with pytest.raises(DataError, match=r"eval.parquet: column 'kind' has values .* the 3 categories .*: 'mauve', 'pink'$"):
        list(source.batches())


def test_columns_that_cannot_be_fitted(tmp_path: Path) -> None:
    config = dataset(training_set(tmp_path / "d"))
    for settings, words in {
        ("normalize", "kind"): "data.fit.normalize: column 'kind' holds values that are no plain numbers; only numbers",
        ("index", "v"): "data.fit.index: column 'v' holds lists; categories are strings or integers",
        ("index", "x"): "data.fit.index: column 'x' holds float64 values; categories are strings or integers",
        ("index", "nope"): "has no column 'nope'",
    }.items():
        with pytest.raises(DataError, match=words):
            fit(config, FitConfig.model_validate({settings[0]: [settings[1]]}))
    pq.write_table(pa.table({"x": [1.0, float("nan")]}), tmp_path / "nan.parquet")
    with pytest.raises(DataError, match="column 'x' has NaN or infinite values"):
        fit(dataset(tmp_path / "nan.parquet"), FitConfig(normalize=["x"]))


def test_images_are_scaled_by_channel(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (2, 3), (number, 10 * number, 50)).save(tmp_path / f"{number}.png")
    found = fit(dataset(tmp_path), FitConfig(normalize=["image"]))
    assert found.scale["image"].mean == pytest.approx([1.5, 15, 50])
    image = next(opened(dataset(tmp_path), 4, fitted=found).steps(Position())).batch["image"]
    assert image.shape == (4, 3, 3, 2)
    assert image.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
