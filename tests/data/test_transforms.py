"""Transforms that keep the rows, random ones, and those that change their number."""

from __future__ import annotations

import pickle
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.data.opening import open_eval
from raydist.data.source import Position
from raydist.errors import ConfigError, DataError
from tests.data import transforms as mine
from tests.data.files import dataset, global_batches, opened, write_parquet

HERE = "tests.data.transforms"


def with_(path: Path, *names: str, args: dict[str, Any] | None = None, **settings: Any) -> Any:
    targets = [{"target": f"{HERE}:{name}", "args": args or {}} for name in names]
    return dataset(path, transforms=targets, **settings)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "d", 103, group=9)


def test_functions_and_classes(path: Path) -> None:
    batch = next(opened(with_(path, "add", args={"column": "x", "amount": 2.0}), 10).steps(Position())).batch
    assert torch.equal(batch["x"], batch["id"] / 8 + 2)
    before = mine.Scale.built
    source = opened(with_(path, "Scale", args={"factor": 3.0}), 10)
    for step in source.steps(Position(), 2):
        assert torch.equal(step.batch["x"], (step.batch["id"] / 8) * 3)
    assert mine.Scale.built == before + 1
    names = next(opened(with_(path, "as_lists"), 3).steps(Position())).batch
    assert names == {"id": names["id"], "name": ["<row 0>", "<row 1>", "<row 2>"]}


def test_random_ones_depend_on_seed_epoch_and_batch_alone(path: Path) -> None:
    config = with_(path, "jitter", shuffle={"window": 20})

    def noise(world_size: int, start: Position, seed: int = 0) -> list[list[float]]:
        ranks = [
            [s.batch["noise"][: s.rows].tolist() for s in opened(config, 10, r, world_size, seed=seed).steps(start, 2)]
            for r in range(world_size)
        ]
        return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]

    alone = noise(1, Position())
    assert noise(3, Position()) == alone
    assert noise(2, Position(0, 5)) == alone[5:]
    assert noise(2, Position(1, 3)) == alone[14:]
    assert len({value for batch in alone for value in batch}) == 206
    assert noise(1, Position(), seed=1) != alone


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("keep_even", r"transform tests.data.transforms:keep_even made \d+ rows of \d+. .* `rows: changes`"),
        ("no_dict", "returned a list; it must return a dict of arrays"),
        ("ragged", "returned columns of different lengths: "),
    ],
)
def test_what_a_transform_must_return(path: Path, name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        next(opened(with_(path, name), 10).steps(Position()))


def test_an_error_inside_one_is_named(path: Path) -> None:
    config = with_(path, "add", args={"column": "nope", "amount": 1})
    with pytest.raises(DataError, match=r"transform tests.data.transforms:add failed: KeyError: 'nope' \(.*, line \d+\)"):
        next(opened(config, 10).steps(Position()))
    with pytest.raises(DataError, match=r"^row 3 is refused$"):
        next(opened(with_(path, "refuse_row", args={"row": 3}), 10).steps(Position()))


def test_arguments_are_checked(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.transforms\[0\]: .*does not take these args"):
        next(opened(with_(path, "add", args={"amuont": 1}), 10).steps(Position()))


def changed(config: Any, world_size: int, start: Position, stop: int | None = 2, steps: int | None = None) -> list[list[int]]:
    ranks = []
    for rank in range(world_size):
        source = opened(config, 10, rank, world_size)
        assert (source.rows_per_epoch, source.steps_per_epoch) == (None, None)
        found = list(islice(source.steps(start, stop), steps))
        ranks.append([s.batch["id"][: s.rows].tolist() for s in found])
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("name", "times"), [("keep_even", 1), ("twice", 2)])
def test_the_number_of_rows_may_change_when_declared(path: Path, name: str, times: int) -> None:
    config = with_(path, name, rows="changes", shuffle={"window": 20})
    alone = changed(config, 1, Position(), 1)
    expected = range(0, 103, 2) if name == "keep_even" else sorted([*range(103)] * 2)
    assert sorted(row for rows in alone for row in rows) == list(expected)
    assert [len(rows) for rows in alone[:-1]] == [10] * (len(alone) - 1)
    two = changed(config, 1, Position())
    assert two[: len(alone)] == alone
    assert changed(config, 3, Position()) == two
    for step in (1, len(alone) - 1):
        assert changed(config, 2, Position(0, step)) == two[step:]
    assert changed(config, 2, Position(1, 1)) == two[len(alone) + 1 :]
    assert changed(config, 1, Position(), None, steps=len(two)) == two


def test_a_changing_epoch_marks_its_last_step_and_drops_its_tail(path: Path) -> None:
    config = with_(path, "keep_even", rows="changes")
    steps = list(opened(config, 10, 3, 4).steps(Position(), 1))
    assert [(s.index, s.last_in_epoch, s.global_rows, s.rows) for s in steps][-2:] == [(4, False, 10, 2), (5, True, 2, 0)]
    short = with_(path, "keep_even", rows="changes", drop_last=True)
    steps = list(opened(short, 10).steps(Position(), 1))
    assert [(s.last_in_epoch, s.rows) for s in steps] == [(False, 10)] * 4 + [(True, 10)]
    source = opened(config, 10)
    assert "resuming inside an epoch replays it from its start" in source.notes[-1]  # type: ignore[attr-defined]
    assert source.name_rows(0, 1, 2, 4) == (
        "rows 2..3 of global batch 1 of epoch 0, counted after the transforms (with rows: changes their file is not known)"
    )
    assert source.fingerprint()["rows_change"] is True
    source.close()


def test_filters_that_leave_nothing(path: Path) -> None:
    with pytest.raises(DataError, match="the transforms left too few rows of epoch 0 for one batch"):
        next(opened(with_(path, "nothing_left", rows="changes"), 10).steps(Position()))


@pytest.mark.parametrize("name", ["add", "keep_even", "twice", "nothing_left"])
def test_evaluation_with_transforms(path: Path, name: str) -> None:
    args = {"column": "x", "amount": 0.0} if name == "add" else {}
    config = with_(path, name, args=args, rows="same" if name == "add" else "changes")
    seen: list[int] = []
    for rank in range(3):
        source = open_eval(config, batch_size=8, rank=rank, world_size=3)
        assert source.rows == (103 if name == "add" else None)
        seen += [row for b in source.batches() for row in b.batch["id"].tolist()]
    assert seen == {
        "add": list(range(103)), "keep_even": list(range(0, 103, 2)), "twice": sorted([*range(103)] * 2), "nothing_left": [],
    }[name]  # fmt: skip


def test_random_evaluation_is_the_same_at_every_world_size(path: Path) -> None:
    config = with_(path, "jitter")

    def noise(world_size: int) -> list[float]:
        ranks = [open_eval(config, batch_size=8, rank=r, world_size=world_size) for r in range(world_size)]
        return [value for source in ranks for b in source.batches() for value in b.batch["noise"].tolist()]

    assert noise(3) == noise(1)


def test_they_travel_unbuilt(path: Path) -> None:
    source = opened(with_(path, "Scale", args={"factor": 1.0}), 10)
    next(source.steps(Position()))
    assert pickle.loads(pickle.dumps(source.reader)).transforms._built is None  # type: ignore[attr-defined]
    assert global_batches(with_(path, "Scale", args={"factor": 1.0}), 10) == global_batches(dataset(path), 10)
