"""Before training starts: is there an earlier run in this folder, and may this job go on from it?

Decided once, by the process the user started (or rank 0 under torchrun), so that workers only follow.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydist.config import JobConfig, diff_settings, parse_config, to_yaml
from raydist.config_file import parse_yaml
from raydist.errors import ConfigError
from raydist.loggers import check_loggers
from raydist.manifest import find, list_checkpoints
from raydist.rundir import RunDir
from raydist.storage import exists, is_local, join, read_bytes

HARMLESS = (
    "name",
    "storage",
    "scaling.",
    "checkpoint.",
    "failure.",
    "train.log_every",
    "train.eval_every",
    "data.train.engine",
    "data.eval.engine",
    "data.train.loader",
    "data.eval.loader",
    "loggers",
    "profile",
    "env",
    "sweep",
)
"""Settings that do not change which run this is: the batch law keeps steps and batches the same."""

_LOCK = ".lock"
_PACKAGE = re.compile(r"^/.*/runtime_resources/working_dir_files/[^/]+/")


@dataclass(frozen=True)
class Start:
    """How a run starts. `resume`: None (from scratch), "auto" (the newest good checkpoint of this run) or a checkpoint."""

    root: str
    resume: str | None
    notes: list[str] = field(default_factory=list)
    finished: dict[str, Any] | None = None
    """The summary of a run that is already done with these settings: nothing is left to do."""
    began: float = field(default_factory=time.time)


def run_root(config: JobConfig) -> str:
    """The run's folder or URI: `<storage>/<name>`."""
    return f"{config.storage.rstrip('/')}/{config.name}"


def prepare(config: JobConfig, resume: str | None = None, fresh: bool = False) -> Start:
    """Look at the run's folder, decide, and write `config.yaml`.

    Without `resume`: a finished run with the same settings is left alone, an unfinished one goes on, and one with other
    settings is a ConfigError that names them. `resume="auto"` goes on with changed settings and reports them; a path goes on
    from that checkpoint in a new run. `fresh` moves an earlier run aside, deleting nothing.
    """
    check_loggers(config)
    root = run_root(config)
    run = RunDir(root)
    notes: list[str] = []
    if fresh:
        notes += move_aside(root)
    earlier = _earlier_config(root)
    has_checkpoints = bool(find(run.checkpoints))  # a damaged one too: that is no reason to start over
    if resume not in (None, "auto"):
        assert resume is not None
        if has_checkpoints:
            raise ConfigError(
                f"--resume {resume}: {root} holds a run already; choose another name=…, or --fresh to move it aside"
            )
        return _write(config, run, Start(root, _checkpoint_at(resume), notes))
    if not has_checkpoints:
        if resume == "auto" and earlier is None:
            notes.append(f"nothing to resume in {root}: starting from scratch")
        return _write(config, run, Start(root, None, notes))
    changed = [] if earlier is None else [c for c in diff_settings(earlier, config) if _same_place(c[1]) != _same_place(c[2])]
    telling = [change for change in changed if not change[0].startswith(HARMLESS)]
    summary = run.read_summary()
    if resume is None and telling:
        raise ConfigError(
            f"{root} holds a run with other settings:\n"
            + "\n".join(f"  {key}: {_show(old)} there, {_show(new)} now" for key, old, new in telling)
            + "\nChoose another name=…, go on with the new settings by --resume auto, or move the old run aside by --fresh"
        )
    if resume is None and summary is not None and summary.get("status") == "finished":
        return Start(root, "auto", notes, finished=summary)
    notes += [f"resuming with {key} = {_show(new)}, was {_show(old)}" for key, old, new in changed]
    return _write(config, run, Start(root, "auto", notes))


def _show(value: Any) -> str:
    return "(unset)" if value is None else repr(value) if isinstance(value, str) else str(value)


def _same_place(value: Any) -> Any:
    """Paths into the package of a Ray job without its folder, whose name changes with any of the files in it."""
    if isinstance(value, list):
        return [_same_place(item) for item in value]
    return _PACKAGE.sub("", value) if isinstance(value, str) else value


def _write(config: JobConfig, run: RunDir, start: Start) -> Start:
    run.write_config(to_yaml(config))
    return start


def _earlier_config(root: str) -> JobConfig | None:
    uri = join(root, "config.yaml")
    if not exists(uri):
        return None
    data, _ = parse_yaml(read_bytes(uri).decode(), uri)
    return parse_config(data, Path.cwd())


def _checkpoint_at(where: str) -> str:
    """A checkpoint folder, or the newest one of a run folder."""
    where = where if "://" in where else str(Path(where).expanduser().absolute())
    for folder in (where, join(where, "checkpoints")):
        found = list_checkpoints(folder)
        if found:
            return folder
    parent, _, name = where.rstrip("/").rpartition("/")
    if any(name == found.uri.rpartition("/")[2] for found in list_checkpoints(parent)):
        return where
    raise ConfigError(
        f"--resume {where}: no committed checkpoint there; give a run folder or a checkpoint folder "
        "(…/checkpoints/step-00000042)"
    )


def move_aside(root: str) -> list[str]:
    """Rename the folder's contents into one beside it, deleting nothing; what to say of it."""
    if not is_local(root):
        raise ConfigError(f"--fresh cannot rename {root} on remote storage; choose another name=…")
    path = Path(root)
    entries = [entry for entry in path.iterdir() if entry.name != _LOCK] if path.exists() else []
    if not entries:
        return []
    wanted = f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [wanted, *(f"{wanted}-{number}" for number in range(2, 100))]
    aside = next(folder for name in names if not (folder := path.with_name(name)).exists())
    aside.mkdir()
    for entry in entries:  # not the folder itself: its lock is held
        entry.rename(aside / entry.name)
    return [f"the earlier run was moved to {aside}"]


@contextmanager
def locked(root: str) -> Iterator[None]:
    """Hold the run's folder for this process; ConfigError when another live process has it. Remote storage is not locked."""
    if not is_local(root):
        yield
        return
    Path(root).mkdir(parents=True, exist_ok=True)
    with open(Path(root) / _LOCK, "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise ConfigError(
                f"{root} is being written by another run (process {handle.read().strip() or '?'}); wait for it, "
                "or choose another name=…"
            ) from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield
