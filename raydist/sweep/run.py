"""`raydist sweep`: the whole of it, from the job file to `best.yaml`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raydist import storage
from raydist.config import JobConfig, diff_settings, parse_config, to_yaml
from raydist.config_file import parse_yaml
from raydist.environment import applied, resolve
from raydist.errors import ConfigError, Interrupted, TrainError
from raydist.runners.cluster import Cluster, joined, needs, quiet
from raydist.runners.local import stop_on_signals
from raydist.screen import Screen
from raydist.start import locked, move_aside, run_root
from raydist.storage import exists, join
from raydist.sweep.journal import ENDED, Journal, Row
from raydist.sweep.space import Plan, check, job_of, name_of

_MAY_CHANGE = ("sweep.samples", "sweep.budget", "sweep.concurrency", "sweep.slots", "scaling.", "storage", "loggers", "env")
"""What may differ when a sweep goes on: it decides how many trials there are and where they run, not what they are."""


@dataclass
class Sweep:
    """A sweep under way in its folder."""

    plan: Plan
    root: str
    journal: Journal
    screen: Screen
    stopped: str | None = None
    workers: int = 1
    began: float = field(default_factory=time.monotonic)

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune pickles its own objects, which lead here; what is going on cannot be."""
        return {}

    @property
    def config(self) -> JobConfig:
        return self.plan.config

    def best_job(self, row: Row) -> JobConfig:
        """See `best_job`."""
        return best_job(self.plan, row)

    def spent(self) -> bool:
        """Whether the budget is used up, or somebody asked to stop."""
        budget = self.plan.sweep.budget
        late = budget.time is not None and self.journal.seconds() >= budget.time
        dear = budget.worker_hours is not None and self.journal.hours >= budget.worker_hours
        return self.stopped is not None or late or dear

    def ask(self, reason: str) -> None:
        """Stop the sweep; running trials go on when it is resumed."""
        self.stopped = self.stopped or reason


def best_job(plan: Plan, row: Row) -> JobConfig:
    """The job that `raydist train best.yaml` trains: the trial's, in a folder of its own beside the sweep."""
    return job_of(plan.config, plan.sweep, row.settings, f"{plan.config.name}-best", plan.config.storage)


def run_sweep(
    config: JobConfig,
    resume: bool = False,
    fresh: bool = False,
    address: str | None = None,
    screen: Screen | None = None,
    verbose: bool = False,
) -> Journal:
    """Run the job's sweep on the cluster at `address`, or a local one, and return its journal.

    Raises ConfigError before anything starts, Interrupted when it was stopped, TrainError when no trial has a finite metric.
    """
    resolve(config.env, os.environ)
    plan = check(config)
    screen = screen or Screen()
    quiet(verbose)
    root = run_root(config)
    with locked(root):
        _prepare(plan, root, resume, fresh, screen)
        journal = Journal(root, plan.sweep.metric, plan.sweep.mode)
        sweep = Sweep(plan, root, journal, screen)
        left = plan.trials - journal.count(*ENDED)
        if left > 0:
            with _quiet_tune(plan, verbose), joined(address, _size(plan), verbose) as cluster, stop_on_signals(sweep.ask):
                _tune(sweep, cluster)
        journal.write(sweep.best_job)
        storage.remove(join(root, ".states"))
        _tell(sweep)
    return journal


def _prepare(plan: Plan, root: str, resume: bool, fresh: bool, screen: Screen) -> None:
    """Is there an earlier sweep, may this one go on from it; write `sweep.yaml`."""
    if fresh:
        for words in move_aside(root):
            screen.say(words)
    there = exists(join(root, "sweep.jsonl"))
    if not there and exists(join(root, "metrics.jsonl")):
        raise ConfigError(f"{root} holds a run of raydist train; choose another name=…, or --fresh to move it aside")
    if there and not resume:
        raise ConfigError(f"{root} holds a sweep; go on with it by --resume, start over by --fresh, or choose another name=…")
    if there:
        text = storage.read_bytes(join(root, "sweep.yaml")).decode()
        before = parse_config(parse_yaml(text, "sweep.yaml")[0], plan.config.base_dir or ".")
        changed = [c for c in diff_settings(before, plan.config) if not c[0].startswith(_MAY_CHANGE)]
        if changed:
            lines = "\n".join(f"  {key}: {old} there, {new} now" for key, old, new in changed)
            raise ConfigError(f"--resume: {root} is a sweep with other settings:\n{lines}\nChoose another name=…, or --fresh")
    elif resume:
        screen.say(f"nothing to resume in {root}: starting anew")
    storage.write_bytes(join(root, "sweep.yaml"), to_yaml(plan.config).encode())


