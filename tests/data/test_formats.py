"""Text files cut into pieces, counted once; files listed."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist.data.formats as formats
from raydist.data.files import list_files
from raydist.data.formats import last_row_end
from raydist.data.source import Position
from raydist.data.tables import default_cache, open_tables
from raydist.errors import DataError
from tests.data.files import dataset, global_batches, opened, write_csv, write_json, write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(config: Any, size: int = 1000) -> dict[str, Any]:
    batch: dict[str, Any] = next(opened(config, size).steps(Position())).batch
    return batch


@pytest.mark.parametrize("piece", [16, 50, 333, 10**6])
def test_csv_pieces_end_at_ends_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(formats, "TEXT_PIECE", piece)
    names = [f'two\nlines, "{i}"' if i % 3 == 0 else f"plain {i}" for i in range(60)]
    path = write_csv(tmp_path / "a.csv", pa.table({"name": names, "id": list(range(60)), "x": np.arange(60) / 4}))
    batch = read(dataset(path))
    assert batch["name"] == names
    assert batch["id"].tolist() == list(range(60))
    assert batch["x"].tolist() == [i / 4 for i in range(60)]
    assert read(dataset(path, columns=["x", "id"])).keys() == {"x", "id"}
    whole = global_batches(dataset(path, shuffle={"window": 10}), 5, 2)
    assert sorted(row for rows in whole for row in rows) == list(range(60))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_csv_line_ends_and_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, last: bool) -> None:
    monkeypatch.setattr(formats, "TEXT_PIECE", 7)
    lines = ["id,x", "0,1", "", "1,2", "2,3", "", "", "3,4"]
    path = tmp_path / "a.csv"
    path.write_bytes((ending.join(lines) + (ending if last else "")).encode())
    assert read(dataset(path))["id"].tolist() == [0, 1, 2, 3]


@given(st.lists(st.sampled_from(['"', "\n", "a", ","]), max_size=30))
def test_the_last_end_of_a_row(signs: list[str]) -> None:
    text = "".join(signs)
    expected = 0
    for at, sign in enumerate(text):
        if sign == "\n" and text[:at].count('"') % 2 == 0:
            expected = at + 1
    assert last_row_end(text.encode(), quotes=True) == expected
    assert last_row_end(text.encode(), quotes=False) == text.rfind("\n") + 1


@pytest.mark.parametrize("piece", [20, 10**6])
def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(formats, "TEXT_PIECE", piece)
    path = write_json(tmp_path / "a.jsonl", [{"id": i, "v": [i, i / 2], "s": f"é{i}"} for i in range(40)])
    batch = read(dataset(path))
    assert batch["v"].tolist() == [[i, i / 2] for i in range(40)]
    assert batch["s"] == [f"é{i}" for i in range(40)]


def test_types_may_differ_between_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "TEXT_PIECE", 40)
    path = tmp_path / "a.csv"
    path.write_text("id,x\n" + "".join(f"{i},{i if i < 30 else i + 0.5}\n" for i in range(50)))
    assert read(dataset(path))["x"].tolist() == [float(i) if i < 30 else i + 0.5 for i in range(50)]
    path.write_text("id,x\n" + "".join(f"{i},{i if i != 40 else 'n/a?'}\n" for i in range(50)))
    with pytest.raises(DataError, match=r"column 'x' is int64 in .*a.csv rows 0\.\.\d+ and string in .*a.csv rows \d+\.\.\d+"):
        read(dataset(path))


def test_compressed_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id,x\n0,1\n1,2\n"))
    assert read(dataset(tmp_path / "a.csv.gz"))["id"].tolist() == [0, 1]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"id": 5}\n{"id": 6}\n'))
    assert read(dataset(tmp_path / "a.jsonl.gz"))["id"].tolist() == [5, 6]


def test_a_file_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path / "d/a.csv", pa.table({"id": list(range(10))}))
    open_tables(dataset(path))
    assert [file.suffix for file in default_cache().iterdir()] == [".json"]
    assert [file.name for file in path.parent.iterdir()] == ["a.csv"]

    def never(*_: Any) -> Any:
        raise AssertionError("counted again")

    with monkeypatch.context() as patch:
        patch.setattr(formats.Csv, "scan", never)
        assert open_tables(dataset(path)).rows.tolist() == [10]
    path.write_text("id\n1\n2\n")
    assert open_tables(dataset(path)).rows.tolist() == [2]
    elsewhere = tmp_path / "other"
    open_tables(dataset(path), cache_dir=elsewhere)
    assert len(list(elsewhere.iterdir())) == 1


def test_files_are_found_and_sorted(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a.parquet", "b/1.parquet", "_tmp/x.parquet", ".hidden.parquet", "b/notes.txt"):
        write_parquet(tmp_path / "make", 4, files=1)
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes((tmp_path / "make/0.parquet").read_bytes())

    def names(path: str | list[str]) -> list[str]:
        return [file.name for file in list_files(path).files]

    root = str(tmp_path / "d")
    assert names(root) == ["a.parquet", "b/1.parquet", "b/2.parquet"]
    assert names(f"{root}/*.parquet") == ["a.parquet"]
    assert names(f"{root}/**/*.parquet") == ["a.parquet", "b/1.parquet", "b/2.parquet"]
    assert names(f"{root}/b/[2-9].parquet") == ["2.parquet"]
    assert names([f"{root}/b/2.parquet", f"{root}/b/1.parquet"]) == ["1.parquet", "2.parquet"]
    assert names(f"file://{root}/a.parquet") == ["a.parquet"]
    assert list_files(root).format == "parquet"


def test_what_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("id\n1\n")
    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "data.bin").write_bytes(b"x")
    for path, words in {
        "nothing": "no such file or folder",
        "empty": "no data files there",
        "*.parquet": "no data files there",
        "data.bin": "the format does not show in the name; set `format`",
        "": "the files are of several formats: ",
        "empty/../zz://x": "no such file or folder",
    }.items():
        with pytest.raises(DataError, match=words):
            list_files(str(tmp_path / path))
    with pytest.raises(DataError, match="cannot be opened"):
        list_files("nosuchscheme://bucket/x.parquet")
    with pytest.raises(DataError, match="is on another file system than"):
        list_files([str(tmp_path / "a.csv"), "memory://x.csv"])


def test_any_fsspec_file_system(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    write_parquet(tmp_path / "d", 30, files=2)
    for file in (tmp_path / "d").iterdir():
        memory.pipe_file(f"/set/{file.name}", file.read_bytes())
    try:
        config = dataset("memory://set", shuffle={"window": 10})
        assert global_batches(config, 5, 2) == global_batches(dataset(tmp_path / "d", shuffle={"window": 10}), 5, 1)
    finally:
        memory.rm("/set", recursive=True)


def test_a_fingerprint_is_the_data_and_not_its_place(tmp_path: Path) -> None:
    first = opened(dataset(write_parquet(tmp_path / "a", 30)), 5)
    second = opened(dataset(write_parquet(tmp_path / "b", 30)), 5)
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint()["rows"] == 30
    assert first.fingerprint()["list"][0][0] == "0.parquet"
    assert first.fingerprint() != opened(dataset(write_parquet(tmp_path / "c", 31)), 5).fingerprint()
    assert first.fingerprint() != opened(dataset(tmp_path / "a", shuffle=True), 5).fingerprint()


def test_ray_tensor_columns_have_their_shape(tmp_path: Path) -> None:
    field = pa.field(
        "t",
        pa.list_(pa.int64()),
        metadata={"ARROW:extension:name": "ray.data.arrow_tensor_v2", "ARROW:extension:metadata": "[2, 2]"},
    )
    table = pa.table({"t": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int64()))}, schema=pa.schema([field]))
    pq.write_table(table, tmp_path / "t.parquet")
    assert read(dataset(tmp_path / "t.parquet"), 2)["t"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
