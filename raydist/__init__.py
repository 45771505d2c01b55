"""raydist: train a PyTorch model from one job file, in one process, under torchrun, or on a Ray cluster.

The public names below are imported when they are first used, so `import raydist` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.api import Result, SweepResult, SweepTrial, load_checkpoint, sweep, train
    from raydist.config import JobConfig, load_config
    from raydist.control import StepResult
    from raydist.errors import CheckpointError, ConfigError, DataError, Interrupted, RaydistError, TrainError
    from raydist.loop import fit
    from raydist.task import Task
    from raydist.world import World

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Interrupted",
    "JobConfig",
    "RaydistError",
    "Result",
    "StepResult",
    "SweepResult",
    "SweepTrial",
    "Task",
    "TrainError",
    "World",
    "fit",
    "load_checkpoint",
    "load_config",
    "sweep",
    "train",
]

_HOME = {
    "JobConfig": "raydist.config",
    "Result": "raydist.api",
    "SweepResult": "raydist.api",
    "SweepTrial": "raydist.api",
    "sweep": "raydist.api",
    "load_checkpoint": "raydist.api",
    "train": "raydist.api",
    "load_config": "raydist.config",
    "StepResult": "raydist.control",
    "fit": "raydist.loop",
    "Task": "raydist.task",
    "World": "raydist.world",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'raydist' has no attribute {name!r}; its public names are: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME.get(name, "raydist.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
