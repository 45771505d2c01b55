"""A map-style torch Dataset by the batch law: one elastic sampler, one DataLoader over all epochs.

The order of an epoch is a full permutation seeded by `(seed, epoch)`, one within windows (`shuffle: {window: n}`), or what a
custom sampler yields under that seed. World
size does not enter: global batch `k` is rows `[k*B, (k+1)*B)` of that order, and each rank loads its contiguous share. Random
augmentation in `__getitem__` is seeded by `(seed, epoch, row)`, so a row looks the same at any worker count and after a resume.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from raydist.batching import rows_in_step, share, steps_in
from raydist.data.plan import Plan, round_window
from raydist.data.source import EvalData, Position, StepData
from raydist.errors import ConfigError, DataError
from raydist.randomness import derive, seed_all, seed_host
from raydist.task import build, resolve

if TYPE_CHECKING:
    from raydist.config import DatasetConfig, Loader

Key = tuple[int, int]
"""(epoch, row): what the sampler asks the dataset for."""


def build_dataset(config: DatasetConfig, key: str) -> Dataset[Any]:
    """The Dataset a job file names. Raises ConfigError when it is not map-style."""
    dataset = build(config.target or "", config.args, key)
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"{key}: {config.target} made a {type(dataset).__name__}, which has no length and index; exactly-once training "
            "needs a map-style Dataset (__len__ and __getitem__)"
        )
    return dataset  # type: ignore[no-any-return]


class Rows(Dataset[Any]):
    """The user's dataset asked by (epoch, row), with the generators seeded for each row. Errors name the row."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.plain = isinstance(dataset, TensorDataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        epoch, row = key
        if not self.plain:
            seed_host(derive(self.seed, "row", epoch, row))
        try:
            return self.dataset[row]
        except Exception as error:
            raise DataError(f"row {row} of {type(self.dataset).__name__}: {type(error).__name__}: {error}") from error


class _Collate:
    """Collate rows to a batch; rows that do not fit together are an error that names them."""

    def __init__(self, function: Callable[[list[Any]], Any] | None) -> None:
        self.function = function or default_collate

    def __call__(self, rows: list[Any]) -> Any:
        try:
            return self.function(rows)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"these {len(rows)} rows do not make a batch ({type(error).__name__}: {error}); give them one shape and type, "
                "or set data.train.collate"
            ) from error


class TorchSource:
    """Training rows of a map-style Dataset, for one rank. Implements `TrainSource`."""

    def __init__(
        self, dataset: Any, config: DatasetConfig, global_size: int, seed: int, rank: int, world_size: int, pin: bool = False
    ) -> None:
        self.rows = Rows(dataset, seed)
        self.config, self.global_size, self.seed = config, global_size, seed
        self.rank, self.world_size, self.pin = rank, world_size, pin
        self.sampler = None if config.sampler is None else build_sampler(config, dataset)
        count = len(self.rows) if self.sampler is None else len(self.order(0))
        self._steps = steps_in(count, global_size, config.drop_last)
        self.steps_per_epoch: int | None = self._steps
        self.rows_per_epoch: int | None = min(count, self._steps * global_size)
        self._epoch_rows = count
        self._known: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The rows of an epoch, in training order; the same on every rank."""
        if self.sampler is not None:
            seed_all(self.seed, "sampler", epoch)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
                generator.manual_seed(derive(self.seed, "sampler", epoch))
            return np.fromiter((self._index(i) for i in self.sampler), dtype=np.int64)
        window = getattr(self.config.shuffle, "window", "auto")
        if isinstance(window, int):
            plan = Plan(np.array([len(self.rows)]), self.global_size, self.seed, round_window(window, self.global_size))
            return plan.select(epoch, 0, len(self.rows)).order
        if self.config.shuffle:
            return np.random.default_rng(derive(self.seed, "epoch", epoch)).permutation(len(self.rows))
        return np.arange(len(self.rows))

    def _index(self, index: Any) -> int:
        if isinstance(index, (list, tuple)):
            raise ConfigError(
                "data.train.sampler: yields batches; give a sampler of single rows, batch.global_size makes the batches"
            )
        row = int(index)
        if not 0 <= row < len(self.rows):
            raise DataError(f"data.train.sampler: yields row {row}, and the dataset has {len(self.rows)}")
        return row

    def _ordered(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._known:  # the loader reads ahead into the next epoch while this one is still trained
            self._known = {e: o for e, o in self._known.items() if e >= epoch - 1}
            self._known[epoch] = self.order(epoch)
        order = self._known[epoch]
        if len(order) != self._epoch_rows:
            raise DataError(
                f"data.train.sampler: gave {self._epoch_rows} rows in epoch 0 and {len(order)} in epoch {epoch}; "
                "every epoch needs as many"
            )
        return order

    def plan(self, start: Position, stop_epoch: int | None) -> Iterator[tuple[int, int, int, list[Key]]]:
        """(epoch, index, global rows, this rank's keys) of each step; a rank without a share borrows the first row."""
        epoch, index = start.epoch, start.index
        while stop_epoch is None or epoch < stop_epoch:
            order = self._ordered(epoch)
            for k in range(index, self._steps):
                count = rows_in_step(self._epoch_rows, self.global_size, k)
                first, last = share(count, self.rank, self.world_size)
                rows = (
                    order[k * self.global_size + first : k * self.global_size + last]
                    if last > first
                    else order[k * self.global_size :][:1]
                )
                yield epoch, k, count, [(epoch, int(row)) for row in rows]
            epoch, index = epoch + 1, 0

    def steps(self, start: Position, stop_epoch: int | None = None) -> Iterator[StepData]:
        batches = _KeyBatches(lambda: (keys for _, _, _, keys in self.plan(start, stop_epoch)))
        loader = make_loader(self.rows, batches, self.config, self.pin)
        plan = self.plan(start, stop_epoch)
        iterator = _batches(loader)
        for epoch, index, count, keys in plan:
            asked = time.perf_counter()
            batch = next(iterator)
            wait = time.perf_counter() - asked
            first, last = share(count, self.rank, self.world_size)
            check_rows(batch, len(keys), "data.train")
            yield StepData(epoch, index, index == self._steps - 1, count, last - first, batch, wait)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "dataset", "target": self.config.target, "rows": len(self.rows), "rows_per_epoch": self.rows_per_epoch}

    def name_rows(self, epoch: int, index: int, start: int, stop: int) -> str:
        at = index * self.global_size
        rows = self._ordered(epoch)[at + start : at + stop]
        named = ", ".join(str(row) for row in rows[:8]) + (" …" if len(rows) > 8 else "")
        return f"row{'s' if len(rows) != 1 else ''} {named} of {self.config.target}"

    def close(self) -> None:
        self._known = {}


