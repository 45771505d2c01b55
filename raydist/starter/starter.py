"""What `raydist init` is about to write, and the writing: all of it, or nothing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from raydist.errors import ConfigError


@dataclass
class Starter:
    """A job file, its task file, tables to write (a data set cut in two), image files to copy, and what to tell the user."""

    job: str
    task: str
    tables: dict[str, pa.Table] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path, force: bool) -> list[Path]:
        """Write into `folder`; the paths. ConfigError, before anything is written, when one is there and `force` is not set."""
        names = ["job.yaml", "task.py", *self.tables, *self.copies]
        there = [name for name in names if (folder / name).exists()]
        if there and not force:
            raise ConfigError(
                f"{folder} has {', '.join(there[:3])}{' …' if len(there) > 3 else ''} already; nothing was written. Give --out "
                "another folder, or --force to overwrite"
            )
        try:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name in self.tables:
                    self._put(folder / name, partial(_write_parquet, self.tables[name]))
                elif name in self.copies:
                    self._put(folder / name, partial(shutil.copyfile, self.copies[name]))
            for name, text in (("task.py", self.task), ("job.yaml", self.job)):
                self._put(folder / name, partial(_write_text, text))
        except OSError as error:
            raise ConfigError(f"--out: {folder} cannot be written: {error}") from error
        return [folder / "job.yaml", folder / "task.py", *(folder / name for name in self.tables)]

    @staticmethod
    def _put(path: Path, write: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory(prefix=".init-", dir=path.parent) as scratch:
            written = Path(scratch) / path.name
            write(written)
            os.replace(written, path)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, row_group_size=10_000)


def run_name(path: str) -> str:
    """A run's name from a file or folder name."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(path.rstrip("/")).name.split(".")[0]).strip("_-")
    return stem[:60] or "job"


def reference(path: str, folder: Path) -> str:
    """How a job file in `folder` names a path: relative where it lies inside, else absolute; URIs as they are."""
    if "://" in path:
        return path
    full = Path(path).expanduser().absolute()
    try:
        return full.relative_to(folder.absolute()).as_posix()
    except ValueError:
        return full.as_posix()


def class_names(classes: Sequence[object]) -> str:
    """Which number stands for which class."""
    return ", ".join(f"{number} = {one}" for number, one in enumerate(classes[:20])) + (" …" if len(classes) > 20 else "")


def task_source(kind: str) -> str:
    """The text of the task file of a kind."""
    return (Path(__file__).parent / "tasks" / f"{kind}.py").read_text(encoding="utf-8")


def value(thing: object) -> str:
    """A value as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump(thing, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def batch_size(rows: int) -> int:
    """A power of two from 16 to 256 that makes about 40 steps of an epoch; never more than the rows."""
    size = 16
    while size < 256 and rows / (2 * size) >= 40:
        size *= 2
    return min(size, rows)


def epochs_for(rows: int, size: int, steps: int) -> int:
    """Epochs that make about `steps` steps, from 1 to 50."""
    return max(1, min(50, round(steps / max(1, -(-rows // size)))))


TAIL = """\
optimizer: {{name: adamw, lr: {lr}}}
schedule: {{name: cosine, warmup_steps: {warmup}}}   # the learning rate rises, then falls to 0 at the end of the run
clip_grad_norm: 1.0
scaling: {{workers: 1}}               # the same run with any number: raydist train job.yaml scaling.workers=2
checkpoint: {{every: {{epochs: 1}}, keep: 2, best: {{metric: {best}, mode: {mode}}}}}
storage: ./runs                     # the same command again goes on with an unfinished run; --fresh starts anew
"""
