"""The small job that the faults happen to, the same run undisturbed, and what a run's folder says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from raydist.checkpoint import load_latest
from raydist.config import parse_config
from raydist.rundir import RunDir
from raydist.runners.ray_train import train_ray
from raydist.screen import Screen
from raydist.state import TrainState
from tests.chaos.cases import EVAL_EVERY, SAVE_EVERY, Case
from tests.chaos.task import LR

ROWS, SIZE = 64, 8


def job(folder: Path, name: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The common job: 64 rows in 8 global batches, two epochs, two workers of two micro-batches."""
    content: dict[str, Any] = {
        "name": name,
        "task": {"target": "tests.chaos.task:Task", "args": {"rows": ROWS, "dropout": 0.1}},
        "data": {
            "train": {"target": "tests.chaos.task:Rows", "args": {"rows": ROWS, "delay": 0.003}, "shuffle": True},
            "eval": {"target": "tests.chaos.task:Rows", "args": {"rows": 8}},
        },
        "batch": {"global_size": SIZE, "micro_size": 2},
        "train": {"epochs": 2, "log_every": {"steps": 1}, "eval_every": {"steps": EVAL_EVERY}, "ema": {"decay": 0.5}},
        "optimizer": {"target": "tests.chaos.task:Momentum", "lr": LR},
        "checkpoint": {"every": {"steps": SAVE_EVERY}, "keep": 10},
        "scaling": {"workers": 2},
        "storage": str(folder),
    }
    for key, value in (settings or {}).items():
        *path, last = key.split(".")
        at = content
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return content


class Undisturbed:
    """The runs that nothing happened to, each trained once: with dropout on two workers, without on one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, dict[str, tuple[TrainState, list[dict[str, Any]]]]()

    def __call__(self, case: Case) -> tuple[TrainState, list[dict[str, Any]]]:
        """State and metrics of the run that `case` is compared with."""
        settings = {key: value for key, value in case.settings.items() if key == "task.args.dropout"}
        name = "undisturbed" + "".join(f"-{value}" for value in settings.values())
        if name not in self._known:
            train_ray(parse_config(job(self.folder, name, settings), self.folder), screen=unseen())
            self._known[name] = state_of(self.folder / name), lines_of(self.folder / name)
        return self._known[name]


def unseen() -> Screen:
    """A screen that nobody looks at."""
    return Screen(stream=io.StringIO())


def state_of(run: Path) -> TrainState:
    warnings: list[str] = []
    found = load_latest(str(run / "checkpoints"), warnings.append)
    assert found is not None and not warnings, warnings
    return found[0]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine say."""
    names = ("step", "epoch", "train_loss", "eval_loss", "lr", "grad_norm", "skipped")
    return [{name: line[name] for name in names if name in line} for line in RunDir(str(run)).read_metrics()]
