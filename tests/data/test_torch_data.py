"""A torch Dataset by the batch law: the same global batches at any world size, and a row looks the same everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from raydist.batching import rows_in_step
from raydist.config import DatasetConfig
from raydist.data.source import Position
from raydist.data.torch_data import TorchEval, TorchSource, build_dataset
from raydist.errors import ConfigError, DataError
from tests.runs import Breaks

HERE = "tests.data.test_torch_data"


class Numbered(Dataset[Any]):
    """Row i is (i, three random numbers of Python, numpy and torch): an augmentation."""

    def __init__(self, rows: int = 10) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        return row, torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def config(**settings: Any) -> DatasetConfig:
    return DatasetConfig.model_validate({"target": f"{HERE}:Numbered", **settings})


def source(
    rank: int = 0, world_size: int = 1, size: int = 4, seed: int = 0, dataset: Any = None, **settings: Any
) -> TorchSource:
    return TorchSource(Numbered() if dataset is None else dataset, config(**settings), size, seed, rank, world_size)


def ids(batches: list[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def global_batches(world_size: int, start: Position | None = None, stop: int = 2, **settings: Any) -> list[tuple[Any, ...]]:
    """(epoch, index, ids, numbers) of each global batch, put together from the ranks' shares."""
    ranks = []
    for rank in range(world_size):
        steps = list(source(rank, world_size, **settings).steps(start or Position(), stop))
        ranks.append(
            [(s.epoch, s.index, s.global_rows, s.batch[0][: s.rows], s.batch[1][: s.rows], s.last_in_epoch) for s in steps]
        )
    merged = []
    for parts in zip(*ranks, strict=True):
        assert len({part[:3] + part[5:] for part in parts}) == 1
        rows = torch.cat([part[3] for part in parts])
        assert len(rows) == parts[0][2]
        merged.append((*parts[0][:2], rows.tolist(), torch.cat([part[4] for part in parts]).tolist(), parts[0][5]))
    return merged


# -- order ------------------------------------------------------------------------------------------------------------


