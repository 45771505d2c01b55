"""The job's own functions on batches of columns: `transforms: [{target: pkg.mod:name, args: {...}}]`.

A transform takes a dict of numpy arrays, one a column, first dimension the rows, and returns such a dict. A class is built
once in each process with `args` and then called; a function gets `args` with each call. It is called with any number of rows:
a row's result must not depend on the other rows. One that takes an argument `rng` is random: it is called with exactly one
global batch and a `numpy.random.Generator` that depends on `(seed, epoch, global batch)` alone, whatever the world size.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raydist.data.columns import Columns, rows_of
from raydist.errors import DataError, RaydistError

if TYPE_CHECKING:
    from raydist.config import Target


class Transforms:
    """The transforms of a data set, built where they are first used; picklable before that."""

    def __init__(self, targets: Sequence[Target], seed: int) -> None:
        self.targets = list(targets)
        self.seed = seed
        self._built: list[tuple[str, Callable[..., Any], dict[str, Any], bool]] | None = None

    def __bool__(self) -> bool:
        return bool(self.targets)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    @property
    def random(self) -> bool:
        """Whether any of them takes `rng`."""
        return any(takes for *_, takes in self._functions())

    def __call__(self, columns: Columns, rng_key: tuple[int, int] | None = None, same_rows: bool = True) -> Columns:
        """Apply all of them. `rng_key` is (epoch, global batch), needed when one is random.

        DataError: not a dict of equally long arrays, or (`same_rows`) another number of rows.
        """
        for number, (name, function, args, takes_rng) in enumerate(self._functions()):
            rows = rows_of(columns)
            if takes_rng:
                key = (2, number, *(rng_key or (0, 0)))
                args = {**args, "rng": np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))}
            columns = _checked(name, _apply(name, function, columns, args), rows if same_rows else None)
        return columns

    def _functions(self) -> list[tuple[str, Callable[..., Any], dict[str, Any], bool]]:
        if self._built is None:
            self._built = [self._build(target, f"data.transforms[{i}]") for i, target in enumerate(self.targets)]
        return self._built

    @staticmethod
    def _build(target: Target, key: str) -> tuple[str, Callable[..., Any], dict[str, Any], bool]:
        from raydist.task import build, check_args, resolve  # imports torch, which tasks without transforms do not need

        found = resolve(target.target, key)
        if isinstance(found, type):
            built = build(target.target, target.args, key)
            return target.target, built, {}, _takes_rng(built)
        takes = _takes_rng(found)
        check_args(found, {**_first_argument(found), **target.args, **({"rng": None} if takes else {})}, target.target, key)
        return target.target, found, dict(target.args), takes


def _apply(name: str, function: Callable[..., Any], columns: Columns, args: dict[str, Any]) -> Any:
    try:
        return function(columns, **args)
    except RaydistError:
        raise
    except Exception as error:  # the user's code: any error of it is one of the data
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"transform {name} failed: {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        ) from error


def _takes_rng(function: Callable[..., Any]) -> bool:
    return "rng" in inspect.signature(function).parameters


def _first_argument(function: Callable[..., Any]) -> dict[str, Any]:
    names = list(inspect.signature(function).parameters)
    return {names[0]: None} if names else {}


def _checked(name: str, columns: Any, rows: int | None) -> Columns:
    if not isinstance(columns, dict) or not columns:
        raise DataError(f"transform {name} returned a {type(columns).__name__}; it must return a dict of arrays, one a column")
    arrays = {key: _as_array(value) for key, value in columns.items()}
    lengths = {key: len(value) for key, value in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"transform {name} returned columns of different lengths: {lengths}")
    found = rows_of(arrays)
    if rows is not None and found != rows:
        raise DataError(
            f"transform {name} made {found} rows of {rows}. A transform that changes the number of rows is declared with "
            "`rows: changes`"
        )
    return arrays


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and any(isinstance(item, str | bytes) for item in value[:1]):
        out = np.empty(len(value), dtype=object)
        out[:] = value
        return out
    return np.asarray(value)
