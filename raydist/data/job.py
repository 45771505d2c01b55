"""A job's data as every runner opens it: which columns, what was fitted, and what a checkpoint must remember of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raydist.data.source import EvalSource, TrainSource
from raydist.errors import DataError, RaydistError
from raydist.world import World

if TYPE_CHECKING:
    from raydist.config import JobConfig
    from raydist.data.fit import Fitted


@dataclass
class Sources:
    """Open data of one rank. `state` (fingerprint and fitted statistics, plain JSON) is kept in every checkpoint."""

    train: TrainSource
    evaluation: EvalSource | None
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Stop readers and drop what they hold."""
        self.train.close()
        if self.evaluation is not None:
            self.evaluation.close()


def open_sources(config: JobConfig, world: World, stored: dict[str, Any] | None, train: TrainSource | None = None) -> Sources:
    """The job's data for this rank. Every rank must call it.

    `stored` is what the checkpoint says of the data; data that changed since is refused, or noted with `data.changed: accept`.
    `train` is a source that the runner has opened already (a Ray Data stream).
    """
    fitted = fitted_for(config, world, stored)
    columns = needed_columns(config)
    source = train or open_training(config, world, columns, fitted)
    print_ = source.fingerprint()
    notes = list(getattr(source, "notes", []))
    if stored and stored.get("fingerprint"):
        notes += check_same_data(stored["fingerprint"], print_, config.data.changed)
    state = {"fingerprint": print_, "fitted": None if fitted is None else fitted.to_json()}
    return Sources(source, open_evaluation(config, world, columns, fitted), state, notes)


def open_training(config: JobConfig, world: World, columns: list[str] | None, fitted: Fitted | None) -> TrainSource:
    """This rank's training data, read without Ray."""
    data, size = config.data.train, config.batch.global_size
    if data.target is not None:
        from raydist.data.torch_data import TorchSource, build_dataset

        pin = world.device.type == "cuda"
        return TorchSource(build_dataset(data, "data.train"), data, size, config.seed, world.rank, world.world_size, pin)
    from raydist.data.opening import open_train

    return open_train(
        data, global_size=size, seed=config.seed, rank=world.rank, world_size=world.world_size, columns=columns, fitted=fitted
    )


def open_evaluation(config: JobConfig, world: World, columns: list[str] | None, fitted: Fitted | None) -> EvalSource | None:
    """This rank's part of the evaluation data; None when the job has none."""
    data = config.data.eval
    if data is None:
        return None
    size = config.batch.eval_size or min(config.batch.global_size, 1024)
    if data.target is not None:
        from raydist.data.torch_data import TorchEval, build_dataset

        pin = world.device.type == "cuda"
        return TorchEval(build_dataset(data, "data.eval"), data, size, config.seed, world.rank, world.world_size, pin)
    from raydist.data.opening import open_eval

    return open_eval(
        data, batch_size=size, seed=config.seed, rank=world.rank, world_size=world.world_size, columns=columns, fitted=fitted
    )


def needed_columns(config: JobConfig) -> list[str] | None:
    """The columns a task from parts reads; None (all) for a custom task."""
    task = config.task
    if task.inputs is None:
        return None
    wanted: list[str] = []
    for entry in [*task.inputs, *([task.targets] if isinstance(task.targets, str) else task.targets or [])]:
        wanted += [entry] if isinstance(entry, str) else entry
    return list(dict.fromkeys(wanted))


def fitted_for(config: JobConfig, world: World, stored: dict[str, Any] | None) -> Fitted | None:
    """What `data.fit` learned: from the checkpoint, or by one pass of rank 0 over the training set. Every rank must call it."""
    if config.data.fit is None:
        return None
    from raydist.data.fit import Fitted, fit

    if stored and stored.get("fitted"):
        return Fitted.from_json(stored["fitted"])
    mine: tuple[Any, str | None] = (None, None)
    if world.is_main:
        try:
            mine = (fit(config.data.train, config.data.fit).to_json(), None)
        except RaydistError as error:
            mine = (None, str(error))
    found, problem = world.broadcast(mine)
    if problem is not None:
        raise DataError(problem)
    return Fitted.from_json(found)


def check_same_data(old: dict[str, Any], new: dict[str, Any], changed: str) -> list[str]:
    """Compare fingerprints. DataError naming what differs, unless `changed` is "accept": then the same words as a note."""
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not differing:
        return []
    words = "; ".join(_difference(key, old.get(key), new.get(key)) for key in differing)
    if changed == "accept":
        return [f"the data changed since the checkpoint ({words}); going on with it, as data.changed: accept asks"]
    raise DataError(
        f"the data changed since the checkpoint: {words}. The rows left of this epoch are not the ones the run would have seen."
        " Restore the data, start a new run, or set data.changed: accept"
    )


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        before, after = (
            {str(entry[0]) if isinstance(entry, list) else str(entry): entry for entry in side} for side in (old, new)
        )
        gone = [name for name in before if name not in after]
        added = [name for name in after if name not in before]
        other = [name for name in after if name in before and before[name] != after[name]]
        parts = [
            f"{label} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for label, names in (("without", gone), ("new", added), ("changed", other))
            if names
        ]
        return f"{key}: {'; '.join(parts) or 'another order'}"
    if isinstance(old, dict) and isinstance(new, dict):
        inner = [f"{k} {old.get(k)} → {new.get(k)}" for k in {**old, **new} if old.get(k) != new.get(k)]
        return f"{key}: {', '.join(inner)}"
    return f"{key}: {old} → {new}"
