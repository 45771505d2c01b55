"""What every worker of every runner does: open the data, go on from a checkpoint, run the loop, keep the run's folder.

Ray Train, torchrun and the one-process runner differ only in who calls `work` and what they pass as `data` and `control`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import faults
from raydist.control import Control, StepResult
from raydist.data.job import Sources, open_sources
from raydist.heartbeat import Heart
from raydist.keeper import Attempt, Keeper, Listener
from raydist.loop import fit, total_steps
from raydist.profiling import Profiler
from raydist.rundir import RunDir
from raydist.start import Start
from raydist.storage import is_local
from raydist.task import build_task
from raydist.watchdog import Guard, Verdict, Watchdog, check_interval
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig

OpenData = Callable[["JobConfig", World, dict[str, Any] | None], Sources]


def work(
    config: JobConfig,
    world: World,
    attempt: Attempt,
    control: Control,
    open_data: OpenData | None = None,
    listen: Listener | None = None,
    on_result: Callable[[StepResult], None] | None = None,
) -> dict[str, Any]:
    """Train to the end and return the summary. Every rank must call it.

    Raises what `fit` raises; whoever called decides on a restart, and writes the summary of a failure.
    """
    if config.strategy.name == "pipeline" and config.strategy.stages > 1:
        from raydist.pipeline.grid import make_grid

        world = replace(world, grid=make_grid(config.strategy, world))
    keeper = Keeper(config, world, attempt, control, listen)
    control.micro_size = attempt.micro_size
    control.failed_at = attempt.failed_at
    control.reload = keeper.newest
    control.copies = attempt.copies is not None
    control.faults = faults.parse(attempt.faults, world.rank, Path(attempt.start.root) / ".faults")
    with _warnings_as_events(control), _heart(config, world, attempt, control, keeper):
        return _work(config, world, control, keeper, open_data or open_sources, on_result)


def _work(
    config: JobConfig,
    world: World,
    control: Control,
    keeper: Keeper,
    open_data: OpenData,
    on_result: Callable[[StepResult], None] | None,
) -> dict[str, Any]:
    if config.profile is not None:
        control.profiler = Profiler(config.profile, keeper.run.root, world, control.event)
    state = keeper.resume()
    stored = None if state is None else state.data
    sources = open_data(config, world, stored) if world.grid is None else _open_stage(config, world, stored)
    try:
        task = build_task(config.task)
        total = total_steps(config, sources.train)
        keeper.started(state, total, sources)
        for result in fit(config, task, world, sources.train, sources.evaluation, state, control, sources.state):
            if result.status != "running" and control.profiler is not None:
                control.profiler.close(result.step)
            keeper.take(result)
            if on_result is not None:
                on_result(result)
        return keeper.finish()
    finally:
        if control.profiler is not None:
            control.profiler.close(control.progress.step)
        keeper.close()
        sources.close()


def _open_stage(config: JobConfig, world: World, stored: dict[str, Any] | None) -> Sources:
    from raydist.pipeline.data import open_stage

    return open_stage(config, world.grid, stored)


@contextmanager
def _heart(config: JobConfig, world: World, attempt: Attempt, control: Control, keeper: Keeper) -> Iterator[None]:
    """Beat, and watch the others' beats, while training runs; off with `failure.hang_timeout: null`."""
    timeout = config.failure.hang_timeout
    if timeout is None:
        yield
        return
    root = attempt.start.root
    watchdog = Watchdog(root, world.world_size, 0.75 * timeout, attempt.key)

    def report(verdict: Verdict) -> None:
        keeper.run.append_event("hang", rank=verdict.rank, reason=verdict.words, stack=verdict.beat.stack)
        keeper.run.flush()
        print(f"raydist: {verdict.words}", file=sys.stderr, flush=True)

    every = check_interval(timeout, is_local(root))
    heart = Heart(root, world.rank, control.progress, every, attempt.key, Guard(watchdog, world.rank, report))
    heart.beat()
    heart.start()
    try:
        yield
    finally:
        heart.stop()


def failed(start: Start, config: JobConfig, error: BaseException, restarts: int) -> dict[str, Any]:
    """Write and return the summary of a run that did not end well."""
    run = RunDir(start.root)
    summary = summary_so_far(run, config, "failed", str(error), restarts, time.time() - start.began)
    run.append_event("failed", reason=str(error))
    run.write_summary(summary)
    run.flush()
    return summary


def summary_so_far(run: RunDir, config: JobConfig, status: str, reason: str, restarts: int, seconds: float) -> dict[str, Any]:
    """The summary of a run that cannot write it itself, from its last line of metrics."""
    lines = run.read_metrics()
    last = lines[-1] if lines else {}
    return {
        "name": config.name,
        "status": status,
        "reason": reason,
        "steps": last.get("step", 0),
        "applied": last.get("step", 0) - last.get("skipped", 0),
        "skipped": last.get("skipped", 0),
        "rows_seen": last.get("rows_seen", 0),
        "metrics": {k: v for k, v in last.items() if k == "train_loss" or (k.startswith("eval_") and k != "eval_s")},
        "workers": config.scaling.workers,
        "restarts": restarts,
        "seconds": seconds,
        "run": run.root,
    }


@contextmanager
def _warnings_as_events(control: Control) -> Iterator[None]:
    """Within it, each warning is shown once, as an event with its rank."""
    before = warnings.showwarning
    seen: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        text = f"{category.__name__}: {message}"
        if text not in seen:
            seen.add(text)
            control.event("warning", reason=text)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
