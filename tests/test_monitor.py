"""The split of a step over ranks, the rank that the others wait for, and the line that says where the ranks are."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from raydist.config import load_config
from raydist.metrics import Clock
from raydist.monitor import Monitor, columns, places_in_words, slow_rank
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from tests.runs import local_run, write_job
from tests.support import Lin, run_ranks


def line(
    step: int, step_s: float, data: list[float], compute: list[float], memory: list[float] | None = None
) -> dict[str, Any]:
    sync = [step_s - d - c for d, c in zip(data, compute, strict=True)]
    ranks = {"data_wait_s": data, "compute_s": compute, "sync_wait_s": sync, "memory_mb": memory or [100.0] * len(data)}
    return {"step": step, "step_s": step_s, "ranks": ranks}


@pytest.mark.parametrize(
    ("data", "compute", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.08], [0.02] * 4, (3, "data")),
        ([0.0] * 4, [0.02, 0.09, 0.02, 0.02], (1, "compute")),
        ([0.01, 0.012, 0.011, 0.01], [0.06, 0.07, 0.06, 0.06], None),  # 10 ms of a step of 100 are no reason
        ([0.08, 0.0], [0.01, 0.09], (0, "data")),  # rank 1 waits in forward for rank 0's buffers: that is not its compute
        ([0.09] * 4, [0.01] * 4, None),  # all wait for data: nobody is slower than the others
        ([0.09], [0.01], None),
    ],
)
def test_the_slow_rank_is_the_one_that_needs_a_fifth_of_the_step_more_than_the_others(
    data: list[float], compute: list[float], expected: tuple[int, str] | None
) -> None:
    assert slow_rank(line(1, 0.1, data, compute)) == expected


def test_a_fifth_of_a_tiny_step_is_noise() -> None:
    assert slow_rank(line(1, 1e-3, [0.0, 9e-4], [1e-4, 1e-4])) is None


def test_a_slow_rank_is_told_once_when_two_lines_in_a_row_agree() -> None:
    monitor = Monitor()
    slow, even = ([0.0, 0.08], [0.02, 0.02]), ([0.0, 0.0], [0.02, 0.02])
    lines = [line(10 * (n + 1), 0.1, *split) for n, split in enumerate([slow, even, slow, slow, slow, even, slow, slow])]
    told = [monitor.add(one) for one in lines]
    assert [number for number, event in enumerate(told) if event] == [3]
    assert told[3] == {
        "rank": 1,
        "cause": "data",
        "reason": "rank 1 is slow: data (it waits for data 80.0 ms of a 100.0 ms step, the others 0.0 ms)",
    }
    summary = monitor.summary()
    assert summary["slow_rank"] == {"rank": 1, "cause": "data", "lines": 6, "of": 8}
    # 10 steps a line: 80 steps of 20 ms; 60 steps of 80 ms
    assert summary["time_split"]["compute_s"] == pytest.approx([1.6, 1.6])
    assert summary["time_split"]["data_wait_s"] == pytest.approx([0.0, 4.8])
    monitor.begin(80)  # after a restart it is told again
    assert [monitor.add(line(90, 0.1, *slow)), bool(monitor.add(line(100, 0.1, *slow)))] == [None, True]


def test_a_rank_that_was_slow_in_few_lines_is_none_for_the_summary_and_sums_take_a_changing_number_of_ranks() -> None:
    monitor = Monitor()
    monitor.add(line(2, 0.1, [0.0, 0.08], [0.02, 0.02], [5.0, 7.0]))
    monitor.add(line(4, 0.1, [0.0], [0.02], [6.0]))
    summary = monitor.summary()
    assert summary["slow_rank"] is None and summary["peak_memory_mb"] == [6.0, 7.0]
    expected = {"data_wait_s": [0.0, 0.16], "compute_s": [0.08, 0.04], "sync_wait_s": [0.32, 0.0]}
    for key, values in expected.items():
        assert summary["time_split"][key] == pytest.approx(values, abs=1e-12)
    assert Monitor().summary() == {}


def test_rows_of_ranks_become_columns() -> None:
    rows = [[0.1, 0.2, 0.3, 10.0, 20.0], [0.4, 0.5, 0.6, 30.04, 40.06]]
    assert columns(rows) == {
        "data_wait_s": [0.1, 0.4],
        "compute_s": [0.2, 0.5],
        "sync_wait_s": [0.3, 0.6],
        "memory_mb": [10.0, 30.0],
        "memory_reserved_mb": [20.0, 40.1],
    }


def test_where_the_ranks_are_is_one_line() -> None:
    gpus = [
        {"rank": r, "backend": "nccl", "host": f"node{r // 2}", "device": f"cuda:{r % 2}", "gpu": "NVIDIA H200"}
        for r in range(4)
    ]
    assert places_in_words(gpus) == (
        "nccl backend, world size 4: ranks 0-1 on node0, cuda:0 to cuda:1 (NVIDIA H200); "
        "ranks 2-3 on node1, cuda:0 to cuda:1 (NVIDIA H200)"
    )
    one = {"rank": 0, "backend": "gloo", "host": "here", "device": "cpu", "threads": 2}
    assert places_in_words([one]) == "no backend, world size 1: rank 0 on here, cpu (2 threads each)"


def test_the_wait_in_the_reduction_is_sampled_and_no_more_than_20_times_a_second() -> None:
    asked: list[float] = []

    def wait() -> float | None:
        asked.append(time.perf_counter())
        return None if len(asked) == 1 else 0.004

    clock = Clock()
    began = time.perf_counter()
    while time.perf_counter() - began < 0.2:
        clock.sample(wait)
        clock.steps += 1
    assert 2 <= len(asked) <= 5
    assert all(later - earlier >= 0.04 for earlier, later in itertools.pairwise(asked))
    assert clock.read()["sync_wait_s"] == pytest.approx(0.004)  # of the samples that had a value
    clock.sample(wait, always=True)
    clock.reset()
    clock.sample(wait)
    assert clock.samples == 0  # too fresh
    clock.sample(wait, always=True)
    assert clock.samples == 1


def test_one_process_writes_its_split_and_where_it_runs(tmp_path: Path) -> None:
    run = RunDir(str(local_run(tmp_path)))
    told = [event for event in run.read_events() if event["kind"] == "monitor"]
    assert len(told) == 1 and told[0]["ranks"][0]["device"] == "cpu" and "world size 1: rank 0 on " in told[0]["reason"]
    for one in run.read_metrics():
        parts = one["data_wait_s"] + one["compute_s"] + one["sync_wait_s"]
        assert parts == pytest.approx(one["step_s"]) or one["compute_s"] == 0
        assert one["ranks"]["compute_s"] == [pytest.approx(one["compute_s"], abs=1e-6)]
        assert one["ranks"]["memory_mb"][0] == pytest.approx(one["memory_mb"], abs=0.06) and one["memory_mb"] > 50
        assert "memory_reserved_mb" not in one  # of GPUs only
    summary = run.read_summary() or {}
    assert summary["slow_rank"] is None and len(summary["time_split"]["compute_s"]) == 1


# -- two ranks, one of them slow ---------------------------------------------------------------------------------------------

XS = [1.0, 2.0, 3.0, 4.0] * 6


class SlowRows(Dataset[Any]):
    """Rows (x, 3x) that take 15 ms each on rank 1."""

    def __len__(self) -> int:
        return len(XS)

    def __getitem__(self, row: int) -> Any:
        if os.environ.get("RANK") == "1":
            time.sleep(0.015)
        x = torch.tensor([XS[row]])
        return x, 3 * x


class SlowModel(Lin):
    """Takes 30 ms longer in forward on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            time.sleep(0.03)
        return super().forward(x)


