"""The Ray Data stream gives the batches that a plain reader gives. Ranks are threads of this process."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist.data.ray_data as ray_data
from raydist.data.opening import open_reader
from raydist.data.ray_data import RaySource, choose_engine, open_ray_train
from raydist.data.source import Position, StepData, TrainSource
from raydist.errors import DataError
from tests.data.files import dataset, global_batches, write_parquet

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
    # Ray's own: copying a DataContext reads its deprecated fields
    pytest.mark.filterwarnings(r"ignore:`use_\w+` is deprecated:DeprecationWarning"),
]

SIZE = 10


class Hub:
    """Rank 0's object for all threads, pickled as torch.distributed does."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.value = threading.Barrier(ranks, timeout=120), b""

    def exchange(self, rank: int) -> Callable[[Any], Any]:
        def give(value: Any) -> Any:
            if rank == 0:
                self.value = pickle.dumps(value)
            self.barrier.wait()
            found = pickle.loads(self.value)
            self.barrier.wait()
            return found

        return give


def on_ranks(ranks: int, work: Callable[[int, Callable[[Any], Any]], Any]) -> list[Any]:
    hub, out = Hub(ranks), [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            out[rank] = work(rank, hub.exchange(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out


def source_of(config: Any, rank: int, ranks: int, exchange: Any, size: int = SIZE) -> TrainSource:
    return open_ray_train(config, global_size=size, seed=0, rank=rank, world_size=ranks, exchange=exchange)


def streamed(config: Any, ranks: int, start: Position, stop: int, bridge: bool = True) -> list[list[int]]:
    def work(rank: int, exchange: Any) -> list[StepData]:
        source = source_of(config, rank, ranks, exchange)
        assert isinstance(source, RaySource)
        source.bridge = bridge
        return list(source.steps(start, stop))

    found = on_ranks(ranks, work)
    where = [[(s.epoch, s.index, s.last_in_epoch, s.global_rows) for s in steps] for steps in found]
    assert all(one == where[0] for one in where)
    return [[row for steps in found for row in steps[k].batch["id"][: steps[k].rows].tolist()] for k in range(len(where[0]))]


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "SPAN_BYTES", 1000)


@pytest.mark.parametrize("bridge", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_equal_those_of_a_plain_reader(tmp_path: Path, small_spans: None, ranks: int, bridge: bool) -> None:
    config = dataset(write_parquet(tmp_path / "d", 203), shuffle={"window": 30}, engine="ray")
    expected = global_batches(config, SIZE, 1, stop=3)
    assert streamed(config, ranks, Position(), 3, bridge) == expected


@pytest.mark.parametrize(("ranks", "step"), [(3, 7), (1, 20), (4, 40)])
def test_it_resumes_at_another_world_size(tmp_path: Path, small_spans: None, ranks: int, step: int) -> None:
    config = dataset(write_parquet(tmp_path / "d", 203), shuffle={"window": 30}, engine="ray")
    expected = global_batches(config, SIZE, 1, stop=2)
    assert streamed(config, ranks, Position(*divmod(step, 21)), 2) == expected[step:]


def test_a_long_run_goes_on_in_a_second_stream(tmp_path: Path, small_spans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "MOST_SPANS", 3)
    config = dataset(write_parquet(tmp_path / "d", 203), shuffle={"window": 30}, engine="ray")
    assert streamed(config, 2, Position(), 2) == global_batches(config, SIZE, 1, stop=2)


def test_columns_and_transforms_arrive_whole(tmp_path: Path, small_spans: None) -> None:
    transforms = [
        {"target": "tests.data.transforms:add", "args": {"column": "x", "amount": 1.0}},
        {"target": "tests.data.transforms:jitter"},
    ]
    config = dataset(write_parquet(tmp_path / "d", 100), shuffle={"window": 30}, engine="ray", transforms=transforms)
    alone = list(ray_data.direct_source(config, open_reader(config, global_size=SIZE, seed=0), 0, 1).steps(Position(), 1))

    def work(rank: int, exchange: Any) -> list[StepData]:
        return list(source_of(config, rank, 2, exchange).steps(Position(), 1))

    first, second = on_ranks(2, work)
    for whole, one, two in zip(alone, first, second, strict=True):
        assert one.batch["name"] + two.batch["name"] == whole.batch["name"]
        for name in ("id", "x", "v", "noise"):
            assert torch.equal(torch.cat([one.batch[name], two.batch[name]]), whole.batch[name]), name
        assert torch.equal(whole.batch["x"], whole.batch["id"] / 8 + 1)
        one.batch["x"].zero_()  # a batch is the user's own


def test_an_error_of_a_task_reaches_every_rank(tmp_path: Path, small_spans: None) -> None:
    transforms = [{"target": "tests.data.transforms:refuse_row", "args": {"row": 190}}]
    config = dataset(write_parquet(tmp_path / "d", 203), engine="ray", transforms=transforms)
    messages: list[str] = []

    def work(rank: int, exchange: Any) -> None:
        with pytest.raises(DataError) as caught:
            list(source_of(config, rank, 2, exchange).steps(Position(), 1))
        messages.append(str(caught.value))

    on_ranks(2, work)
    assert messages == ["row 190 is refused"] * 2


def test_opening_fails_on_every_rank(tmp_path: Path) -> None:
    def work(rank: int, exchange: Any) -> str:
        with pytest.raises(DataError) as caught:
            source_of(dataset(tmp_path / "nothing", format="parquet"), rank, 2, exchange)
        return str(caught.value)

    assert on_ranks(2, work) == [f"{tmp_path}/nothing: no such file or folder"] * 2


def test_leaving_early_and_starting_again(tmp_path: Path, small_spans: None) -> None:
    config = dataset(write_parquet(tmp_path / "d", 203), shuffle={"window": 30}, engine="ray")
    expected = global_batches(config, SIZE, 1, stop=2)

    def work(rank: int, exchange: Any) -> list[list[int]]:
        source = source_of(config, rank, 2, exchange)
        steps = source.steps(Position())
        for _ in range(9):
            next(steps)
        steps.close()  # type: ignore[attr-defined]
        again = [s.batch["id"][: s.rows].tolist() for s in source.steps(Position(0, 5), 2)]  # a rollback
        source.close()
        return again

    first, second = on_ranks(2, work)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected[5:]


def test_a_slow_reader_holds_the_tasks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 40 spans of 1000 rows, which a transform makes 4 KiB each: 160 MB in all, of which 24 may wait in the object store
    monkeypatch.setattr(ray_data, "LEAST_AHEAD", 24 * 10**6)
    log = tmp_path / "log"
    log.mkdir()
    transforms = [{"target": "tests.data.transforms:log_call", "args": {"folder": str(log), "width": 4096}}]
    config = dataset(write_parquet(tmp_path / "d", 40_000, group=1000), engine="ray", transforms=transforms)

    def work(rank: int, exchange: Any) -> int:
        source = source_of(config, rank, 1, exchange, size=100)
        assert isinstance(source, RaySource)
        monkeypatch.setattr(ray_data, "SPAN_BYTES", 1000 * source.reader.tables.size / 40_000)
        assert source.plan.span_steps(source.span_rows) == 10
        steps = source.steps(Position(), 1)
        next(steps)
        time.sleep(6)
        early = len(list(log.iterdir()))
        assert sum(1 for _ in steps) == 399
        return early

    (early,) = on_ranks(1, work)
    assert 2 <= early < 25
    assert len(list(log.iterdir())) >= 40


def test_which_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_parquet(tmp_path / "d", 20)

    def choice(cpus: float, **settings: Any) -> tuple[str, str | None]:
        config = dataset(folder, **settings)
        return choose_engine(config, open_reader(config, global_size=5, seed=0), cpus)

    assert choice(4) == ("direct", None)  # small
    assert choice(4, engine="ray") == ("ray", None)
    assert choice(4, engine="direct") == ("direct", None)
    with pytest.raises(DataError, match=r"data.train.engine: the workers have reserved all CPUs of the cluster but 0"):
        choice(0, engine="ray")
    monkeypatch.setattr(ray_data, "CACHE_BYTES", 10)
    assert choice(4) == ("ray", None)
    engine, note = choice(0.5)
    assert engine == "direct"
    assert note is not None and "all CPUs of the cluster but 0.5" in note and "each rank reads all data itself" in note
    filters = [{"target": "tests.data.transforms:keep_even"}]
    assert choice(4, rows="changes", transforms=filters) == ("direct", None)
    assert choice(4, rows="changes", transforms=filters, engine="ray")[1] == (
        "rows: changes is read by each rank itself, not by Ray Data"
    )
