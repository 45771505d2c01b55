"""What Ray Tune tells of the trials: into the journal, the tables and on the screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ray.tune import Callback
from ray.tune.stopper import Stopper

from raydist import storage
from raydist.rundir import RunDir
from raydist.start import run_root
from raydist.sweep.space import trial_job
from raydist.sweep.table import Board
from raydist.work import summary_so_far

if TYPE_CHECKING:
    from raydist.sweep.run import Sweep

_WRITE_S = 2.0
_KEPT = ("steps", "epochs", "rows", "seconds", "global_batch", "lr", "seed", "train_loss", "ended", "failed")


class Stop(Stopper):
    """Ends the sweep when its budget is spent or the user asked."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No trial ends for that reason alone."""
        return False

    def stop_all(self) -> bool:
        """Whether all is to end."""
        return self.sweep.spent()


class Watch(Callback):
    """Ray Tune's callback, in the process of the user's command."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.board = Board(sweep)
        self._seen = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has workers."""
        self.sweep.journal.rows[int(trial.trial_id)].status = "running"

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        """A trial has come to a report."""
        journal, number = self.sweep.journal, int(trial.trial_id)
        settings = dict(trial.config)
        if settings != journal.rows[number].settings:
            journal.change(number, settings)
        kept = {key: value for key, value in result.items() if key in _KEPT or (key.startswith("eval_") and key != "eval_s")}
        journal.report(number, kept)
        if result.get("failed"):
            self._end(number, "failed", result["failed"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial is over: by itself, or since the scheduler stopped it; one that the sweep's end met goes on with --resume."""
        journal, number = self.sweep.journal, int(trial.trial_id)
        row = journal.rows[number]
        if row.status == "failed":
            pass
        elif row.last.get("ended"):
            journal.end(number, "finished")
        elif not self.sweep.spent():
            self._end(number, "stopped")
        self.board.ended(row)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's slot is gone."""
        journal, number = self.sweep.journal, int(trial.trial_id)
        lines = [line for line in str(trial.get_error() or "its slot ended without a word").splitlines() if line.strip()]
        self._end(number, "failed", lines[-1].strip() if lines else "its slot ended without a word")
        self.board.ended(journal.rows[number])

    def _end(self, number: int, status: str, error: str = "") -> None:
        """A trial is over and its run cannot say so itself: the journal does, and its summary where there is none of that."""
        self.sweep.journal.end(number, status, error)
        row = self.sweep.journal.rows[number]
        job = trial_job(self.sweep.config, self.sweep.root, number, row.settings)
        run = RunDir(run_root(job))
        if not storage.exists(storage.join(run.root, "config.yaml")) or (run.read_summary() or {}).get("status") == status:
            return
        restarts = sum(event["kind"] == "failure" for event in run.read_events())
        reason = error or f"stopped by the scheduler ({self.sweep.plan.sweep.scheduler.name})"
        run.write_summary(summary_so_far(run, job, status, reason, restarts, float(row.last.get("seconds", 0.0))))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Now and then: what was used, tables, screen."""
        now = time.monotonic()
        busy = sum(trial.status == "RUNNING" for trial in trials) * self.sweep.workers
        self.sweep.journal.hours += busy * (now - self._seen) / 3600
        self._seen = now
        self.sweep.journal.write(self.sweep.best_job, every=_WRITE_S)
        self.board.update()

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Nothing more comes."""
        self.board.close()