def _trained(folder: str) -> None:
    train_local(load_config(Path(folder) / "job.yaml"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("data", {"data__train": {"target": "tests.test_monitor:SlowRows"}}),
        ("compute", {"task__model__target": "tests.test_monitor:SlowModel"}),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_with_the_reason(tmp_path: Path, cause: str, change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"xs": XS, "global_size": 4, "train__log_every": {"steps": 2}, "train__epochs": 2}
    write_job(tmp_path, **base, **change)
    run_ranks(2, _trained, str(tmp_path))
    run = RunDir(str(tmp_path / "runs" / "lin"))
    told = [event for event in run.read_events() if event["kind"] == "slow_rank"]
    assert [(event["rank"], event["cause"]) for event in told] == [(1, cause)], run.read_metrics()
    assert told[0]["reason"].startswith(f"rank 1 is slow: {cause} (")
    summary = run.read_summary() or {}
    assert (summary["slow_rank"]["rank"], summary["slow_rank"]["cause"]) == (1, cause)
    split = summary["time_split"]
    # rank 0 has nothing to do but wait: for much of what rank 1 loses (a busy machine makes its own part long too)
    lost = split["data_wait_s" if cause == "data" else "compute_s"][1]
    assert split["sync_wait_s"][0] > 0.3 * lost and split["sync_wait_s"][1] < 0.4 * lost
    monitor = next(event for event in run.read_events() if event["kind"] == "monitor")
    assert [place["rank"] for place in monitor["ranks"]] == [0, 1] and "world size 2" in monitor["reason"]
