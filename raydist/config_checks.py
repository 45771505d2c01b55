"""What only several sections of a job file can tell together.

Each check is a function whose parameters name the sections it needs, and yields `(key path, message)`. It runs whenever
those sections are valid, so that an error elsewhere does not hide what it finds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raydist.config_data import DataConfig, TaskConfig
from raydist.config_parts import (
    CheckpointConfig,
    FailureConfig,
    OptimizerConfig,
    Precision,
    ScalingConfig,
    ScheduleConfig,
    Strategy,
    TrainConfig,
)
from raydist.config_sweep import SweepConfig
from raydist.config_words import nearest

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Found = Iterator[tuple[str, str]]


def task_fits_data(task: TaskConfig, data: DataConfig) -> Found:
    """Column data needs to know which columns are inputs and targets; a torch Dataset may yield (x, y)."""
    if task.target is not None:
        return
    sets = [("train", data.train), *([("eval", data.eval)] if data.eval is not None else [])]
    files = [key for key, dataset in sets if dataset.path is not None]
    takers = (
        ("inputs", "columns that the model takes, such as [pixels]"),
        ("targets", "column that the loss takes, such as label"),
    )
    for key, words in takers:
        if files and getattr(task, key) is None:
            yield f"task.{key}", f"missing; data.{files[0]} is read from files: name the {words}"
    targets = [task.targets] if isinstance(task.targets, str) else task.targets or []
    for key, dataset in sets:
        if dataset.columns is None or dataset.transforms:
            continue
        inputs = [name for entry in task.inputs or () for name in ([entry] if isinstance(entry, str) else entry)]
        for column in (*inputs, *targets):
            if column not in dataset.columns:
                yield f"data.{key}.columns", f"lacks {column!r}, which task.inputs or task.targets names"


def eval_keeps_every_row(data: DataConfig) -> Found:
    """An evaluation scores each row once."""
    if data.eval is not None:
        for key in ("shuffle", "drop_last", "sampler"):
            if data.eval.is_set(key):
                yield f"data.eval.{key}", "only for data.train; an evaluation scores each row once, in order"


def fit_has_columns(data: DataConfig) -> Found:
    """Indexing and normalizing work on columns."""
    if data.fit is not None and data.train.path is None:
        yield "data.fit", "only when data.train is read from files (path); a torch Dataset (target) prepares its own rows"


def eval_has_data(data: DataConfig, train: TrainConfig) -> Found:
    """An evaluation that was asked for needs data; the default of every epoch does not insist."""
    if data.eval is None and train.eval_every is not None and train.is_set("eval_every"):
        yield "train.eval_every", "there is nothing to evaluate: add data.eval, or remove this key"


def metrics_exist(
    task: TaskConfig, data: DataConfig, train: TrainConfig, schedule: ScheduleConfig, checkpoint: CheckpointConfig
) -> Found:
    """A metric that decides something must be one that the run will have."""
    used = []
    if train.early_stop is not None:
        used.append(("train.early_stop.metric", train.early_stop.metric))
    if checkpoint.best is not None:
        used.append(("checkpoint.best.metric", checkpoint.best.metric))
    if schedule.name == "plateau":
        used.append(("schedule.metric", schedule.metric))
    known = ["eval_loss", "train_loss", *(f"eval_{name}" for name in task.metrics)]
    for key, metric in used:
        if task.target is None and metric not in known:
            yield key, f"no such metric; {nearest(metric, known)}allowed: {', '.join(known)} (eval_<name in task.metrics>)"
        elif metric.startswith("eval_") and data.eval is None:
            yield key, f"{metric} needs an evaluation: add data.eval, or use train_loss"
        elif metric.startswith("eval_") and train.eval_every is None:
            yield key, f"{metric} needs an evaluation, and train.eval_every is null"


def sweep_compares_a_metric(task: TaskConfig, data: DataConfig, train: TrainConfig, sweep: SweepConfig | None) -> Found:
    """Trials are compared by a metric that each of them has."""
    if sweep is None:
        return
    known = ["eval_loss", "train_loss", *(f"eval_{name}" for name in task.metrics)]
    if task.target is None and sweep.metric not in known:
        yield "sweep.metric", f"no such metric; {nearest(sweep.metric, known)}allowed: {', '.join(known)}"
    elif sweep.metric.startswith("eval_") and (data.eval is None or train.eval_every is None):
        yield "sweep.metric", f"{sweep.metric} needs an evaluation: add data.eval and train.eval_every, or use train_loss"


def schedule_fits_run(train: TrainConfig, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> Found:
    """Warm-up ends within the run, and the floor lies under the peak."""
    if schedule.total_steps is None and train.max_steps is not None and schedule.warmup_steps > train.max_steps:
        yield "schedule.warmup_steps", f"at most train.max_steps ({train.max_steps}) is allowed"
    if schedule.min_lr > optimizer.lr:
        yield "schedule.min_lr", f"at most optimizer.lr ({optimizer.lr:g}) is allowed"


def one_worker(strategy: Strategy, scaling: ScalingConfig) -> Found:
    """dp and model_parallel use several devices of one process."""
    if strategy.name in ("dp", "model_parallel") and scaling.workers != 1:
        yield "scaling.workers", f"strategy {strategy.name} runs in one worker: only 1 is allowed; ddp uses several"


def fsdp_fits(strategy: Strategy, scaling: ScalingConfig, train: TrainConfig, precision: Precision) -> Found:
    """What shards of a model cannot do."""
    if strategy.name != "fsdp":
        return
    if train.ema is not None:
        yield "train.ema", "not with strategy fsdp, which keeps no second copy of the weights: leave it out, or use ddp"
    if train.compile:
        yield "train.compile", "not with strategy fsdp: leave it out, or use ddp"
    if strategy.param_dtype == "fp16" and precision.name != "fp16":
        yield "strategy.param_dtype", "fp16 needs precision: fp16, whose scaler keeps gradients from vanishing; bf16 does not"
    fewest = scaling.workers if isinstance(scaling.workers, int) else scaling.workers[0]
    for key in ("param_dtype", "reduce_dtype", "cpu_offload"):
        if fewest == 1 and getattr(strategy, key):
            yield f"strategy.{key}", "needs at least 2 workers: one worker shards nothing and trains as ddp does"


def pipeline_fits(strategy: Strategy, scaling: ScalingConfig, train: TrainConfig, data: DataConfig) -> Found:
    """A pipeline says itself how many workers it takes, and runs layers, not the model."""
    if strategy.name != "pipeline":
        return
    if scaling.is_set("workers") and scaling.workers != strategy.workers:
        yield "scaling.workers", f"a pipeline takes stages x replicas = {strategy.workers} workers: leave this key out"
    if train.compile:
        yield "train.compile", "not with strategy pipeline, which runs the layers one by one: leave it out"
    if data.train.engine == "ray":
        yield "data.train.engine", "a pipeline reads directly, in its first and last stage: leave it out"


def rollback_has_checkpoints(checkpoint: CheckpointConfig, failure: FailureConfig) -> Found:
    """A step can only be rolled back to a checkpoint."""
    if failure.bad_step == "rollback" and checkpoint.every is None:
        yield "failure.bad_step", "rollback goes back to a checkpoint, and checkpoint.every is null"


def env_names_are_names(env: dict[str, str]) -> Found:
    """Variables that a process can have, and that are the job's to set."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"env.{name}", "not the name of a variable: letters, digits and _ are allowed, no digit first"
        elif name in _RANK_VARIABLES:
            yield f"env.{name}", "set for each worker by the runner; remove it"
        elif "\0" in value:
            yield f"env.{name}", "a variable cannot hold a NUL character"


CHECKS = (
    task_fits_data,
    eval_keeps_every_row,
    fit_has_columns,
    eval_has_data,
    metrics_exist,
    sweep_compares_a_metric,
    schedule_fits_run,
    one_worker,
    fsdp_fits,
    pipeline_fits,
    rollback_has_checkpoints,
    env_names_are_names,
)


def check_sections(sections: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`(key path, message)` of every check whose sections are all in `sections`."""
    found: list[tuple[str, str]] = []
    for check in CHECKS:
        needed = list(inspect.signature(check).parameters)
        if all(name in sections for name in needed):
            found += check(*(sections[name] for name in needed))
    return found