def test_without_shuffle_rows_come_in_order_with_a_short_tail() -> None:
    found = global_batches(1, stop=1)
    assert [batch[2] for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch[4] for batch in found] == [False, False, True]
    assert [batch[2] for batch in global_batches(1, stop=1, drop_last=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_global_batches_and_augmentation_are_the_same_at_any_world_size(world_size: int) -> None:
    for settings in ({"shuffle": True}, {}, {"shuffle": True, "drop_last": True}):
        assert global_batches(world_size, **settings) == global_batches(1, **settings)


def test_each_epoch_is_a_complete_new_permutation_of_seed_and_epoch() -> None:
    found = global_batches(1, stop=3, shuffle=True)
    epochs = [[row for epoch, _, rows, *_ in found for row in rows if epoch == e] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert global_batches(1, stop=3, shuffle=True) == found
    other = [batch[2] for batch in global_batches(1, stop=3, shuffle=True, seed=1)]
    assert other != [batch[2] for batch in found]
    augmented = {row: numbers for _, _, rows, values, _ in found[:3] for row, numbers in zip(rows, values, strict=True)}
    again = {row: numbers for _, _, rows, values, _ in found[3:6] for row, numbers in zip(rows, values, strict=True)}
    assert len({tuple(v) for v in augmented.values()}) == 10  # rows differ, and a row differs between epochs
    assert all(augmented[row] != again[row] for row in augmented)


@pytest.mark.parametrize("at", [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0)])
def test_any_position_is_sought_not_replayed(at: tuple[int, int]) -> None:
    whole = global_batches(1, stop=3, shuffle=True)
    assert global_batches(2, Position(*at), stop=3, shuffle=True) == [batch for batch in whole if batch[:2] >= at]


def test_a_rank_without_a_share_borrows_a_row_that_does_not_count() -> None:
    steps = list(source(2, 3, size=4, dataset=Numbered(5)).steps(Position(), 1))
    assert [(step.rows, step.global_rows, step.batch[0].tolist()) for step in steps] == [(1, 4, [3]), (0, 1, [4])]


def test_without_an_end_epochs_go_on() -> None:
    steps = source().steps(Position())
    assert [next(steps).epoch for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    steps.close()  # type: ignore[attr-defined]


def test_the_source_knows_its_size_and_names_rows() -> None:
    found = source(shuffle=True)
    assert (found.rows_per_epoch, found.steps_per_epoch) == (10, 3)
    assert (source(drop_last=True).rows_per_epoch, source(drop_last=True).steps_per_epoch) == (8, 2)
    expected = global_batches(1, stop=2, shuffle=True)[4][2]
    assert found.name_rows(1, 1, 1, 3) == f"rows {expected[1]}, {expected[2]} of {HERE}:Numbered"
    many = source(dataset=Numbered(100), size=100).name_rows(0, 0, 0, 100)
    assert many == f"rows 0, 1, 2, 3, 4, 5, 6, 7 … of {HERE}:Numbered"
    assert found.fingerprint() == {"kind": "dataset", "target": f"{HERE}:Numbered", "rows": 10, "rows_per_epoch": 10}


# -- loader processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4, "pin_memory": True}]
)
def test_loader_processes_give_the_same_batches_and_augmentation(loader: dict[str, Any]) -> None:
    for world_size in (1, 2):
        assert global_batches(world_size, loader=loader, shuffle=True) == global_batches(1, shuffle=True)
    evaluated = [
        TorchEval(Numbered(), config(**settings), 3, 0, 0, 1)
        for settings in ({}, {"loader": loader})  # type: ignore[list-item]
    ]
    first, second = ([(d.batch[0].tolist(), d.batch[1].tolist()) for d in found.batches()] for found in evaluated)
    assert first == second


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_cannot_be_read_is_named(workers: int) -> None:
    broken = source(dataset=Breaks([1.0] * 6, at=5), loader={"num_workers": workers})
    steps = broken.steps(Position(), 1)
    next(steps)
    with pytest.raises(DataError, match=r"^row 5 of Breaks: FileNotFoundError: image 5.png$"):
        next(steps)
    evaluation = TorchEval(Breaks([1.0] * 6, at=5), config(), 6, 0, 0, 1)
    with pytest.raises(DataError, match=r"^row 5 of Breaks: FileNotFoundError: image 5.png$"):
        next(evaluation.batches())


class Ragged(Numbered):
    def __getitem__(self, row: int) -> Any:
        return torch.ones(1 + row)


def test_rows_that_do_not_fit_together_are_told_so() -> None:
    with pytest.raises(
        DataError, match=r"^these 4 rows do not make a batch \(RuntimeError: .*; give them one shape and type, or set data"
    ):
        next(source(dataset=Ragged()).steps(Position(), 1))


# -- collate ----------------------------------------------------------------------------------------------------------


class Table:
    """A batch type of the user's own, with a length and slices."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice) -> Table:
        return Table(self.rows[which])


def as_table(rows: list[Any]) -> Any:
    return Table(rows)


def as_words(rows: list[Any]) -> Any:
    return {"x": torch.stack([row[1] for row in rows]), "names": [str(row[0]) for row in rows]}


def one_less(rows: list[Any]) -> Any:
    return torch.stack([row[1] for row in rows[1:]])


def flattened(rows: list[Any]) -> Any:
    return {"id": torch.tensor([row[0] for row in rows]), "flat": torch.cat([row[1] for row in rows])}


def with_length(rows: list[Any]) -> Any:
    return torch.stack([row[1] for row in rows]), torch.tensor(len(rows))


def short_table(rows: list[Any]) -> Any:
    return [torch.stack([row[1] for row in rows]), Table(rows[:1])]


def test_a_collate_function_may_make_batches_of_any_kind() -> None:
    (first, *_) = source(collate=f"{HERE}:as_table").steps(Position(), 1)
    assert type(first.batch).__name__ == "Table" and len(first.batch) == 4
    (first, *_) = source(collate=f"{HERE}:as_words").steps(Position(), 1)
    assert first.batch["names"] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("collate", "what"),
    [
        ("one_less", "a batch of 3"),
        ("flattened", "a batch of 12"),
        ("with_length", "a single value"),
        ("short_table", "a batch of 1"),
    ],
)
def test_a_collate_function_that_changes_the_rows_is_refused(collate: str, what: str) -> None:
    words = rf"data.train: collate gave {what} from 4 rows; keep one entry a row on the first dimension of every part, or the w"
    with pytest.raises(DataError, match=words):
        next(source(collate=f"{HERE}:{collate}").steps(Position(), 1))
    with pytest.raises(DataError, match=words.replace("data.train", "data.eval")):
        next(TorchEval(Numbered(), config(collate=f"{HERE}:{collate}"), 4, 0, 0, 1).batches())


# -- samplers ---------------------------------------------------------------------------------------------------------


def weighted(dataset: Any, power: float) -> Sampler[int]:
    """A factory that looks at the dataset."""
    return WeightedRandomSampler([i**power for i in range(len(dataset))], 8)


def own_generator() -> Sampler[int]:
    return RandomSampler(range(10), generator=torch.Generator())


class Epochs(Sampler[int]):
    """Rows from the epoch's number on; knows its epoch by `set_epoch`."""

    def __init__(self, data_source: Any, grows: bool = False) -> None:
        self.rows, self.epoch, self.grows = len(data_source), 0, grows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 5 + self.grows * self.epoch))


