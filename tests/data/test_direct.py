"""Training and evaluation data read by each rank itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from raydist.data.opening import open_eval
from raydist.data.source import Position
from raydist.errors import DataError
from tests.data.files import dataset, global_batches, numbered, opened, write_csv, write_json, write_parquet

WORLDS = [1, 2, 3, 4, 8]
ROWS, SIZE = 103, 10


@pytest.fixture(params=["parquet", "csv", "json"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    if request.param == "parquet":
        return write_parquet(folder, ROWS)
    table = numbered(ROWS).select(["id", "x", "name"])
    if request.param == "csv":
        for number in range(2):
            write_csv(folder / f"{number}.csv", table.slice(number * 60, 60))
    else:
        for number in range(2):
            write_json(folder / f"{number}.jsonl", table.slice(number * 60, 60).to_pylist())
    return folder


@pytest.mark.parametrize("shuffle", [False, True, {"window": 20}])
def test_global_batches_are_the_same_at_every_world_size(path: Path, shuffle: object) -> None:
    config = dataset(path, shuffle=shuffle)
    alone = global_batches(config, SIZE, 1, stop=3)
    steps = -(-ROWS // SIZE)
    assert len(alone) == 3 * steps
    for epoch in range(3):
        rows = sorted(itertools.chain.from_iterable(alone[epoch * steps : (epoch + 1) * steps]))
        assert rows == list(range(ROWS))
    for world_size in WORLDS[1:]:
        assert global_batches(config, SIZE, world_size, stop=3) == alone


def test_every_step_resumes_at_every_world_size(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 47, group=7), shuffle={"window": 12})
    whole = global_batches(config, 6, 1, stop=2)
    for step in range(len(whole)):
        start = Position(*divmod(step, 8))
        for world_size in WORLDS:
            assert global_batches(config, 6, world_size, start, stop=2) == whole[step:], (step, world_size)


def test_a_row_keeps_its_columns(path: Path) -> None:
    for step in opened(dataset(path, shuffle=True), SIZE).steps(Position(), 1):
        ids = step.batch["id"]
        assert torch.equal(step.batch["x"], (ids / 8).to(step.batch["x"].dtype))
        assert step.batch["name"] == [f"row {i}" for i in ids.tolist()]
        if "v" in step.batch:
            assert torch.equal(step.batch["v"], ids[:, None].float().expand(-1, 2))


def test_steps_say_where_they_are(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 25))
    source = opened(config, 10, rank=2, world_size=4)
    assert (source.rows_per_epoch, source.steps_per_epoch) == (25, 3)
    steps = list(source.steps(Position(0, 1), 2))
    assert [(s.epoch, s.index, s.last_in_epoch, s.global_rows, s.rows) for s in steps] == [
        (0, 1, False, 10, 2), (0, 2, True, 5, 1), (1, 0, False, 10, 2), (1, 1, False, 10, 2), (1, 2, True, 5, 1),
    ]  # fmt: skip
    assert all(s.wait_s >= 0 for s in steps)
    assert steps[0].wait_s > 0


def test_a_rank_without_rows_borrows_one(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 12))
    steps = list(opened(config, 10, rank=3, world_size=4).steps(Position(), 1))
    assert [(s.global_rows, s.rows, s.batch["id"].tolist()) for s in steps] == [(10, 2, [8, 9]), (2, 0, [10])]


def test_batches_can_be_written_to(tmp_path: Path) -> None:
    source = opened(dataset(write_parquet(tmp_path / "d", 30)), 10)
    for _ in range(2):
        for step in source.steps(Position(), 1):
            assert torch.equal(step.batch["x"], step.batch["id"] / 8)
            step.batch["x"].zero_()


def test_drop_last_says_what_it_leaves_out(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 25), drop_last=True)
    source = opened(config, 10)
    assert (source.rows_per_epoch, source.steps_per_epoch) == (20, 2)
    assert source.notes == ["drop_last leaves 5 of 25 rows out of each epoch"]  # type: ignore[attr-defined]
    assert [len(b) for b in global_batches(config, 10, 2)] == [10, 10]
    with pytest.raises(DataError, match=r"25 rows, fewer than the 26 of a global batch, and drop_last leaves them all out"):
        opened(config, 26)


def test_rows_are_named(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 60, files=2, group=10))
    source = opened(config, 20)
    folder = tmp_path / "d"
    assert source.name_rows(0, 1, 5, 15) == f"{folder}/0.parquet rows 25..29, {folder}/1.parquet rows 0..4"
    assert source.name_rows(0, 0, 3, 4) == f"{folder}/0.parquet row 3"
    shuffled = opened(dataset(tmp_path / "d", shuffle=True), 20)
    ids = next(shuffled.steps(Position(), 1)).batch["id"].tolist()
    named = shuffled.name_rows(0, 0, 0, 2)
    assert all(f"{row % 30}" in named for row in ids[:2])


def test_large_data_is_not_kept_in_memory(tmp_path: Path) -> None:
    source = opened(dataset(write_parquet(tmp_path / "d", 200, group=10), shuffle={"window": 20}), 10)
    source.reader.cache_bytes = 0  # type: ignore[attr-defined]
    first = [step.batch["id"].tolist() for step in source.steps(Position(), 1)]
    assert len(source.reader._cache) <= 2  # type: ignore[attr-defined]
    assert sorted(itertools.chain.from_iterable(first)) == list(range(200))


def test_leaving_early_ends_the_thread(tmp_path: Path) -> None:
    source = opened(dataset(write_parquet(tmp_path / "d", 100)), 10)
    steps = source.steps(Position())
    next(steps)
    source.close()
    steps = source.steps(Position())
    next(steps)
    steps.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", WORLDS)
def test_evaluation_has_every_row_once(path: Path, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        source = open_eval(dataset(path), batch_size=7, rank=rank, world_size=world_size)
        assert source.rows == ROWS
        first = [(b.batch["id"].tolist(), b.rows) for b in source.batches()]
        assert [(b.batch["id"].tolist(), b.rows) for b in source.batches()] == first
        assert all(len(ids) == rows <= 7 for ids, rows in first)
        seen += [row for ids, _ in first for row in ids]
        source.close()
    assert seen == list(range(ROWS))


def test_more_ranks_than_evaluation_rows(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 3, files=1))
    counts = [
        sum(b.rows for b in open_eval(config, batch_size=8, rank=r, world_size=5).batches()) for r in range(5)
    ]  # fmt: skip
    assert counts == [1, 1, 1, 0, 0]


def test_numbers_keep_their_type(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = ["int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64", "bool"]
    columns = {kind: np.array([0, 1, 1], dtype=kind) for kind in kinds}
    columns |= {kind: np.array([0, 1, 200], dtype=kind) for kind in ("uint16", "uint32", "uint64")}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    batch = next(opened(dataset(tmp_path / "t.parquet"), 3).steps(Position(), 1)).batch
    for kind in kinds:
        assert batch[kind].dtype == getattr(torch, kind)
    assert [batch[k].dtype for k in ("uint16", "uint32", "uint64")] == [torch.int32, torch.int64, torch.int64]
    assert batch["uint32"].tolist() == [0, 1, 200]


def test_columns_of_the_task_are_read_and_no_others(tmp_path: Path) -> None:
    config = dataset(write_parquet(tmp_path / "d", 10))
    assert set(next(opened(config, 5, columns=["x", "id"]).steps(Position(), 1)).batch) == {"x", "id"}
    own = dataset(tmp_path / "d", columns=["name"])
    assert set(next(opened(own, 5, columns=["x", "id"]).steps(Position(), 1)).batch) == {"name"}
