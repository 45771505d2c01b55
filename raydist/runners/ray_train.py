"""Train on a Ray cluster: Ray Train's `TorchTrainer` starts the workers and their process group, `work` does the rest."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raydist import storage
from raydist.environment import resolve
from raydist.errors import RaydistError
from raydist.keeper import Attempt
from raydist.rundir import RunDir
from raydist.runners import leftovers
from raydist.runners.attempts import Attempts, StopFile
from raydist.runners.cluster import check_dashboard, connect, gpus_per_worker, quiet
from raydist.runners.copies import Holders
from raydist.runners.local import stop_on_signals
from raydist.runners.prints import captured
from raydist.screen import Screen
from raydist.start import locked, prepare, run_root

if TYPE_CHECKING:
    from raydist.config import JobConfig


_SCRATCH = ".ray"


def train_ray(
    config: JobConfig,
    resume: str | None = None,
    fresh: bool = False,
    address: str | None = None,
    screen: Screen | None = None,
    verbose: bool = False,
    dashboard: str | None = None,
) -> dict[str, Any]:
    """Train on the cluster at `address`, or on a local one that lives as long as this call. Returns the summary.

    `dashboard`: the host at which a local one shows Ray's dashboard, 127.0.0.1 but for a reason.

    Raises ConfigError when the cluster cannot hold the workers, Interrupted after a stop with a checkpoint, TrainError with the
    first failing rank's own error when restarts are used up.
    """
    resolve(config.env, os.environ)  # what is missing is told before anything starts
    screen = screen or Screen()
    quiet(verbose)
    for words in [] if dashboard is None else check_dashboard(dashboard, address):
        screen.say(words)
    with locked(run_root(config)):
        start = prepare(config, resume, fresh)
        if start.finished is not None:
            return start.finished
        with _scratch(start.root), connect(config, address, verbose, dashboard) as cluster:
            holders = Holders() if config.checkpoint.memory is not None else None
            attempts = Attempts(config, start, cluster, screen, fit, holders=holders)
            try:
                with stop_on_signals(attempts.stop.ask):
                    return attempts.run()
            finally:
                if holders is not None:
                    holders.close()
                screen.close()


@contextlib.contextmanager
def _scratch(root: str) -> Iterator[None]:
    """Remove what Ray Train wrote into the run's folder, once its processes are gone or done."""
    try:
        yield
    finally:
        storage.remove(storage.join(root, _SCRATCH))


def fit(config: JobConfig, attempt: Attempt, workers: int) -> Any:
    """One attempt: a `TorchTrainer` with `workers` workers, and no restarts of its own."""
    from ray.exceptions import RayActorError
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from raydist.runners.lean import LeanTrainer
    from raydist.runners.variables import Variables

    scaling = config.scaling
    variables = Variables.of(config.env)
    gpus = gpus_per_worker(config)
    resources = {"CPU": scaling.cpus_per_worker, **scaling.resources}
    if gpus:
        resources["GPU"] = gpus
    trainer = LeanTrainer(
        train_on_worker,
        train_loop_config={"config": config, "attempt": attempt},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=storage.join(attempt.start.root, _SCRATCH),
            **variables.run_options,
            failure_config=FailureConfig(max_failures=0),
        ),
        torch_config=variables.torch_config(None if scaling.backend == "auto" else scaling.backend),
    )
    before = leftovers.held()
    try:
        return trainer.fit()
    except RayActorError:  # not the workers' end, which Ray Train reports: its controller's own
        leftovers.release(before)
        raise


def train_on_worker(payload: dict[str, Any]) -> None:
    """What each Ray Train worker runs; the process group is up already."""
    import torch
    from ray.train.torch import get_device

    from raydist.control import Control
    from raydist.data.ray_data import open_sources_on_ray
    from raydist.work import work
    from raydist.world import from_env

    config, attempt = payload["config"], payload["attempt"]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    run, control = RunDir(attempt.start.root), Control()
    world = from_env(config.scaling.backend, device=get_device())
    try:
        with captured(control), _watch_for_stop(StopFile(run.root), control, world.is_main):
            work(config, world, attempt, control, open_data=open_sources_on_ray)
    except BaseException as error:
        tell_failure(run, world.rank, control, error)
        raise


def tell_failure(run: RunDir, rank: int, control: Any, error: BaseException) -> None:
    """Write this rank's error and its uncollected events while the process can. On an object store only Ray tells."""
    if not storage.is_local(run.root):
        return
    for event in control.take():
        run.append_event(event.pop("kind"), **{"rank": rank, **event})
    own = isinstance(error, RaydistError)
    words = str(error) if own else "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    run.append_event(
        "worker_failed",
        rank=rank,
        error=type(error).__name__,
        reason=words,
        raised=own,
        micro_size=control.micro_size,
        traceback=traceback.format_exception(error)[-8:],
    )


@contextlib.contextmanager
def _watch_for_stop(stop: StopFile, control: Any, is_main: bool) -> Iterator[None]:
    """On rank 0, look now and then whether the driver asked to stop."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(stop.every):
            control.stop = control.stop or stop.asked()

    thread = threading.Thread(target=watch, name="raydist-stop", daemon=True)
    if is_main:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if is_main:
            thread.join()
