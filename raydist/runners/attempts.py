"""Attempt after attempt: what a failure, a lost node, a new node or a request to stop means for the run.

Restarts, resizes and stops are decided here, between attempts; an attempt itself is one `TorchTrainer.fit()` (`ray_train`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raydist import storage
from raydist.errors import ConfigError, Interrupted, TrainError
from raydist.heartbeat import read_beats
from raydist.keeper import Attempt
from raydist.rundir import RunDir
from raydist.runners.cluster import Cluster
from raydist.runners.copies import Holders
from raydist.runners.failures import Failure, failure_of
from raydist.runners.local import show
from raydist.screen import Screen
from raydist.start import Start
from raydist.work import failed

if TYPE_CHECKING:
    from raydist.config import JobConfig

_POLL_S = 0.25
_CLUSTER_POLL_S = 2.0
_NODE_POLL_S = 0.5
_NODE_PATIENCE_S = 60.0
"""How long a restart waits for enough workers to fit again."""
_PLANNED = ("resize", "preemption")
"""Stops that the run itself asked for, to go on with other workers."""

Fit = Callable[["JobConfig", Attempt, int], Any]
"""Starts the workers and returns when they are done; raises what Ray Train raises."""


class StopFile:
    """A request to stop, passed on to the workers through the run's folder, which both sides can reach."""

    def __init__(self, root: str) -> None:
        self.uri = storage.join(root, ".stop")
        self.every = 0.5 if storage.is_local(root) else 5.0
        self.reason: str | None = None
        self.since: float | None = None

    def ask(self, reason: str) -> None:
        """Ask the workers to save and stop; the first reason counts, but the user's outdoes a planned one."""
        if self.reason is None or (self.reason.startswith(_PLANNED) and not reason.startswith(_PLANNED)):
            self.reason, self.since = reason, time.monotonic()
            storage.write_bytes(self.uri, reason.encode())

    def asked(self) -> str | None:
        """Why to stop; None to go on."""
        return storage.read_bytes(self.uri).decode() if storage.exists(self.uri) else None

    def clear(self) -> None:
        """Forget the request."""
        self.reason = self.since = None
        storage.remove(self.uri)


class View:
    """Puts on the screen what the workers write into the run's folder."""

    def __init__(self, start: Start, screen: Screen) -> None:
        self.follower = RunDir(start.root).follow(since=start.began)
        self.showing = show(screen)
        self.finished = False
        """Whether rank 0 has said that the run is over and all is written."""

    def update(self) -> None:
        """Show what is new."""
        for kind, record in self.follower.new():
            self.finished = self.finished or (kind == "event" and record["kind"] == "finish")
            if kind == "event" and record["kind"] in ("start", "restart", "resume"):
                self.showing("started", {"step": record["step"], "total": record["total_steps"]})
            self.showing(kind, record)


def note(root: str, kind: str, **fields: Any) -> None:
    """Add an event from the driver. A fresh view each time: on an object store the workers have written since the last one."""
    run = RunDir(root)
    run.append_event(kind, **fields)
    run.flush()