def batched(dataset: Any) -> Any:
    return BatchSampler(SequentialSampler(dataset), 2, False)


class Pairs(Sampler[Any]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


class Beyond(Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter([3, 10])


def number() -> int:
    return 3


@pytest.mark.parametrize(
    "sampler",
    [
        {"target": "torch.utils.data:WeightedRandomSampler", "args": {"weights": [1.0] * 10, "num_samples": 8}},
        {"target": f"{HERE}:weighted", "args": {"power": 2.0}},
        {"target": "torch.utils.data:RandomSampler"},
        {"target": f"{HERE}:own_generator"},
    ],
    ids=str,
)
def test_a_random_sampler_is_one_order_for_all_ranks_and_another_each_epoch(sampler: dict[str, Any]) -> None:
    found = global_batches(1, sampler=sampler)
    for world_size in (2, 3):
        assert global_batches(world_size, sampler=sampler) == found
    orders = [[row for batch in found if batch[0] == epoch for row in batch[2]] for epoch in (0, 1)]
    assert orders[0] != orders[1] and len(orders[0]) == len(orders[1])
    if sampler["target"] == f"{HERE}:weighted":
        assert 0 not in orders[0] + orders[1]  # weight 0
    resumed = global_batches(2, Position(1, 1), sampler=sampler)
    assert resumed == [batch for batch in found if batch[:2] >= (1, 1)]


def test_a_sampler_hears_of_its_epoch_and_decides_the_size_of_one() -> None:
    found = source(sampler={"target": f"{HERE}:Epochs"})
    assert (found.rows_per_epoch, found.steps_per_epoch) == (5, 2)
    steps = list(found.steps(Position(), 2))
    assert [step.batch[0].tolist() for step in steps] == [[0, 1, 2, 3], [4], [1, 2, 3, 4], [5]]
    assert [step.global_rows for step in steps] == [rows_in_step(5, 4, k % 2) for k in range(4)]


@pytest.mark.parametrize(
    ("sampler", "error", "words"),
    [
        ({"target": "torch.utils.data:DistributedSampler"}, ConfigError, "raydist shards every sampler over the workers"),
        ({"target": f"{HERE}:batched"}, ConfigError, "a BatchSampler makes batches or shards; raydist does both"),
        ({"target": f"{HERE}:Pairs"}, ConfigError, "data.train.sampler: yields batches; give a sampler of single rows"),
        ({"target": f"{HERE}:number"}, ConfigError, f"data.train.sampler: {HERE}:number made a int, which yields no rows"),
        ({"target": f"{HERE}:Beyond"}, DataError, "data.train.sampler: yields row 10, and the dataset has 10"),
        ({"target": f"{HERE}:weighted"}, ConfigError, "data.train.sampler: .* missing a required argument: 'power'"),
    ],
)  # fmt: skip
def test_a_sampler_that_cannot_be_is_refused(sampler: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        source(sampler=sampler)


def test_epochs_of_other_lengths_are_refused() -> None:
    found = source(sampler={"target": f"{HERE}:Epochs", "args": {"grows": True}})
    with pytest.raises(DataError, match=r"gave 5 rows in epoch 0 and 6 in epoch 1; every epoch needs as many"):
        list(found.steps(Position(), 2))


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_an_evaluation_reads_every_row_once_in_order(world_size: int, size: int) -> None:
    found = []
    for rank in range(world_size):
        for data in TorchEval(Numbered(), config(), size, 0, rank, world_size).batches():
            assert 1 <= data.rows == len(data.batch[0]) <= size
            found += data.batch[0].tolist()
    assert found == list(range(10))


# -- datasets ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_dataset_needs_a_length_and_an_index() -> None:
    assert len(build_dataset(config(args={"rows": 3}), "data.train")) == 3  # type: ignore[arg-type]
    assert len(build_dataset(config(target="builtins:list"), "data.train")) == 0  # type: ignore[arg-type]
    for target in (f"{HERE}:Stream", f"{HERE}:number"):
        with pytest.raises(
            ConfigError, match=rf"data.eval: {target} made a \w+, which has no length and index; exactly-once training"
        ):
            build_dataset(config(target=target), "data.eval")
    with pytest.raises(ConfigError, match=r"data.train: .*Numbered does not take these args: .*'row'"):
        build_dataset(config(args={"row": 3}), "data.train")
