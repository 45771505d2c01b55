"""A job's data as runners open it: which columns, what was fitted, and data that changed under a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raydist.config import JobConfig, parse_config
from raydist.data.job import check_same_data, fitted_for, needed_columns, open_evaluation, open_sources
from raydist.data.source import Position
from raydist.errors import DataError
from raydist.world import World
from tests.support import lin_job


def table_job(folder: Path, **changes: Any) -> JobConfig:
    """Columns a, b, kind and y of six rows, in a CSV file."""
    rows = ["a,b,kind,y", *(f"{i}.5,{2 * i},{'xyz'[i % 3]},{3 * i}" for i in range(6))]
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    (folder / "eval.csv").write_text("\n".join(rows[:3]) + "\n")
    job = lin_job([], 4)
    job["data"] = {"train": {"path": "train.csv"}, "eval": {"path": "eval.csv"}}
    job["task"] |= {"inputs": [["a", "b"], "b"], "targets": "y"}
    for key, value in changes.items():
        *path, last = key.split("__")
        at = job
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return parse_config(job, folder)


def torch_job(folder: Path, **changes: Any) -> JobConfig:
    return parse_config(lin_job([1.0, 2.0, 3.0], 2, **changes), folder)


# -- what is opened ---------------------------------------------------------------------------------------------------


def test_only_the_columns_of_the_task_are_read_each_once(tmp_path: Path) -> None:
    assert needed_columns(table_job(tmp_path)) == ["a", "b", "y"]
    assert needed_columns(table_job(tmp_path, task__targets=["y", "a"])) == ["a", "b", "y"]
    assert needed_columns(torch_job(tmp_path)) is None
    sources = open_sources(table_job(tmp_path), World(), None)
    try:
        (first, second) = sources.train.steps(Position(), 1)
        assert set(first.batch) == {"a", "b", "y"} and first.batch["y"].tolist() == [0, 3, 6, 9]
        assert second.batch["a"].tolist() == [4.5, 5.5]
        assert sources.evaluation is not None
        assert [data.batch["b"].tolist() for data in sources.evaluation.batches()] == [[0, 2]]
        assert sources.state["fitted"] is None and sources.state["fingerprint"] == sources.train.fingerprint()
        assert sources.notes == []
    finally:
        sources.close()


def test_a_torch_dataset_is_opened_for_this_rank(tmp_path: Path) -> None:
    config = torch_job(tmp_path, data__eval={"target": "tests.support:line", "args": {"xs": [5.0, 6.0, 7.0]}})
    sources = open_sources(config, World(rank=1, world_size=2), None)
    assert [step.batch[0].tolist() for step in sources.train.steps(Position(), 1)] == [[[2.0]], [[3.0]]]
    assert sources.evaluation is not None
    assert [data.batch[0].tolist() for data in sources.evaluation.batches()] == [[[7.0]]]
    sources.close()
    assert open_evaluation(torch_job(tmp_path), World(), None, None) is None


@pytest.mark.parametrize(
    ("batch", "size"), [({"global_size": 2}, 2), ({"global_size": 5000}, 1024), ({"global_size": 2, "eval_size": 3}, 3)]
)
def test_an_evaluation_batch_is_as_asked_or_a_global_batch_up_to_1024(tmp_path: Path, batch: dict[str, int], size: int) -> None:
    config = torch_job(tmp_path, batch=batch, data__eval={"target": "tests.support:line", "args": {"xs": [1.0]}})
    assert open_evaluation(config, World(), None, None).size == size  # type: ignore[union-attr]


def test_a_source_that_is_open_already_is_used(tmp_path: Path) -> None:
    config = torch_job(tmp_path)
    given = open_sources(config, World(), None).train
    assert open_sources(config, World(), None, given).train is given


# -- what is fitted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Follower(World):
    """Rank 1 of two: hears what rank 0 said."""

    rank: int = 1
    world_size: int = 2
    heard: Any = None

    def broadcast(self, value: Any) -> Any:
        assert value == (None, None)  # only rank 0 reads the training set
        return self.heard


FIT = {"data__fit": {"index": ["kind"], "normalize": ["a"]}, "task__inputs": [["a"], "kind"]}


def test_rank_0_fits_and_the_others_take_what_it_found(tmp_path: Path) -> None:
    config = table_job(tmp_path, **FIT)
    sources = open_sources(config, World(), None)
    fitted = sources.state["fitted"]
    assert fitted["index"] == {"kind": ["x", "y", "z"]}
    # mean of 0.5 … 5.5 and its population standard deviation
    assert fitted["scale"]["a"]["mean"] == pytest.approx([3.0])
    assert fitted["scale"]["a"]["std"] == pytest.approx([(35 / 12) ** 0.5])
    (first, _) = sources.train.steps(Position(), 1)
    assert first.batch["kind"].tolist() == [0, 1, 2, 0]
    sources.close()
    other = fitted_for(config, Follower(heard=(fitted, None)), None)
    assert other is not None and other.to_json() == fitted


def test_what_was_fitted_comes_from_the_checkpoint_when_there_is_one(tmp_path: Path) -> None:
    config = table_job(tmp_path, **FIT)
    stored = {"fitted": {"index": {"kind": ["y", "x", "z"]}, "scale": {"a": {"mean": [0.0], "std": [1.0]}}}}
    sources = open_sources(config, World(), stored)
    assert sources.state["fitted"] == stored["fitted"]
    (first, _) = sources.train.steps(Position(), 1)
    assert first.batch["kind"].tolist() == [1, 0, 2, 1]
    sources.close()
    assert fitted_for(table_job(tmp_path), World(), stored) is None


def test_a_fit_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    config = table_job(tmp_path, data__fit={"normalize": ["kind"]}, task__inputs=["kind"])
    with pytest.raises(DataError, match="kind") as caught:
        fitted_for(config, World(), None)
    with pytest.raises(DataError) as other:
        fitted_for(config, Follower(heard=(None, str(caught.value))), None)
    assert str(other.value) == str(caught.value)


# -- data that changed ------------------------------------------------------------------------------------------------

OLD = {
    "kind": "files",
    "rows": 10,
    "files": [["a.csv", 1], ["b.csv", 2], ["c.csv", 3]],
    "columns": ["x", "y"],
    "order": {"seed": 1, "window": 8},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 12}, "rows: 10 → 12"),
        ({"files": [["a.csv", 1], ["b.csv", 9], ["d.csv", 3]]}, "files: without c.csv; new d.csv; changed b.csv"),
        ({"files": [["b.csv", 2], ["a.csv", 1], ["c.csv", 3]]}, "files: another order"),
        ({"files": []}, "files: without a.csv, b.csv, c.csv"),
        ({"files": [*OLD["files"], *([f"{i}.csv", 0] for i in range(5))]}, "files: new 0.csv, 1.csv, 2.csv …"),  # type: ignore[misc]
        ({"columns": ["y"]}, "columns: without x"),
        ({"order": {"seed": 1, "window": 16}}, "order: window 8 → 16"),
        ({"extra": 1}, "extra: None → 1"),
    ],
)
def test_data_that_changed_is_refused_with_what_differs_or_accepted_with_a_note(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        check_same_data(OLD, {**OLD, **change}, "refuse")
    assert str(caught.value) == (
        f"the data changed since the checkpoint: {words}. The rows left of this epoch are not the ones the run would have seen."
        " Restore the data, start a new run, or set data.changed: accept"
    )
    (note,) = check_same_data(OLD, {**OLD, **change}, "accept")
    assert note == f"the data changed since the checkpoint ({words}); going on with it, as data.changed: accept asks"
    assert check_same_data(OLD, dict(OLD), "refuse") == []


def test_several_differences_are_all_named() -> None:
    with pytest.raises(DataError, match="rows: 10 → 11; columns: without y"):
        check_same_data(OLD, {**OLD, "rows": 11, "columns": ["x"]}, "refuse")


def test_a_resume_meets_changed_data(tmp_path: Path) -> None:
    stored = open_sources(torch_job(tmp_path), World(), None).state
    more = {"data__train__args": {"xs": [1.0] * 9}}
    with pytest.raises(DataError, match=r"rows: 3 → 9; rows_per_epoch: 3 → 9"):
        open_sources(torch_job(tmp_path, **more), World(), stored)
    found = open_sources(torch_job(tmp_path, **more, data__changed="accept"), World(), stored)
    assert found.notes == [
        "the data changed since the checkpoint (rows: 3 → 9; rows_per_epoch: 3 → 9); going on with it, "
        "as data.changed: accept asks"
    ]
