"""One line about each key whose name does not say it, for the JSON schema (so for editors) and docs/job-file.md."""

from __future__ import annotations

HELP: dict[str, dict[str, str]] = {
    "JobConfig": {
        "name": "the run's folder in `storage`",
        "seed": "of the weights, the order of rows and all other randomness",
        "clip_grad_norm": "the most that the norm of all gradients may be; null: no clipping",
        "loggers": "where else the numbers go: tensorboard, mlflow, wandb, prometheus",
        "profile": "steps to record with torch's profiler",
        "env": "variables of the workers; `${NAME}` is taken from the environment",
        "storage": "folder or URI in which runs get their folders",
    },
    "Target": {"target": "`package.module:Name` or `./file.py:Name`", "args": "its keyword arguments"},
    "TaskConfig": {
        "model": "the torch module",
        "loss": "called with the model's output and the targets",
        "metrics": "torchmetrics by name; each is reported as `eval_<name>`",
        "inputs": "columns that the model gets, in order; a list within the list is stacked",
        "targets": "the column of the targets",
        "target": "a task class of your own, in place of model and loss",
        "args": "arguments of `target`",
    },
    "DataConfig": {
        "fit": "what one pass over the training set finds",
        "changed": "when a resumed run's data is not what its checkpoint saw",
    },
    "DatasetConfig": {
        "path": "a file, folder, pattern or URI, or a list of them",
        "target": "a torch Dataset to import, in place of `path`",
        "args": "arguments of `target`",
        "shuffle": "true, or `{window: ROWS}`",
        "drop_last": "leave out a short last batch",
        "columns": "read these only",
        "transforms": "functions of a batch of columns, in turn",
        "rows": "`changes`: a transform gives other numbers of rows than it gets",
        "nulls": "what an empty value leads to",
        "fill_value": "goes with `nulls: fill`",
        "loader": "DataLoader settings, for `target`",
        "sampler": "a torch Sampler, for `target`",
        "collate": "a collate function, for `target`",
        "engine": "what reads the files: this process or Ray Data",
    },
    "FitConfig": {"index": "columns whose values become whole numbers", "normalize": "columns that are scaled"},
    "BatchConfig": {
        "global_size": "rows of one optimizer step, over all workers",
        "micro_size": "rows of one forward/backward on one worker; auto: halved when memory runs out",
        "eval_size": "rows of an evaluation batch",
    },
    "TrainConfig": {
        "epochs": "passes over the training set",
        "max_steps": "optimizer steps; with both, the first reached ends the run",
        "eval_every": "how often `data.eval` is scored",
        "log_every": "how often a line goes to metrics.jsonl",
        "ema": "a moving average of the weights",
        "compile": "torch.compile: true, or a map of its settings",
        "deterministic": "torch's deterministic algorithms",
    },
    "EarlyStop": {"patience": "evaluations without an improvement", "min_delta": "what counts as an improvement"},
    "OptimizerConfig": {
        "target": "an optimizer to import, in place of `name`",
        "lr": "learning rate",
        "args": "arguments of `target`",
        "fused": "torch's fused implementation",
    },
    "ScheduleConfig": {
        "target": "a schedule to import, in place of `name`",
        "warmup_steps": "steps in which the rate rises to `optimizer.lr`",
        "total_steps": "linear, cosine: where they end; null: the run's end",
        "min_lr": "linear, cosine, plateau: the lowest rate",
        "step_size": "step: steps from one cut to the next",
        "gamma": "step: the factor of a cut",
        "metric": "plateau: what must improve",
        "patience": "plateau: evaluations without an improvement",
        "factor": "plateau: the factor of a cut",
        "args": "arguments of `target`",
    },
    "ScalingConfig": {
        "workers": "how many, or `[min, max]`: elastic",
        "resources": "other Ray resources of a worker",
        "backend": "of the process group",
    },
    "CheckpointConfig": {
        "every": "how often; null: only at the end",
        "memory": "on Ray: how often a copy goes to another node's memory",
        "keep": "the newest ones that stay",
        "best": "also keep the best one",
        "async": "write beside the training",
    },
    "FailureConfig": {
        "max_restarts": "of a run whose worker or node died",
        "bad_step": "when a loss or gradient is not finite",
        "max_bad_steps": "skip, rollback: the most of them",
        "hang_timeout": "seconds without progress until the run restarts; null: never",
        "grace": "seconds for a checkpoint when the run is stopped",
    },
}


def help_of(section: str, key: str) -> str:
    """What `key` of the section class is about, or nothing where its name says it."""
    return HELP.get(section, {}).get(key, "")
