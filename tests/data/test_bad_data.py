"""Nulls, drift, empty and broken files: each a clear error or the documented policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raydist.data.opening import open_eval
from raydist.data.source import Position
from raydist.errors import DataError
from tests.data.files import dataset, global_batches, opened, write_csv, write_json


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parquet(path: Path, group: int | None = None, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def ids(config: Any, size: int = 4) -> list[int]:
    return [row for batch in global_batches(config, size) for row in batch]


def refused(config: Any, *parts: str, size: int = 4) -> str:
    with pytest.raises(DataError) as caught:
        list(opened(config, size).steps(Position(), 1))
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


# -- nulls -----------------------------------------------------------------------------------------------------------


def holes(folder: Path) -> Path:
    parquet(folder / "a.parquet", id=[0, 1, 2, 3], x=[0.0, 1.0, 2.0, 3.0])
    parquet(folder / "b.parquet", group=2, id=[4, 5, 6, 7], x=[4.0, 5.0, None, None])
    return folder


def test_a_null_names_its_file_row_and_column(tmp_path: Path) -> None:
    config = dataset(holes(tmp_path / "d"))
    refused(config, f"{tmp_path}/d/b.parquet row 2: column 'x' is null there", "nulls: drop", "nulls: fill")
    with pytest.raises(DataError, match="column 'x' is null there"):
        open_eval(config, batch_size=4, rank=0, world_size=1)
    assert ids(dataset(tmp_path / "d", columns=["id"])) == list(range(8))


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_rows_with_nulls_are_dropped_and_counted(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "d"
    if kind == "parquet":
        holes(folder)
    else:
        table = pa.table({"id": list(range(8)), "x": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, None, None]})
        if kind == "csv":
            write_csv(folder / "a.csv", table)
        else:
            write_json(folder / "a.jsonl", table.to_pylist())
    for _ in range(2):  # the second time out of the cache
        source = opened(dataset(folder, nulls="drop"), 4)
        assert source.rows_per_epoch == 6
        assert source.notes == ["2 of 8 rows have a null and are dropped"]  # type: ignore[attr-defined]
        assert ids(dataset(folder, nulls="drop")) == [0, 1, 2, 3, 4, 5]
    shuffled = dataset(folder, nulls="drop", shuffle=True)
    assert sorted(ids(shuffled)) == [0, 1, 2, 3, 4, 5]
    assert global_batches(shuffled, 4, 3) == global_batches(shuffled, 4, 1)


def test_nulls_are_filled_and_counted(tmp_path: Path) -> None:
    config = dataset(holes(tmp_path / "d"), nulls="fill", fill_value=-1.0)
    source = opened(config, 8)
    assert next(source.steps(Position())).batch["x"].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert source.notes == ["nulls are filled with -1.0: 2 in 'x'"]  # type: ignore[attr-defined]


def test_a_fill_value_must_fit(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", n=[1, None])
    refused(dataset(path, nulls="fill", fill_value=0.5), "fill_value 0.5 does not fit column 'n' (int64)")
    refused(dataset(path, nulls="fill", fill_value="none"), "fill_value 'none' does not fit column 'n'")
    assert next(opened(dataset(path, nulls="fill", fill_value=7.0), 2).steps(Position())).batch["n"].tolist() == [1, 7]
    names = parquet(tmp_path / "s.parquet", s=["a", None])
    assert next(opened(dataset(names, nulls="fill", fill_value="?"), 2).steps(Position())).batch["s"] == ["a", "?"]


def test_a_column_that_is_null_in_a_whole_file(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a.parquet", id=[0, 1], x=[0.5, 1.5])
    parquet(folder / "b.parquet", id=[2, 3], x=pa.nulls(2))
    refused(dataset(folder), f"{folder}/b.parquet row 0: column 'x' is null there", "is the whole column null in this file?")
    assert ids(dataset(folder, nulls="drop")) == [0, 1]
    filled = next(opened(dataset(folder, nulls="fill", fill_value=9.0), 4).steps(Position())).batch["x"]
    assert filled.tolist() == [0.5, 1.5, 9, 9]
    everywhere = parquet(tmp_path / "n.parquet", id=[1], x=pa.nulls(1))
    refused(dataset(everywhere), "column 'x' is null there")
    refused(dataset(everywhere, nulls="drop"), "every row has a null, so none is left")
    assert next(opened(dataset(everywhere, nulls="fill", fill_value=2.0), 1).steps(Position())).batch["x"].tolist() == [2]


def test_nulls_inside_lists_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", v=[[1.0, None], [2.0, 3.0]])
    for settings in ({}, {"nulls": "drop"}, {"nulls": "fill", "fill_value": 0.0}):
        refused(dataset(path, **settings), f"{path}, rows 0..1: column 'v' has lists with nulls inside")


def test_statistics_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [0, 1, 2], "x": [1.0, None, 2.0]}), path, write_statistics=False)
    refused(dataset(path), f"{path} row 1: column 'x' is null there")
    assert ids(dataset(path, nulls="drop")) == [0, 2]


# -- drift -----------------------------------------------------------------------------------------------------------


def test_integers_and_floats_become_floats(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a.parquet", id=[0, 1], x=[1, 2])
    parquet(folder / "b.parquet", x=[0.5, 1.5], id=np.array([2, 3], dtype=np.int32))
    batch = next(opened(dataset(folder), 4).steps(Position())).batch
    assert batch["x"].tolist() == [1, 2, 0.5, 1.5]
    assert batch["id"].tolist() == [0, 1, 2, 3]
    assert (batch["x"].dtype, batch["id"].dtype) == (torch.float64, torch.int64)


def test_csv_columns_are_matched_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x\n0,1\n1,2\n")
    (tmp_path / "b.csv").write_text("x,id\n0.5,2\n1.5,3\n")
    batch = next(opened(dataset(tmp_path / "*.csv"), 4).steps(Position())).batch
    assert batch["id"].tolist() == [0, 1, 2, 3]
    assert batch["x"].tolist() == [1, 2, 0.5, 1.5]


def test_a_number_and_a_string_do_not_go_together(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a.parquet", x=[1, 2])
    parquet(folder / "b.parquet", x=["1", "2"])
    refused(dataset(folder), "column 'x' is int64 in", "a.parquet and string in", "b.parquet: these do not go together")


def test_a_missing_or_extra_column(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a.parquet", id=[0, 1], x=[1, 2])
    parquet(folder / "b.parquet", id=[2, 3])
    refused(dataset(folder), f"{folder}/b.parquet has no column 'x'; it has 'id'", "Set `columns`")
    refused(dataset(folder, columns=["id", "y"]), f"{folder}/a.parquet has no column 'y'; it has 'id', 'x'")
    assert ids(dataset(folder, columns=["id"])) == [0, 1, 2, 3]
    parquet(folder / "b.parquet", id=[2, 3], x=[3, 4], z=[0, 0])
    refused(dataset(folder), f"{folder}/b.parquet has a column 'z' that {folder}/a.parquet lacks")


def test_json_keys_may_be_absent(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", [{"id": 0, "x": 1.5}, {"id": 1}])
    refused(dataset(path), f"{path} row 1: column 'x' is null there")
    assert ids(dataset(path, nulls="drop")) == [0]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([0], pa.timestamp("us")), "timestamp[us]"),
        (pa.array([1], pa.decimal128(5, 2)), "decimal128(5, 2)"),
        (pa.array([b"x"]), "binary"),
        (pa.array([{"a": 1}]), "struct<a: int64>"),
        (pa.array([["a"]]), "list<item: string>"),
    ],
)
def test_types_without_a_tensor_are_refused_at_once(tmp_path: Path, column: pa.Array, kind: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [0], "t": column}), path)
    message = refused(dataset(path), f"column 't' of {path} holds", "leave the column out with `columns`")
    assert kind.split("<")[0] in message
    assert ids(dataset(path, columns=["id"])) == [0]


def test_lists_of_unequal_length(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", v=[[1.0], [1.0, 2.0], [3.0]])
    refused(dataset(path), "column 'v' has lists of different lengths (of shape (1,) and (2,)): pad or cut them")
    even = parquet(tmp_path / "b.parquet", v=[[[1, 2], [3, 4], [5, 6]]] * 2)
    assert next(opened(dataset(even), 2).steps(Position())).batch["v"].shape == (2, 3, 2)


# -- files -----------------------------------------------------------------------------------------------------------


def test_empty_parts(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a.parquet", id=np.array([0, 1]))
    parquet(folder / "b.parquet", id=np.array([], dtype=np.int64))
    with pq.ParquetWriter(folder / "c.parquet", pa.schema([("id", pa.int64())])) as writer:
        for values in ([2], [], [3, 4]):
            writer.write_table(pa.table({"id": pa.array(values, pa.int64())}))
    assert ids(dataset(folder), 2) == [0, 1, 2, 3, 4]
    assert sorted(ids(dataset(folder, shuffle={"window": 2}), 2)) == [0, 1, 2, 3, 4]
    refused(dataset(folder / "b.parquet"), f"{folder}/b.parquet: the files hold no rows")


def test_zero_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    refused(dataset(tmp_path / "a.parquet"), f"{tmp_path}/a.parquet is empty (0 bytes), so it is no parquet file")
    (tmp_path / "a.jsonl").write_bytes(b"")
    refused(dataset(tmp_path / "a.jsonl"), "the 1 file(s) there hold no rows")
    write_json(tmp_path / "b.jsonl", [{"id": 0}])
    source = opened(dataset(tmp_path / "*.jsonl"), 1)
    assert source.notes == [f"1 empty file(s) hold no rows, for instance {tmp_path}/a.jsonl"]  # type: ignore[attr-defined]
    (tmp_path / "a.png").write_bytes(b"")
    refused(dataset(tmp_path / "a.png"), f"{tmp_path}/a.png is empty (0 bytes), so it is no image")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not parquet")
    refused(dataset(tmp_path / "a.parquet"), f"{tmp_path}/a.parquet cannot be read as parquet")
    (tmp_path / "a.json").write_text('[{"id": 0}, {"id": 1}]')
    refused(dataset(tmp_path / "a.json"), "holds a JSON array; write JSON lines instead")
    (tmp_path / "b.json").write_text('{"id": 0}\n{"id": \n')
    refused(dataset(tmp_path / "b.json"), f"{tmp_path}/b.json cannot be read as JSON lines")
    (tmp_path / "a.csv").write_text("id,x\n1,2\n3\n")
    refused(dataset(tmp_path / "a.csv"), f"{tmp_path}/a.csv cannot be read as CSV", "Row #3")
    (tmp_path / "b.csv").write_text("id,id\n1,2\n")
    refused(dataset(tmp_path / "b.csv"), "the header names id more than once")


def test_a_file_that_changes_during_the_run(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", pa.table({"id": list(range(100))}))
    source = opened(dataset(path), 10)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(DataError, match=r"a.csv has \d+ rows where 100 were counted: it has changed meanwhile"):
        list(source.steps(Position(), 1))


# -- images ----------------------------------------------------------------------------------------------------------


def picture(path: Path, size: tuple[int, int] = (4, 6), mode: str = "RGB", value: int = 7) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size[1], size[0]), value if mode in ("L", "P") else (value,) * len(mode)).save(path)
    return path


def test_images_of_many_modes(tmp_path: Path) -> None:
    for number, mode in enumerate(["RGB", "L", "RGBA", "P"]):
        picture(tmp_path / f"d/{'ab'[number % 2]}/{number}.png", mode=mode)
    batch = next(opened(dataset(tmp_path / "d"), 4).steps(Position())).batch
    assert batch["image"].shape == (4, 3, 4, 6)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [0, 0, 1, 1]
    grey = next(opened(dataset(tmp_path / "d", images={"mode": "L"}), 4).steps(Position())).batch["image"]
    assert grey.shape == (4, 1, 4, 6)


def test_images_of_many_sizes(tmp_path: Path) -> None:
    picture(tmp_path / "d/a.png")
    picture(tmp_path / "d/b.png", size=(5, 6))
    refused(
        dataset(tmp_path / "d"), "b.png is 5 x 6 pixels (height x width)", "a.png is 4 x 6", "images: {size: [height, width]}"
    )
    batch = next(opened(dataset(tmp_path / "d", images={"size": [3, 2]}), 2).steps(Position())).batch
    assert batch["image"].shape == (2, 3, 3, 2)
    assert "label" not in batch


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "d/a.png")
    whole = picture(tmp_path / "d/b.png").read_bytes()
    (tmp_path / "d/b.png").write_bytes(whole[: len(whole) // 2])
    refused(dataset(tmp_path / "d"), f"{tmp_path}/d/b.png: this image cannot be read")
    (tmp_path / "d/b.png").write_bytes(b"no image at all")
    refused(dataset(tmp_path / "d"), f"{tmp_path}/d/b.png: this image cannot be read")
    assert opened(dataset(tmp_path / "d"), 2).name_rows(0, 0, 1, 2) == f"{tmp_path}/d/b.png"


def test_an_image_beside_class_folders(tmp_path: Path) -> None:
    picture(tmp_path / "d/cat/a.png")
    picture(tmp_path / "d/b.png")
    refused(dataset(tmp_path / "d"), f"{tmp_path}/d/b.png is in no class folder while other images are")
