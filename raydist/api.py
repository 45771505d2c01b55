"""raydist from Python: what the commands do, as functions, in a script or a notebook."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.config import JobConfig, load_config, parse_config, to_plain
from raydist.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from raydist.state import TrainState
    from raydist.sweep.journal import Journal, Row
    from raydist.sweep.space import Plan

Job = JobConfig | str | os.PathLike[str] | Mapping[str, Any]
"""A job: its settings, a job file, or a dict as a job file would hold it (relative paths from the current folder)."""


@dataclass(frozen=True)
class Result:
    """A run that has ended: what its summary says, and the way to all that it wrote."""

    root: str
    """The run's folder or URI."""
    summary: dict[str, Any] = field(repr=False)
    config: JobConfig = field(repr=False)

    @property
    def status(self) -> str:
        """ "finished", or "finished" early with `summary["reason"]`."""
        return str(self.summary["status"])

    @property
    def metrics(self) -> dict[str, float]:
        """The last training loss and the last evaluation."""
        return dict(self.summary.get("metrics") or {})

    def metrics_frame(self) -> pd.DataFrame:
        """metrics.jsonl as a DataFrame, one row a logged step, indexed by step; per-rank numbers are columns `key.rank`."""
        from raydist.rundir import RunDir

        return frame_of(RunDir(self.root).read_metrics())

    def events(self) -> list[dict[str, Any]]:
        """events.jsonl: starts, restarts, skips, checkpoints…, in order."""
        from raydist.rundir import RunDir

        return RunDir(self.root).read_events()

    def load_checkpoint(self, best: bool = False) -> TrainState:
        """The newest (or best) good checkpoint, on the CPU."""
        return load_checkpoint(self.root, best)

    def report(self, out: str | Path | None = None) -> str:
        """Write the HTML report (`raydist report`); returns where it is."""
        from raydist.report.build import report

        return report([self.root], out)


def frame_of(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Lines of metrics as a DataFrame. Raises ConfigError where pandas is not installed."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("metrics_frame needs pandas: pip install pandas") from error
    rows = []
    for line in lines:
        row = {key: value for key, value in line.items() if not isinstance(value, dict)}
        for key, values in (line.get("ranks") or {}).items():
            row |= {f"{key}.{rank}": value for rank, value in enumerate(values)}
        rows.append(row)
    return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()


def train(
    job: Job,
    overrides: Sequence[str] = (),
    *,
    local: bool = False,
    address: str | None = None,
    resume: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a job as `raydist train` does, and return its result. Under torchrun every process must call it.

    `local` trains in this process, `address` names a Ray cluster (default: RAY_ADDRESS, else a local one that ends with it);
    `overrides` are `key.path=value`. In a notebook progress is one cell output that updates itself; `quiet` shows nothing.
    Raises ConfigError before anything starts, Interrupted after a stop with a checkpoint, and whatever training raised.
    """
    from raydist.notebook import screen_for
    from raydist.runners.local import train_local, under_torchrun

    with _importable(job):
        config = as_config(job, overrides)
        screen = screen_for(quiet)
        if local or under_torchrun():
            summary = train_local(config, resume, fresh, screen)
        else:
            from raydist.runners.ray_train import train_ray

            address = address if address is not None else os.environ.get("RAY_ADDRESS")
            summary = train_ray(config, resume, fresh, address=address, screen=screen)
    screen.table(summary)
    return Result(summary["run"], summary, config)


@dataclass(frozen=True)
class SweepTrial:
    """A trial: its settings by dotted key, and the whole job that trains it again."""

    name: str
    status: str
    value: float | None
    """The metric; None where it is not finite."""
    settings: dict[str, Any]
    config: JobConfig | None = field(repr=False)
    """None for settings that made no valid job."""
    error: str = ""


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended: all trials, the best of them, and the way to its folder."""

    root: str
    metric: str
    mode: str
    trials: list[SweepTrial] = field(repr=False)
    best: SweepTrial

    def frame(self) -> pd.DataFrame:
        """trials.csv as a DataFrame, one row a trial."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("frame needs pandas: pip install pandas") from error
        from raydist.storage import join, read_bytes
        from raydist.sweep.trials import TABLE

        text = read_bytes(join(self.root, TABLE)).decode()
        frame: pd.DataFrame = pd.read_csv(io.StringIO(text), dtype={"trial": str})
        return frame.set_index("trial")

    def report(self, out: str | Path | None = None) -> str:
        """Write the HTML report (`raydist report`); returns where it is."""
        from raydist.report.build import report

        return report([self.root], out)


def sweep(
    job: Job,
    space: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    resume: bool = False,
    fresh: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> SweepResult:
    """Sweep a job as `raydist sweep` does, and return its result.

    `space` and `settings` (`samples=20`, `search="optuna"`, …) take the place of what the job's `sweep` section says. Raises
    ConfigError before anything starts, Interrupted when stopped, TrainError when no trial has a finite metric.
    """
    from raydist.notebook import screen_for
    from raydist.sweep.run import run_sweep
    from raydist.sweep.space import check

    with _importable(job):
        config = as_config(job, overrides)
        if space is not None or settings:
            section = {} if config.sweep is None else to_plain(config.sweep)
            section |= {**({} if space is None else {"space": dict(space)}), **settings}
            whole = {**to_plain(config), "env": dict(config.env), "sweep": section}
            config = parse_config(whole, config.base_dir or Path.cwd())
        screen = screen_for(quiet)
        address = address if address is not None else os.environ.get("RAY_ADDRESS")
        journal = run_sweep(config, resume, fresh, address=address, screen=screen)
        return _sweep_result(journal, check(config))


def _sweep_result(journal: Journal, plan: Plan) -> SweepResult:
    from raydist.sweep.run import best_job
    from raydist.sweep.space import name_of

    def trial(row: Row) -> SweepTrial:
        config = None if row.status == "failed" and not row.last else best_job(plan, row)
        return SweepTrial(name_of(row.number), row.status, row.value(journal.metric), dict(row.settings), config, row.error)

    best = journal.best()
    assert best is not None  # else run_sweep has raised
    rows = [row for _, row in sorted(journal.rows.items())]
    return SweepResult(journal.root, journal.metric, journal.mode, [trial(row) for row in rows], trial(best))


@contextmanager
def _importable(job: Job) -> Iterator[None]:
    """Modules in the current folder and beside the job file can be imported, as by the command; afterwards all is as it was.

    Files that the job named (`./task.py:Task`) are forgotten, so that a notebook that trains again takes them as they are then.
    """
    path, modules = list(sys.path), set(sys.modules)
    folders = [os.getcwd()]
    if isinstance(job, str | os.PathLike):
        folders.append(os.path.dirname(os.path.abspath(os.path.expanduser(job))))
    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("raydist_file_"):  # see task._load_file
                del sys.modules[name]


def as_config(job: Job, overrides: Sequence[str] = ()) -> JobConfig:
    """The settings that `job` means. Raises ConfigError with all problems."""
    if isinstance(job, JobConfig):
        return parse_config({**to_plain(job), "env": job.env}, job.base_dir or Path.cwd(), overrides) if overrides else job
    if isinstance(job, Mapping):
        return parse_config(job, Path.cwd(), overrides)
    return load_config(os.fspath(job), overrides)


def load_checkpoint(run: str | os.PathLike[str], best: bool = False) -> TrainState:
    """The state in a checkpoint folder, or in a run's newest (or best) good checkpoint; tensors on the CPU.

    Verified by size and hash; no pickle is executed. Raises CheckpointError when there is none.
    """
    from raydist.export import pick

    return pick(os.fspath(run), best)[1]
