"""What is trained: a model, its loss and metrics, and how a batch maps to inputs and targets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from raydist.errors import ConfigError, DataError, TrainError

if TYPE_CHECKING:
    from torchmetrics import Metric

    from raydist.config import TaskConfig


@runtime_checkable
class Task(Protocol):
    """What a custom task offers; `task: {target: ./my_task.py:MyTask, args: {}}`.

    Optional methods: `weight(batch) -> float` (what the batch counts in the mean: tokens instead of rows),
    `metrics() -> dict[str, torchmetrics.Metric]` and, with it, `predict(model, batch) -> (predictions, targets)`.
    """

    def build_model(self) -> nn.Module:
        """A fresh model; seeded alike on every rank before the call."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss over the batch, a scalar that needs a gradient."""
        ...


# -- import paths ------------------------------------------------------------------------------------------------


def resolve(target: str, key: str) -> Any:
    """The object an import path names: `pkg.mod:Name`, `pkg.mod.Name`, or `file.py:Name`. `key` is for the error."""
    module_name, colon, attribute = target.rpartition(":") if ":" in target else target.rpartition(".")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{key}: {target!r} is no import path; write pkg.module:Name or ./file.py:Name")
    module = _load_file(Path(module_name), key) if module_name.endswith(".py") else _load_module(module_name, target, key)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: {module_name} has no {attribute!r}{_nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _nearest(name: str, options: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [o for o in options if not o.startswith("_")], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _load_module(name: str, target: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{key}: no module {error.name!r} for {target!r}; is it installed, or meant as ./file.py:Name?"
            ) from error
        raise ConfigError(f"{key}: importing {name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {path}; a relative path starts at the job file's folder")
    path = path.resolve()
    name = f"raydist_file_{path.stem}_{sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    if folder not in sys.path:  # a job's file may import its neighbours, as a script does
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ConfigError(f"{key}: importing {path} failed: {type(error).__name__}: {error}") from error
        raise
    return module


def build(target: str, args: Mapping[str, Any], key: str) -> Any:
    """Call what `target` names with keyword arguments. ConfigError naming `key` for args that do not fit or are refused."""
    factory = resolve(target, key)
    if not callable(factory):
        raise ConfigError(f"{key}: {target} is a {type(factory).__name__}, not something to call with args")
    check_args(factory, args, target, key)
    try:
        return factory(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {target} refused its args: {type(error).__name__}: {error}") from error


def check_args(factory: Callable[..., Any], args: Mapping[str, Any], target: str, key: str) -> None:
    """Raise ConfigError when keyword arguments do not fit a callable's signature."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(f"{key}: {target} does not take these args: {error}. It takes {signature}") from error


# -- tasks ---------------------------------------------------------------------------------------------------------


def build_task(config: TaskConfig) -> Task:
    """The task a job file describes. Raises ConfigError when a path does not resolve or a custom task lacks a method."""
    if config.target is None:
        return ColumnTask(config)
    task = build(config.target, config.args, "task")
    for method in ("build_model", "loss"):
        if not callable(getattr(task, method, None)):
            raise ConfigError(
                f"task: {config.target} has no method {method}(); a task needs build_model() and loss(model, batch)"
            )
    if callable(getattr(task, "metrics", None)) and not callable(getattr(task, "predict", None)):
        raise ConfigError(
            f"task: {config.target} has metrics() but no predict(model, batch) -> (predictions, targets) to feed them"
        )
    return task  # type: ignore[no-any-return]


class ColumnTask:
    """A task from parts: model, loss function and metrics by import path, inputs and targets by column name.

    Each entry of `inputs` is one positional argument of the model; a list of columns is stacked to (rows, columns). A float
    column of scalars arrives as (rows, 1), integers as (rows,); float64 is narrowed to float32. A batch that is a pair
    (from a torch Dataset) needs no names: the last item is the target. Targets with the predictions' shape but for dimensions
    of size 1 take that shape; integers among them are floats for the loss (0/1 labels, counts) and stay integers for metrics.
    """

    def __init__(self, config: TaskConfig) -> None:
        if config.model is None or config.loss is None:
            raise ConfigError("task: needs model and loss, or target for a custom task")
        self.config = config
        loss = resolve(config.loss.target, "task.loss")
        if isinstance(loss, type):
            loss = build(config.loss.target, config.loss.args, "task.loss")
            self.loss_args: dict[str, Any] = {}
        else:
            self.loss_args = dict(config.loss.args)
        if not callable(loss):
            raise ConfigError(f"task.loss: {config.loss.target} is not callable")
        self.loss_fn: Callable[..., Any] = loss
        self.metrics()  # so that a wrong one is found before training, not at the first evaluation
        check_args(resolve(config.model.target, "task.model"), config.model.args, config.model.target, "task.model")

    def build_model(self) -> nn.Module:
        assert self.config.model is not None
        model = build(self.config.model.target, self.config.model.args, "task.model")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"task.model: {self.config.model.target} made a {type(model).__name__}, not a torch.nn.Module")
        return model

    def metrics(self) -> dict[str, Metric]:
        made = {name: build(m.target, m.args, f"task.metrics.{name}") for name, m in self.config.metrics.items()}
        for name, metric in made.items():
            if not all(hasattr(metric, method) for method in ("update", "compute", "reset")):
                raise ConfigError(
                    f"task.metrics.{name}: {self.config.metrics[name].target} made a {type(metric).__name__}, "
                    "not a torchmetrics.Metric"
                )
        return made

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss over the batch."""
        loss: torch.Tensor = self.loss_of(*self.predict(model, batch))
        return loss

    def loss_of(self, predictions: Any, targets: Any) -> Any:
        """The loss function on what `predict` gave; checked by the caller."""
        if isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor) and targets.shape == predictions.shape:
            targets = targets if targets.is_floating_point() else targets.float()
        return self.loss_fn(predictions, targets, **self.loss_args)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        inputs, targets = self.split(batch)
        predictions = model(*inputs)
        return predictions, _align(predictions, targets)

    def split(self, batch: Any) -> tuple[list[Any], Any]:
        """Model arguments and target of a batch. Raises DataError for a column that is missing or not numeric."""
        names, targets = self.config.inputs, self.config.targets
        if isinstance(batch, Mapping):
            if names is None or targets is None:
                raise DataError(
                    f"task: the data has columns {', '.join(map(str, batch))}; say which are task.inputs and task.targets"
                )
            inputs = [self._input(batch, name) for name in names]
            if isinstance(targets, str):
                return inputs, _target(_column(batch, targets, "task.targets"))
            return inputs, _stacked([_target(_column(batch, n, "task.targets")) for n in targets], targets, "task.targets")
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            return [_narrow(x) for x in batch[:-1]], _target(batch[-1])
        raise DataError(
            f"task: a batch is a {type(batch).__name__}; the data must give a dict of columns or a tuple (inputs…, target), "
            "or use a custom task"
        )

    def _input(self, batch: Mapping[str, Any], name: str | list[str]) -> torch.Tensor:
        if isinstance(name, str):
            value: torch.Tensor = _narrow(_column(batch, name, "task.inputs"))
            return value.unsqueeze(1) if value.dim() == 1 and value.is_floating_point() else value
        return _stacked([_column(batch, n, "task.inputs").float() for n in name], name, "task.inputs")


def _column(batch: Mapping[str, Any], name: str, key: str) -> torch.Tensor:
    if name not in batch:
        raise DataError(f"{key}: no column {name!r}{_nearest(name, list(batch))}; the data has {', '.join(map(str, batch))}")
    value = batch[name]
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"{key}: column {name!r} is text or mixed ({type(value).__name__}), not numbers; index it with data.fit.index, "
            "or turn it into numbers in data.train.transforms"
        )
    return value


def _stacked(parts: Sequence[torch.Tensor], names: Sequence[str], key: str) -> torch.Tensor:
    for name, part in zip(names, parts, strict=True):
        if part.numel() != part.shape[0]:
            raise DataError(
                f"{key}: column {name!r} has shape {list(part.shape)}; only columns of single numbers can be stacked"
            )
    return torch.stack([part.reshape(-1) for part in parts], dim=1)


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


def _target(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
            return value.long()
        return _narrow(value)
    return value


def _align(predictions: Any, targets: Any) -> Any:
    """A target takes the predictions' shape when only dimensions of size 1 differ, so that no loss broadcasts it."""
    if not isinstance(predictions, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return targets
    targets = targets.to(predictions.device)
    if targets.shape != predictions.shape and _squeezed(targets) == _squeezed(predictions):
        return targets.reshape(predictions.shape)
    return targets


def _squeezed(tensor: torch.Tensor) -> list[int]:
    return [n for n in tensor.shape if n != 1]


# -- batches as trees of tensors -----------------------------------------------------------------------------------


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows `[start, stop)` of a batch: tensors and lists are cut on their first dimension, mappings and tuples item by item."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {key: slice_rows(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, tuple):
        items = [slice_rows(value, start, stop) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        if batch and isinstance(batch[0], (torch.Tensor, Mapping, tuple, list)):
            return [slice_rows(value, start, stop) for value in batch]
        return batch[start:stop]
    if hasattr(batch, "__getitem__") and hasattr(batch, "__len__"):
        return batch[start:stop]
    raise DataError(
        f"a batch holds a {type(batch).__name__}, which cannot be cut into rows; give it __len__ and __getitem__ "
        "(a slice of rows), or let the data or its collate give tensors, lists, tuples and dicts"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device` (asynchronous from pinned memory)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple):
        items = [to_device(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    return batch.to(device) if hasattr(batch, "to") else batch


def checked_loss(loss: Any, step: int) -> torch.Tensor:
    """The loss, if it is one number that needs a gradient; TrainError otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise TrainError(
            f"step {step}: the loss is a {type(loss).__name__}; it must be a scalar tensor computed from the model"
        )
    if loss.numel() != 1:
        raise TrainError(
            f"step {step}: the loss has shape {list(loss.shape)}, not one number; "
            "take its mean (reduction='mean') over the batch"
        )
    if not loss.is_floating_point():
        raise TrainError(f"step {step}: the loss is {loss.dtype}; it must be a floating-point number")
    return loss.reshape(())