class TorchEval:
    """Evaluation rows of a map-style Dataset: this rank's contiguous share, in order. Implements `EvalSource`."""

    def __init__(
        self, dataset: Any, config: DatasetConfig, size: int, seed: int, rank: int, world_size: int, pin: bool = False
    ) -> None:
        self.dataset, self.config, self.size, self.pin = Rows(dataset, seed), config, size, pin
        self.rows: int | None = len(dataset)
        self.start, self.stop = share(len(dataset), rank, world_size)

    def batches(self) -> Iterator[EvalData]:
        chunks = [
            [(-1, row) for row in range(at, min(at + self.size, self.stop))] for at in range(self.start, self.stop, self.size)
        ]
        loader = make_loader(self.dataset, _KeyBatches(lambda: iter(chunks)), self.config, self.pin)
        for chunk, batch in zip(chunks, _batches(loader), strict=True):
            check_rows(batch, len(chunk), "data.eval")
            yield EvalData(batch, len(chunk))

    def close(self) -> None:
        pass


class _KeyBatches(Sampler[list[Key]]):
    """A batch sampler over keys, as DataLoader takes it."""

    def __init__(self, make: Callable[[], Iterator[Sequence[Key]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[Key]]:
        for keys in self.make():
            yield list(keys)


def make_loader(rows: Rows, batches: _KeyBatches, config: DatasetConfig, pin: bool) -> DataLoader[Any]:
    """torch's DataLoader with the job file's options."""
    loader: Loader = config.loader
    options: dict[str, Any] = {}
    if loader.num_workers:
        options["persistent_workers"] = loader.persistent_workers
        options["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(
        rows,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=_Collate(resolve(config.collate, "data.collate") if config.collate else None),
        pin_memory=(pin if loader.pin_memory == "auto" else loader.pin_memory and torch.cuda.is_available()),
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches; an error of a loader process comes back as its own words, without that process's traceback."""
    try:
        yield from loader
    except DataError as error:
        raise DataError(str(error).strip().rpartition(f"{DataError.__module__}.DataError: ")[2]) from error


def build_sampler(config: DatasetConfig, dataset: Any) -> Sampler[Any]:
    """The custom sampler; it gets the dataset as its first argument when it has a parameter for it.

    It must be global: every rank runs it under the same seed, and raydist shards what it yields.
    """
    assert config.sampler is not None
    args = dict(config.sampler.args)
    factory = resolve(config.sampler.target, "data.train.sampler")
    if isinstance(factory, type) and issubclass(factory, DistributedSampler):
        raise ConfigError(
            "data.train.sampler: raydist shards every sampler over the workers itself; use shuffle: true instead of "
            "DistributedSampler"
        )
    parameters = list(inspect.signature(factory).parameters)
    if parameters and parameters[0] in ("data_source", "dataset", "data") and parameters[0] not in args:
        args[parameters[0]] = dataset
    sampler = build(config.sampler.target, args, "data.train.sampler")
    if isinstance(sampler, (BatchSampler, DistributedSampler)):
        raise ConfigError(
            f"data.train.sampler: a {type(sampler).__name__} makes batches or shards; raydist does both, give a sampler of rows"
        )
    if not hasattr(sampler, "__iter__"):
        raise ConfigError(f"data.train.sampler: {config.sampler.target} made a {type(sampler).__name__}, which yields no rows")
    return sampler  # type: ignore[no-any-return]


def check_rows(batch: Any, wanted: int, key: str) -> None:
    """Raise DataError when a part of a collated batch does not hold `wanted` rows: the weights would be wrong."""
    for found in _row_counts(batch):
        if found != wanted:
            what = "a single value" if found is None else f"a batch of {found}"
            raise DataError(
                f"{key}: collate gave {what} from {wanted} rows; keep one entry a row on the first dimension of every part, "
                "or the weights of the batch law would be wrong"
            )


def _row_counts(batch: Any) -> Iterator[int | None]:
    """Rows of each part of a batch, as `slice_rows` would cut it; None for a tensor without dimensions."""
    if isinstance(batch, torch.Tensor):
        yield batch.shape[0] if batch.dim() else None
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _row_counts(value)
    elif isinstance(batch, tuple) or (
        isinstance(batch, list) and batch and isinstance(batch[0], (torch.Tensor, Mapping, tuple, list))
    ):
        for value in batch:
            yield from _row_counts(value)
    elif hasattr(batch, "__getitem__") and hasattr(batch, "__len__"):
        yield len(batch)