@dataclass
class Attempts:
    """One run on one cluster."""

    config: JobConfig
    start: Start
    cluster: Cluster
    screen: Screen
    fit: Fit
    stop: StopFile = field(init=False)
    number: int = 0
    restarts: int = 0
    micro_size: int | None = None
    reached: int = 0
    failed_at: float | None = None
    holders: Holders | None = None
    """Keeps copies of the state in memory, with `checkpoint.memory`."""

    def __post_init__(self) -> None:
        self.stop = StopFile(self.start.root)
        self.stop.clear()
        self.view = View(self.start, self.screen)

    def run(self) -> dict[str, Any]:
        """The summary of the finished run. Raises Interrupted after a stop, the failure's error when restarts are used up."""
        workers = self.cluster.fit_workers(self.config)
        while True:
            copies = None if self.holders is None else self.holders.copies(self.cluster.draining())
            attempt = Attempt(
                self.start,
                self.number,
                self.micro_size,
                self.restarts,
                reached=self.reached,
                failed_at=self.failed_at,
                copies=copies,
            )
            failure = self._one(attempt, workers)
            noticed = time.time()
            if failure is None:
                summary = RunDir(self.start.root).read_summary() or {}
                if summary.get("status") != "interrupted":
                    return summary
                if not str(summary.get("reason")).startswith(_PLANNED):
                    raise Interrupted(
                        f"stopped at step {summary['steps']} by {summary['reason']}; the same command goes on from there"
                    )
            else:
                self._decide(failure)
            self.failed_at = None if failure is None else noticed
            self.number += 1
            before = workers
            workers = self._workers_again(planned=failure is None)
            if workers != before:
                note(self.start.root, "resize", reason=f"{before} → {workers} workers", workers=workers)

    def _decide(self, failure: Failure) -> None:
        """Raise the failure's error, or note it and go on to the next attempt."""
        limit = self.config.failure.max_restarts
        if self.stop.reason is not None and not self.stop.reason.startswith(_PLANNED):
            failed(self.start, self.config, failure.error, self.restarts)
            raise Interrupted(f"stopped by {self.stop.reason}, but a worker failed before it could save: {failure.error}")
        if not failure.retry or self.restarts >= limit:
            failed(self.start, self.config, failure.error, self.restarts)
            raise failure.error
        self.restarts += 1
        if failure.micro_size is not None:
            self.micro_size = failure.micro_size
        note(
            self.start.root,
            "failure",
            rank=failure.rank,
            reason=f"{failure.error}; restart {self.restarts} of {limit}",
        )

    def _workers_again(self, planned: bool) -> int:
        """How many workers the next attempt gets; waits a while for nodes to come back."""
        self.stop.clear()
        deadline = time.monotonic() + (0.0 if planned and self.cluster.owned else _NODE_PATIENCE_S)
        while True:
            try:
                return self.cluster.fit_workers(self.config)
            except ConfigError as error:
                if self.stop.reason is not None:
                    raise Interrupted(
                        f"stopped by {self.stop.reason} while waiting for nodes; the same command goes on"
                    ) from None
                if time.monotonic() >= deadline:
                    failed(self.start, self.config, error, self.restarts)
                    raise TrainError(f"no restart is possible: {error}") from error
            time.sleep(_NODE_POLL_S)

    def _one(self, attempt: Attempt, workers: int) -> Failure | None:
        """One attempt in a thread, while this one watches. None when it ended well."""
        began = time.time()
        outcome: dict[str, Any] = {}

        def target() -> None:
            try:
                outcome["result"] = self.fit(self.config, attempt, workers)
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=target, name="raydist-fit", daemon=True)
        thread.start()
        looked = time.monotonic()
        while True:
            alive = thread.is_alive()
            self.view.update()
            if not alive or (self.view.finished and self.cluster.owned):
                break  # a cluster of our own ends now anyway: no need to wait until Ray Train has noticed and tidied up
            self._enforce_grace()
            if time.monotonic() - looked > _CLUSTER_POLL_S:
                self._watch_cluster(workers)
                looked = time.monotonic()
            thread.join(_POLL_S)
        beats = [beat for beat in read_beats(self.start.root).values() if beat.attempt == attempt.key]
        self.reached = max([self.reached, *(beat.step - 1 for beat in beats)])
        error = outcome.get("error") or getattr(outcome.get("result"), "error", None)
        return None if error is None else failure_of(error, attempt, began, self.config)

    def _enforce_grace(self) -> None:
        """Give up on workers that do not stop in time."""
        grace = self.config.failure.grace
        if self.stop.since is None or str(self.stop.reason).startswith(_PLANNED):
            return
        if time.monotonic() - self.stop.since > grace:
            raise Interrupted(
                f"stopped by {self.stop.reason}: the workers did not save within failure.grace = {grace:g} s; "
                "the last committed checkpoint stays good"
            )

    def _watch_cluster(self, workers: int) -> None:
        """Ask for a save when a node is about to go, or when more workers fit than run."""
        if self.stop.reason is not None:
            return
        going = self.cluster.draining()
        if going:
            self.stop.ask(f"preemption notice for node {', '.join(sorted(going))}")
            return
        asked = self.config.scaling.workers
        if isinstance(asked, list) and workers < asked[1]:
            fits = self.cluster.fits(self.config)
            if fits > workers:
                self.stop.ask(f"resize: {fits} workers fit now, {workers} run")
