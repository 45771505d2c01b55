"""A short trial of a job: raydist's own loop, without a run's folder, checkpoints or evaluations."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raydist.config import JobConfig, parse_config, to_plain
from raydist.control import Control, StepResult
from raydist.data.job import open_sources
from raydist.loop import fit
from raydist.task import build_task
from raydist.world import World, from_env

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEFT_OUT = ("schedule", "loggers", "profile", "sweep")
"""Sections that a trial does without."""
_KEPT = ("compile", "deterministic")
"""What a trial takes from the job's `train` section."""


@contextmanager
def one_process(config: JobConfig) -> Iterator[World]:
    """This process as a worker of the job (or, under torchrun, as one of several), with a worker's threads."""
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:  # as the local runner does
        torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    world = from_env(config.scaling.backend)
    try:
        yield world
    finally:
        world.close()
        torch.set_num_threads(threads)


def short_job(config: JobConfig, steps: int, changes: Mapping[str, Mapping[str, Any]]) -> JobConfig:
    """The job for `steps` steps, each of them logged, and nothing that a run has beside training. `changes` go into sections.

    Schedule, evaluation, early stop, EMA, checkpoints, loggers and profile are left out. A step that is not finite is skipped,
    so that whoever takes the results decides. A pipeline or shards train as one whole model, with the same losses.
    """
    settings = {key: value for key, value in to_plain(config).items() if key not in _LEFT_OUT}
    settings["data"] = {key: value for key, value in settings["data"].items() if key != "eval"}
    train = {key: value for key, value in settings["train"].items() if key in _KEPT}
    settings["train"] = {**train, "max_steps": steps, "eval_every": None, "log_every": {"steps": 1}}
    settings["checkpoint"] = {"every": None}
    settings["failure"] = {"bad_step": "skip", "max_bad_steps": steps}
    if config.strategy.name in ("pipeline", "fsdp"):
        settings["strategy"] = "ddp"
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return parse_config(settings, config.base_dir or Path.cwd())


def results(config: JobConfig, world: World, control: Control) -> Generator[StepResult, None, None]:
    """The job's steps from scratch; closing the generator ends it. Every rank must take every result.

    Raises what `fit` raises, DataError when there are no rows.
    """
    sources = open_sources(config, world, None)
    try:
        yield from fit(config, build_task(config.task), world, sources.train, None, None, control)
    finally:
        sources.close()


def rows_of(config: JobConfig, world: World) -> int | None:
    """Rows of an epoch; None when a transform changes their number. Raises DataError when the data cannot be read."""
    sources = open_sources(config, world, None)
    try:
        return sources.train.rows_per_epoch
    finally:
        sources.close()


def section_line(config: JobConfig, section: str, **values: Any) -> str:
    """The line for the job file: the section as the job has it, with `values` in it."""
    import yaml

    now = getattr(config, section).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump({section: {**now, **values}}, default_flow_style=True, sort_keys=False, width=10_000)[1:-2].strip()


def two_digits(value: float) -> float:
    """A number that people write down: two significant digits."""
    return float(f"{value:.2g}")


def as_yaml(value: float) -> str:
    """A number as YAML reads it: PyYAML takes `1e-05` for a string, and `1.0e-05` for a number."""
    import yaml

    return str(yaml.safe_dump(value)).splitlines()[0]


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """CSV with a header; None is an empty cell."""
    import csv
    import io

    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()
