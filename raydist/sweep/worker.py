"""One rank of a slot: an actor with torch imported and the process group up, that trains trial after trial.

A trial is `raydist.work.work`, as for every other runner. At each report (a boundary of the loop with the sweep's metric) all
ranks wait for the slot's word, which rank 0 passes on: `go`, `save STORE`, or `end`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import socket
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raydist.runners.rank import Rank

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.control import Control, StepResult
    from raydist.keeper import Attempt

GO, END, SAVE = "go", "end", "save "
_TICK_S = 1.0


@dataclass(frozen=True)
class Report:
    """Where the trial `key` is: `row` for the table and for Ray Tune; None at its end."""

    key: str
    row: dict[str, Any] | None


@dataclass(frozen=True)
class Ending:
    """How a trial ended on one rank: `finished` with the last row, `over` (stopped from outside), or `failed`.

    `memory_mb` is what the process holds once the trial's memory is freed.
    """

    kind: str
    row: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    words: str = ""
    memory_mb: float = 0.0


class _Over(Exception):
    """Ends a trial on all ranks at a boundary."""


class SweepWorker(Rank):
    """See the module. Calls other than `train` come while it runs, in threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: queue.Queue[Report] = queue.Queue()
        self._words: queue.Queue[str] = queue.Queue()
        self._world: Any = None
        self._first_seed = 0

    def join(self, config: JobConfig, env: dict[str, str], secrets: dict[str, str]) -> str:
        """Become the rank that `env` says, and start the process group. Every rank must be called. Returns the host's name."""
        from raydist.environment import keep_secret

        os.environ.update({**env, **secrets})
        keep_secret(secrets.values())
        import torch

        from raydist.watchdog import flight_recorder
        from raydist.world import from_env

        flight_recorder()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
        self._first_seed = torch.initial_seed()
        self._world = from_env(config.scaling.backend)
        self._world.gather(0)  # connected: the first trial need not wait for it
        import raydist.data.ray_data
        import raydist.work  # noqa: F401

        return socket.gethostname()

    # -- what the slot asks ----------------------------------------------------------------------------------------

    def report(self, key: str) -> dict[str, Any] | None:
        """The row of the trial's next report; None when the trial has ended. Of rank 0, one call at a time."""
        while True:
            report = self._reports.get()
            if report.key == key:
                return report.row

    def answer(self, word: str) -> None:
        """The word that rank 0 waits for."""
        self._words.put(word)

    def exploit(self, store: str, step: int, root: str, lr: float) -> None:
        """Put the state at `store` in the place of the run's own checkpoints, for the rate `lr`."""
        from raydist import storage
        from raydist.checkpoint import load, save
        from raydist.manifest import folder_name

        state, _ = load(storage.join(store, folder_name(step)))
        ratio = lr / float(state.config["optimizer"]["lr"])
        for group in state.optimizer["param_groups"]:
            group |= {key: group[key] * ratio for key in ("lr", "initial_lr") if isinstance(group.get(key), float)}
        own = storage.join(root, "checkpoints")
        storage.remove(own)
        save(own, state, step)

    # -- a trial ---------------------------------------------------------------------------------------------------

    def train(self, config: JobConfig, attempt: Attempt, metric: str) -> Ending:
        """Train one trial to its end. Every rank must be called; the same world serves all trials."""
        import torch

        from raydist.control import Control
        from raydist.data.ray_data import open_sources_on_ray
        from raydist.environment import hide
        from raydist.errors import RaydistError
        from raydist.rundir import RunDir
        from raydist.runners.prints import captured
        from raydist.runners.ray_train import tell_failure
        from raydist.work import work

        control = Control()
        while not self._words.empty():
            self._words.get()
        torch.default_generator.manual_seed(self._first_seed)  # as in a fresh process
        steps_per_epoch: list[int | None] = [None]

        def open_data(job: JobConfig, world: Any, stored: dict[str, Any] | None) -> Any:
            sources = open_sources_on_ray(job, world, stored)
            steps_per_epoch[0] = sources.train.steps_per_epoch
            return sources

        last: dict[str, Any] = {}

        def on_result(result: StepResult) -> None:
            if result.log and metric in result.metrics:
                last.clear()
                last.update(_row(result, steps_per_epoch[0], metric))
                if result.status == "running":
                    self._boundary(control, result, attempt.key, dict(last))

        ending = Ending("over")
        try:
            with captured(control):
                summary = work(config, self._world, attempt, control, open_data=open_data, on_result=on_result)
            ending = Ending("finished", {**(last or row_of_summary(summary, metric)), "seconds": summary["seconds"]})
        except _Over:
            pass
        except BaseException as error:
            tell_failure(RunDir(attempt.start.root), self._world.rank, control, error)
            own = type(error).__name__ if isinstance(error, RaydistError) else ""
            ending = Ending("failed", dict(last), own, hide(str(error) or type(error).__name__))
        finally:
            self._reports.put(Report(attempt.key, None))
        return Ending(ending.kind, ending.row, ending.error, ending.words, _free(torch))

    def _boundary(self, control: Control, result: StepResult, key: str, row: dict[str, Any]) -> None:
        """Tell, and do as told. Every rank comes here at the same steps."""
        from raydist.checkpoint import save

        if self._world.is_main:
            self._reports.put(Report(key, row))
        while True:
            word = self._world.broadcast(self._wait(control) if self._world.is_main else None)
            if word == GO:
                return
            if word == END:
                raise _Over
            state = result.state()
            if self._world.is_main:
                save(word.removeprefix(SAVE), state, result.step, keep=3)
                self._reports.put(Report(key, {**row, "saved": result.step}))

    def _wait(self, control: Control) -> str:
        while True:
            control.progress.enter("output")  # alive: it is the sweep that takes its time
            try:
                return self._words.get(timeout=_TICK_S)
            except queue.Empty:
                continue


def _row(result: StepResult, steps_per_epoch: int | None, metric: str) -> dict[str, Any]:
    """Of a line of metrics: the metric (nan where it is none), what else was evaluated, and how far the trial is."""
    line = result.metrics
    whole = steps_per_epoch is not None and result.step % steps_per_epoch == 0
    epochs: float = line["epoch"] + 1 if steps_per_epoch is None else result.step / steps_per_epoch
    value = line[metric]
    shown = {k: v for k, v in line.items() if k == "train_loss" or (k.startswith("eval_") and k != "eval_s")}
    return {
        **shown,
        metric: float("nan") if value is None else float(value),
        "steps": result.step,
        "epochs": int(epochs) if whole else epochs,
        "rows": line["rows_seen"],
    }


def row_of_summary(summary: dict[str, Any], metric: str) -> dict[str, Any]:
    """The row of a trial that had nothing left to do."""
    value = summary["metrics"].get(metric)
    return {
        **summary["metrics"],
        metric: float("nan") if value is None else float(value),
        "steps": summary["steps"],
        "epochs": summary.get("epochs", 0),
        "rows": summary["rows_seen"],
    }


def _free(torch: Any) -> float:
    """Give back what a trial held, undo what it may have set for the whole process; MiB that the process still holds."""
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.clear_autocast_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    import psutil  # comes with ray

    return float(psutil.Process().memory_info().rss) / 2**20
