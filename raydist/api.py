"""raydist from Python: what the commands do, as functions, in a script or a notebook."""

from __future__ import annotations

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

    Verified by size and sha256; no pickle is executed. Raises CheckpointError when there is none.
    """
    from raydist.export import pick

    return pick(os.fspath(run), best)[1]
