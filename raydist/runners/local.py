"""Train in this process, or as one of the processes that torchrun started. No ray."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from raydist.control import Control
from raydist.environment import applied, resolve
from raydist.errors import ConfigError, Interrupted, RaydistError
from raydist.keeper import Attempt
from raydist.screen import Screen
from raydist.start import Start, locked, prepare, run_root
from raydist.watchdog import flight_recorder
from raydist.work import failed, work
from raydist.world import World, from_env

if TYPE_CHECKING:
    from raydist.config import JobConfig


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def train_local(
    config: JobConfig, resume: str | None = None, fresh: bool = False, screen: Screen | None = None
) -> dict[str, Any]:
    """Train and return the summary; under torchrun every process must call it.

    Raises ConfigError before anything starts, Interrupted after a stop with a checkpoint, and whatever training raised.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(applied(resolve(config.env, os.environ)))
        flight_recorder()
        _threads(config)
        world = from_env(config.scaling.backend)
        screen = screen or Screen()
        held.callback(world.close)
        held.callback(screen.close)
        start = _agree_on_start(config, world, resume, fresh, held)
        return start.finished if start.finished is not None else _train(config, world, start, screen)


def _threads(config: JobConfig) -> None:
    """As Ray does for its workers, so that all runners compute alike. torch has read its variable already."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    elif "OMP_NUM_THREADS" in config.env:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _train(config: JobConfig, world: World, start: Start, screen: Screen) -> dict[str, Any]:
    control = Control()
    listen = show(screen) if world.is_main else None
    with stop_on_signals(lambda reason: setattr(control, "stop", control.stop or reason)):
        try:
            summary = work(config, world, Attempt(start), control, listen=listen)
        except BaseException as error:
            if world.is_main and not isinstance(error, ConfigError):
                failed(start, config, error, restarts=0)
            raise
    if summary["status"] == "interrupted":
        raise Interrupted(f"stopped at step {summary['steps']} by {summary['reason']}; the same command goes on from there")
    return summary


def _agree_on_start(config: JobConfig, world: World, resume: str | None, fresh: bool, held: contextlib.ExitStack) -> Start:
    """Rank 0's decision, or its error, on every rank; rank 0 holds the run's folder as long as `held`."""
    start: Start | None = None
    problem: RaydistError | None = None
    if world.is_main:
        try:
            held.enter_context(locked(run_root(config)))
            start = prepare(config, resume, fresh)
        except RaydistError as error:
            problem = error
    start, words = world.broadcast((start, None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    if words is not None:
        raise ConfigError(words)
    assert start is not None
    return start


def show(screen: Screen) -> Callable[[str, dict[str, Any]], None]:
    """A listener for `work` that puts each record on the screen."""

    def listen(kind: str, record: dict[str, Any]) -> None:
        if kind == "started":
            screen.started(record["step"], record["total"])
        elif kind == "line":
            screen.line(record)
        else:
            screen.event(record)

    return listen


@contextmanager
def stop_on_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C call `stop(reason)`; a second Ctrl-C raises KeyboardInterrupt at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in seen:
            raise KeyboardInterrupt
        seen.append(number)
        stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
