"""The data of the example jobs: complete, split without overlap, written whole or not at all."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits

from raydist.config import load_config

JOBS = Path(__file__).resolve().parents[2] / "jobs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"jobs_data_{name}", JOBS / "data" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = load("digits")
text = load("text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("data") / "digits"
    assert digits.write_digits(made) is True
    return made


def rows_of(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    table = pa.dataset.dataset(folder / split).to_table()
    return np.array(table["pixels"].to_pylist()), table["label"].to_numpy()


def test_digits_are_all_there_once(folder: Path) -> None:
    (train, train_labels), (held_out, held_out_labels) = rows_of(folder, "train"), rows_of(folder, "eval")
    images, labels = load_digits(return_X_y=True)
    written = np.concatenate([train, held_out]) * 16
    order, wanted = np.lexsort(written.T), np.lexsort(images.T)
    np.testing.assert_array_equal(written[order], images[wanted])
    np.testing.assert_array_equal(np.concatenate([train_labels, held_out_labels])[order], labels[wanted])


def test_digits_split_is_stratified(folder: Path) -> None:
    _, train = rows_of(folder, "train")
    _, held_out = rows_of(folder, "eval")
    share = np.bincount(held_out) / (np.bincount(train) + np.bincount(held_out))
    assert np.all((share >= 0.2) & (share < 0.21))


def test_digits_have_the_types_the_jobs_expect(folder: Path) -> None:
    parts = sorted((folder / "train").iterdir())
    assert len(parts) == 4
    for part in parts:
        file = pq.ParquetFile(part)
        assert file.schema_arrow.field("pixels").type == pa.list_(pa.float32(), 64)
        assert file.schema_arrow.field("label").type == pa.int64()
        assert file.num_row_groups > 1
        file.close()
    pixels, _ = rows_of(folder, "train")
    assert pixels.min() == 0.0
    assert pixels.max() == 1.0


def test_digits_are_written_once_and_again_when_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    assert digits.write_digits(folder) is True
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    assert digits.write_digits(folder) is False
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == times

    cut = folder / "train" / "part-1.parquet"
    cut.write_bytes(cut.read_bytes()[:100])
    assert digits.write_digits(folder) is True
    (folder / "eval" / "part-0.parquet").unlink()
    assert digits.write_digits(folder) is True
    assert digits.write_digits(folder) is False
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_digits_writes_nothing_under_its_name_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits.pq, "write_table", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        digits.write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_digits_runs_as_a_script_and_writes_beside_itself(tmp_path: Path) -> None:
    script = shutil.copy(JOBS / "data" / "digits.py", tmp_path)
    for words in ("written", "already there"):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path.resolve() / 'digits'}: {words}\n"
    assert (tmp_path / "digits" / "train").is_dir()


def test_text_windows_cover_the_split_once_and_look_one_character_ahead() -> None:
    dataset = text.TopicText("eval", context=32)
    rows = [dataset[row] for row in range(len(dataset))]
    assert all(ids.dtype == next_ids.dtype == torch.int64 and ids.shape == next_ids.shape == (32,) for ids, next_ids in rows)
    joined = torch.cat([ids for ids, _ in rows])
    assert torch.equal(joined, dataset.characters[: len(joined)])
    assert len(dataset.characters) - len(joined) <= 32
    assert torch.equal(torch.cat([next_ids for _, next_ids in rows]), dataset.characters[1 : len(joined) + 1])


def test_text_is_readable_english() -> None:
    characters = bytes(text.TopicText("eval", context=8).characters.tolist()).decode()
    assert 'The "assert" statement' in characters
    assert min(characters.encode()) >= 0
    assert max(characters.encode()) < text.VOCABULARY


def test_text_splits_share_no_topic() -> None:
    train, held_out = text.topic_names("train"), text.topic_names("eval")
    assert not set(train) & set(held_out)
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(0.1, abs=0.02)


def test_text_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="split is 'test'; allowed: train, eval"):
        text.TopicText("test", context=8)
    with pytest.raises(ValueError, match="context is 0; it must be at least 1"):
        text.TopicText("train", context=0)
    dataset = text.TopicText("eval", context=8)
    with pytest.raises(IndexError, match=f"row {len(dataset)} is outside"):
        dataset[len(dataset)]


JOB_FILES = sorted(path for path in JOBS.glob("*.yaml") if path.name != "kuberay.yaml")  # that one is KubeRay's, not raydist's


@pytest.mark.parametrize("job", JOB_FILES, ids=lambda path: path.name)
def test_every_job_file_loads_and_says_where_its_schema_is(job: Path) -> None:
    config = load_config(job)
    assert config.name == job.stem
    assert config.storage == str(JOBS.parent / "runs")
    assert job.read_text().startswith("# yaml-language-server: $schema=../raydist.schema.json\n")