def _size(plan: Plan) -> dict[str, Any]:
    """What a local cluster is started with: as many slots as the machine has CPUs for, at least one."""
    scaling, workers = plan.config.scaling, plan.config.workers[1]
    gang = workers * scaling.cpus_per_worker
    slots = max(1, min(int((os.cpu_count() or 1) // gang), plan.sweep.concurrency or plan.trials, plan.trials))
    size: dict[str, Any] = {"num_cpus": max(1, int(-(-gang * slots // 1)))}
    if scaling.resources:
        size["resources"] = {name: amount * workers * slots for name, amount in scaling.resources.items()}
    if scaling.backend == "gloo" and scaling.gpus_per_worker == "auto":
        size["num_gpus"] = 0
    return size


@contextlib.contextmanager
def _quiet_tune(plan: Plan, verbose: bool) -> Iterator[None]:
    """Within it, Ray Tune writes and says nothing of its own, leaves signals to raydist, and asks for one slot at a time."""
    values = {
        "TUNE_MAX_PENDING_TRIALS_PG": str(plan.trials if _is_population(plan) else 1),
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    level = logging.getLogger("ray.tune").level
    if not verbose:
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
    try:
        with applied(values), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("ray.tune").setLevel(level)


def _is_population(plan: Plan) -> bool:
    """Whether all trials run side by side, as PBT has them."""
    return plan.sweep.scheduler.name == "pbt"


def _tune(sweep: Sweep, cluster: Cluster) -> None:
    """All trials, by Ray Tune."""
    from ray import tune
    from ray.tune import CheckpointConfig, PlacementGroupFactory, RunConfig, TuneConfig

    from raydist.runners.variables import Variables
    from raydist.sweep.schedulers import scheduler_of
    from raydist.sweep.search import Suggestions
    from raydist.sweep.slot import Shared, Slot
    from raydist.sweep.watch import Stop, Watch

    plan, config = sweep.plan, sweep.config
    sweep.workers = workers = cluster.fit_workers(config)
    need = {name: amount for name, amount in needs(config).items() if amount}
    variables = Variables.of(config.env)
    shared = Shared(config, sweep.root, workers, need, variables.shown, variables.secrets)

    def limit() -> int:
        slots = max(1, cluster.fits(config) // workers)
        most = min(slots, plan.sweep.concurrency or slots)
        return plan.trials if _is_population(plan) else most

    search = Suggestions(plan, sweep.journal, limit, sweep.spent, shared.job)
    scheduler = scheduler_of(plan, sweep.journal, _longest(plan))
    scratch = tempfile.mkdtemp(prefix="raydist-sweep-") if storage.is_local(sweep.root) else join(sweep.root, ".tune")
    try:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(Slot, shared=shared), PlacementGroupFactory([{}, *([need] * workers)])),
            tune_config=TuneConfig(
                search_alg=search, scheduler=scheduler, num_samples=plan.trials, reuse_actors=plan.sweep.slots == "warm"
            ),
            run_config=RunConfig(
                name="tune",
                storage_path=scratch,
                verbose=0,
                callbacks=[Watch(sweep)],
                stop=Stop(sweep),
                checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True) if storage.is_local(sweep.root) else storage.remove(scratch)


def _longest(plan: Plan) -> int:
    """A trial's length in the scheduler's unit; far away where the job does not say it in that unit."""
    asked, train = plan.sweep.scheduler, plan.config.train
    own = train.epochs if asked.unit == "epochs" else train.max_steps
    return asked.max or own or 1_000_000


def _tell(sweep: Sweep) -> None:
    """Raise what the end means, once all is written."""
    journal, plan = sweep.journal, sweep.plan
    done = journal.count(*ENDED)
    if sweep.stopped is not None and done < plan.trials:
        raise Interrupted(f"stopped by {sweep.stopped} with {done} of {plan.trials} trials done; --resume goes on from there")
    if done < plan.trials and sweep.spent():
        words = f"the budget is used up with {done} of {plan.trials} trials done"
        if journal.best() is None and journal.count("failed") < len(journal.rows):
            raise TrainError(f"{words} and none evaluated; --resume with a larger sweep.budget goes on from there")
        sweep.screen.say(f"{words}; --resume with a larger sweep.budget goes on from there")
    if journal.best() is None and journal.rows:
        failed = next((row for row in journal.rows.values() if row.error), None)
        words = f"; trial {name_of(failed.number)}: {failed.error}" if failed else ""
        count = f"{journal.count('failed')} of {len(journal.rows)} failed"
        raise TrainError(f"no trial has a finite {plan.sweep.metric}: {count}{words}")
