"""What tests share: the LIN model and its data, job configs without a file, and ranks as real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Lin(nn.Linear):
    """1 -> 1, no bias, weight 0."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.zeros_(self.weight)


def line(xs: list[float]) -> TensorDataset:
    """Rows (x, 3x), each of shape (1,)."""
    x = torch.tensor(xs, dtype=torch.float32).reshape(-1, 1)
    return TensorDataset(x, 3 * x)


def lin_job(xs: list[float], global_size: int, **changes: Any) -> dict[str, Any]:
    """A job file's content: LIN on `line(xs)`, MSE, plain SGD at 0.1. `changes` replace whole sections or `a__b` keys."""
    job: dict[str, Any] = {
        "name": "lin",
        "task": {"model": {"target": "tests.support:Lin"}, "loss": {"target": "torch.nn.functional:mse_loss"}},
        "data": {"train": {"target": "tests.support:line", "args": {"xs": xs}}},
        "batch": {"global_size": global_size},
        "train": {"epochs": 1, "log_every": {"steps": 1}},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        at = job
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return job


# -- ranks -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank_main(results: Any, job: bytes, rank: int, world_size: int, port: int) -> None:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(job)
        results.put(
            (rank, True, pickle.dumps(function(*args)))
        )  # bytes: a tensor would be shared memory that dies with this process
    except BaseException as error:
        results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class RankError(AssertionError):
    """A rank failed; `ranks` maps each failed rank to its words."""

    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {r}: {text}" for r, text in sorted(ranks.items())))
        self.ranks = ranks


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`function(*args)` in `world_size` processes with torchrun's environment; results by rank, RankError if any failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "raydist.loop", "tests.support"])
    results = context.Queue()
    port = free_port()
    job = pickle.dumps((function, args))  # bytes: tensors as arguments would be memory that the ranks share
    processes = [
        context.Process(target=_rank_main, args=(results, job, rank, world_size, port), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    failed: dict[int, str] = {}
    try:
        while len(found) + len(failed) < world_size:
            rank, good, value = results.get(timeout=timeout)
            if good:
                found[rank] = pickle.loads(value)
            else:
                failed[rank] = value
    except queue.Empty:
        absent = set(range(world_size)) - set(found) - set(failed)
        failed.update(dict.fromkeys(absent, f"no answer in {timeout} s"))
    finally:
        for process in processes:
            process.join(timeout=5 if not failed else 1)
            if process.is_alive():
                process.kill()
                process.join()
    if failed:
        raise RankError(failed)
    return [found[rank] for rank in range(world_size)]


class RankPool:
    """Ranks as processes that stay: a call costs a process group, not the imports. After a failure they are started anew."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "raydist.loop", "tests.support"])
        self.start()

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """As `run_ranks`, with at most `most` ranks."""
        assert world_size <= self.most
        port, job = free_port(), pickle.dumps((function, args))
        for rank in range(world_size):
            self._jobs[rank].put((job, rank, world_size, port))
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        try:
            while len(found) + len(failed) < world_size:
                rank, good, value = self._results.get(timeout=timeout if not failed else 2.0)
                (found if good else failed)[rank] = pickle.loads(value) if good else value
        except queue.Empty:
            absent = set(range(world_size)) - set(found) - set(failed)
            failed.update(dict.fromkeys(absent, "no answer"))
        if failed:
            self.close()
            self.start()
            raise RankError(failed)
        return [found[rank] for rank in range(world_size)]

    def start(self) -> None:
        """Start the processes."""
        self._results = self._context.Queue()
        self._jobs = [self._context.Queue() for _ in range(self.most)]
        self._processes: list[Any] = [
            self._context.Process(target=_pool_main, args=(jobs, self._results), daemon=True) for jobs in self._jobs
        ]
        for process in self._processes:
            process.start()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for channel in (*self._jobs, self._results):
            channel.close()
            channel.join_thread()


def _pool_main(jobs: Any, results: Any) -> None:
    while True:
        job, rank, world_size, port = jobs.get()
        _rank_main(results, job, rank, world_size, port)


# -- training without a runner -------------------------------------------------------------------------------------


def train_here(
    job: dict[str, Any],
    state: Any = None,
    stop_after: int | None = None,
    inject: tuple[str, list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Run `fit` in this rank (world from the environment) on a torch Dataset job; weights, metrics lines and the last state.

    `stop_after` stops at that step as a preemption would. `inject` is a folder for marks, and faults (`raydist.faults`).
    """
    from raydist import faults
    from raydist.config import parse_config
    from raydist.control import Control
    from raydist.data.torch_data import TorchEval, TorchSource, build_dataset
    from raydist.loop import fit
    from raydist.task import build_task
    from raydist.world import from_env

    config = parse_config(job, Path.cwd())
    world = from_env(config.scaling.backend)
    try:
        data, peers = config.data, world
        if config.strategy.name == "pipeline" and config.strategy.stages > 1:
            from dataclasses import replace

            from raydist.pipeline.grid import make_grid

            world = replace(world, grid=make_grid(config.strategy, world))
            peers = world.grid.peers
        train = TorchSource(
            build_dataset(data.train, "data.train"),
            data.train,
            config.batch.global_size,
            config.seed,
            peers.rank,
            peers.world_size,
        )
        evaluation = None
        if data.eval is not None:
            size = config.batch.eval_size or config.batch.global_size
            evaluation = TorchEval(
                build_dataset(data.eval, "data.eval"), data.eval, size, config.seed, peers.rank, peers.world_size
            )
        control = Control(stop="test" if stop_after == 1 else None)
        if inject is not None:
            control.faults = faults.parse(json.dumps(inject[1]), world.rank, Path(inject[0]))
        lines, saved = [], None
        for result in fit(config, build_task(config.task), world, train, evaluation, state, control):
            if result.log:
                lines.append(result.metrics)
            if result.checkpoint:
                saved = copied(result.state())
            if stop_after is not None and result.step >= stop_after - 1 and control.stop is None:
                control.stop = "test"
        assert saved is not None
        return {"state": saved, "lines": lines, "model": saved.model, "events": control.events}
    finally:
        world.close()


def copied(value: Any) -> Any:
    """A deep copy that later steps do not change."""
    import copy

    return copy.deepcopy(value)
