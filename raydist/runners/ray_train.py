"""Train on a Ray cluster: Ray Train's `TorchTrainer` starts the workers and their process group, `work` does the rest.

Restarts are this module's own: each attempt is one `TorchTrainer.fit()`, so what a failure means, how many workers the next attempt
gets and where it goes on from are decided here, with public API only.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raydist import storage
from raydist.errors import Interrupted, RaydistError
from raydist.rundir import RunDir
from raydist.runners.cluster import Cluster, connect, quiet
from raydist.runners.failures import Failure, failure_of
from raydist.runners.local import show, stop_on_signals
from raydist.screen import Screen
from raydist.start import Start, locked, prepare, run_root
from raydist.work import Attempt, failed

if TYPE_CHECKING:
    from raydist.config import JobConfig

_POLL_S = 0.1


def train_ray(
    config: JobConfig,
    resume: str | None = None,
    fresh: bool = False,
    address: str | None = None,
    screen: Screen | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Train on the cluster at `address`, or on a local one that lives as long as this call. Returns the summary.

    Raises ConfigError when the cluster cannot hold the workers, Interrupted after a stop with a checkpoint, TrainError with the first
    failing rank's own error when restarts are used up.
    """
    screen = screen or Screen()
    quiet(verbose)
    with locked(run_root(config)):
        start = prepare(config, resume, fresh)
        if start.finished is not None:
            return start.finished
        with connect(config, address, verbose) as cluster:
            try:
                return _attempts(config, start, cluster, screen)
            finally:
                screen.close()


def _attempts(config: JobConfig, start: Start, cluster: Cluster, screen: Screen) -> dict[str, Any]:
    """Attempt after attempt until the run is finished, stopped, or out of restarts."""
    run = RunDir(start.root)
    stop = StopFile(start.root)
    stop.clear()
    view = View(start, screen)
    with stop_on_signals(stop.ask):
        number = 0
        while True:
            workers = cluster.fit_workers(config)
            failure = _attempt(config, Attempt(start, number), workers, view)
            if failure is None:
                summary = run.read_summary() or {}
                if summary.get("status") == "interrupted":
                    raise Interrupted(
                        f"stopped at step {summary['steps']} by {summary['reason']}; the same command goes on from there"
                    )
                return summary
            if stop.reason is not None or not failure.retry or number >= config.failure.max_restarts:
                failed(start, config, failure.error, restarts=number)
                raise failure.error
            number += 1
            note(start.root, "failure", rank=failure.rank, reason=str(failure.error))
            screen.event(
                {
                    "kind": "failure",
                    "rank": failure.rank,
                    "reason": f"{failure.error}; restart {number} of {config.failure.max_restarts}",
                }
            )


class StopFile:
    """A request to stop, passed on to the workers through the run's folder, which both sides can reach."""

    def __init__(self, root: str) -> None:
        self.uri = storage.join(root, ".stop")
        self.every = 0.5 if storage.is_local(root) else 5.0
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason
        storage.write_bytes(self.uri, self.reason.encode())

    def asked(self) -> str | None:
        """Why to stop; None to go on."""
        return storage.read_bytes(self.uri).decode() if storage.exists(self.uri) else None

    def clear(self) -> None:
        storage.remove(self.uri)


class View:
    """Puts on the screen what the workers write into the run's folder."""

    def __init__(self, start: Start, screen: Screen) -> None:
        self.follower = RunDir(start.root).follow(since=start.began)
        self.showing = show(screen)

    def update(self) -> None:
        for kind, record in self.follower.new():
            if kind == "event" and record["kind"] in ("start", "restart", "resume"):
                self.showing("started", {"step": record["step"], "total": record["total_steps"]})
            self.showing(kind, record)


def note(root: str, kind: str, **fields: Any) -> None:
    """Add an event from the driver. A fresh view each time: on an object store the workers have written since the last one."""
    run = RunDir(root)
    run.append_event(kind, **fields)
    run.flush()


def _attempt(config: JobConfig, attempt: Attempt, workers: int, view: View) -> Failure | None:
    """One `TorchTrainer.fit()` in a thread, while this one shows what the workers write. None when it ended well."""
    began = time.time()
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["result"] = _trainer(config, attempt, workers).fit()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target, name="raydist-fit", daemon=True)
    thread.start()
    while True:
        alive = thread.is_alive()
        view.update()
        if not alive:
            break
        thread.join(_POLL_S)
    if storage.is_local(attempt.start.root):
        shutil.rmtree(storage.local_path(attempt.start.root) / ".ray", ignore_errors=True)
    error = outcome.get("error") or getattr(outcome.get("result"), "error", None)
    return None if error is None else failure_of(error, attempt.start.root, began)


def _trainer(config: JobConfig, attempt: Attempt, workers: int) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from raydist.runners.cluster import gpus_per_worker

    scaling = config.scaling
    gpus = gpus_per_worker(config)
    resources = {"CPU": scaling.cpus_per_worker, **scaling.resources}
    if gpus:
        resources["GPU"] = gpus
    return TorchTrainer(
        train_on_worker,
        train_loop_config={"config": config, "attempt": attempt},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=f"{attempt.start.root}/.ray",
            failure_config=FailureConfig(max_failures=0),
        ),
        torch_config=TorchConfig(backend=None if scaling.backend == "auto" else scaling.backend),
    )


def train_on_worker(payload: dict[str, Any]) -> None:
    """What each Ray Train worker runs; the process group is up already."""
    import torch
    from ray.train.torch import get_device

    from raydist.loop import Control
    from raydist.work import work
    from raydist.world import from_env

    config, attempt = payload["config"], payload["attempt"]
    torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    run, control = RunDir(attempt.start.root), Control()
    world = from_env(config.scaling.backend, device=get_device())
    try:
        with _watch_for_stop(StopFile(run.root), control, world.is_main):
            work(config, world, attempt, control)
    except BaseException as error:
        if storage.is_local(run.root):
            for event in control.take():
                run.append_event(event.pop("kind"), **{"rank": world.rank, **event})
            words = str(error) if isinstance(error, RaydistError) else f"{type(error).__name__}: {error}"
            run.append_event(
                "worker_failed",
                rank=world.rank,
                error=type(error).__name__,
                reason=words,
                raised=isinstance(error, RaydistError),
            )
        raise


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
