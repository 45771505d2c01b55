"""The `sweep:` section of a job file: what varies, what is compared, how long, and what stops a trial early.

`space` maps dotted keys of the job file to draws. It is read into a tree here (`read_space`); whether its keys exist is checked
against a whole job in `sweep.space`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raydist.config_parts import Mode
from raydist.config_types import Count, ImportPath, Part, Positive, Text, Whole, from_name

RANGES = ("uniform", "loguniform", "quniform", "randint")
LISTS = ("choice", "grid")
Key = tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """A number: `low` to `high`, for `quniform` a multiple of `step`; `randint` gives low … high - 1."""

    kind: str
    low: float
    high: float
    step: float | None = None


@dataclass(frozen=True)
class Options:
    """One of several; an option is a value, or a tree of settings below the key. `grid`: each of them in turn."""

    options: tuple[Any, ...]
    grid: bool


@dataclass(frozen=True)
class Tree:
    """Settings by key, each a Range, Options, or a fixed value. `whole`: they take the place of all that stands at the key."""

    nodes: tuple[tuple[Key, Any], ...]
    whole: bool = False


class SpaceError(ValueError):
    """What is wrong with a space, as `(key, message)`."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))
        self.problems = problems


def read_space(space: Mapping[str, Any]) -> Tree:
    """The tree that `sweep.space` means. Raises SpaceError with all problems."""
    problems: list[tuple[str, str]] = []
    tree = Tree(tuple(_nodes(space, (), problems, inside=False)))
    seen: set[Key] = set()
    for key, _ in tree.nodes:
        if any(key[: len(other)] == other or other[: len(key)] == key for other in seen):
            problems.append((".".join(key), "drawn twice, or drawn within something that is drawn as a whole"))
        seen.add(key)
    if problems:
        raise SpaceError(problems)
    return tree


def _nodes(space: Mapping[str, Any], prefix: Key, problems: list[tuple[str, str]], inside: bool) -> Iterator[tuple[Key, Any]]:
    for name, value in space.items():
        parts = tuple(str(name).split("."))
        key = (*prefix, *parts)
        if not all(parts):
            problems.append((".".join(key), "an empty key in the path"))
            continue
        draws = [word for word in (*RANGES, *LISTS) if isinstance(value, Mapping) and word in value]
        if isinstance(value, Mapping) and value and not draws:
            yield from _nodes(value, key, problems, inside)
            continue
        try:
            yield key, _draw(value, draws, inside, key, problems) if draws else value
        except ValueError as error:
            problems.append((".".join(key), str(error)))


def _draw(value: Mapping[str, Any], draws: list[str], inside: bool, key: Key, problems: list[tuple[str, str]]) -> Any:
    if len(value) != 1:
        raise ValueError(f"one of {', '.join((*RANGES, *LISTS))} alone is allowed, not {', '.join(map(str, value))}")
    kind, given = draws[0], value[draws[0]]
    if kind in LISTS:
        if not isinstance(given, list) or not given:
            raise ValueError(f"{kind} takes a non-empty list")
        if kind == "grid" and inside:
            raise ValueError("grid is for the top of the space; inside an option use choice")
        options = tuple(_option(option, key, problems) for option in given)
        if any(options.count(option) > 1 for option in options):
            raise ValueError(f"{kind} names an option twice")
        return Options(options, kind == "grid")
    return _range(kind, given)


def _option(option: Any, key: Key, problems: list[tuple[str, str]]) -> Any:
    if not isinstance(option, Mapping):
        return option
    return Tree(tuple(_nodes(option, (), problems, inside=True)), whole="target" in option)


def _range(kind: str, given: Any) -> Range:
    wanted = 3 if kind == "quniform" else 2
    numbers = [n for n in given if isinstance(n, int | float) and not isinstance(n, bool)] if isinstance(given, list) else []
    if not isinstance(given, list) or len(given) != wanted or len(numbers) != wanted or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{kind} takes {'[low, high, step]' if wanted == 3 else '[low, high]'}, finite numbers")
    low, high, *step = numbers
    if low >= high:
        raise ValueError(f"{kind} needs low < high, not [{low:g}, {high:g}]")
    if kind == "loguniform" and low <= 0:
        raise ValueError(f"loguniform needs low > 0, not {low:g}")
    if kind == "randint" and not all(isinstance(n, int) for n in numbers):
        raise ValueError("randint takes whole numbers; high itself is not drawn")
    if step and step[0] <= 0:
        raise ValueError(f"quniform needs a step > 0, not {step[0]:g}")
    return Range(kind, low, high, step[0] if step else None)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])", value) if isinstance(value, str) else None
    return float(found[1]) * _UNITS[found[2]] if found else value


class Budget(Part):
    """What ends a sweep, whichever comes first. `time` in seconds, or such as 90s, 30m, 2h; `worker_hours` over all workers."""

    trials: Count | None = None
    time: Annotated[Positive, BeforeValidator(_seconds)] | None = None
    worker_hours: Positive | None = None


class Search(Part):
    """How settings are found: every grid point, at random, by Optuna's TPE, or by a searcher of Ray Tune (`target`).

    A searcher is called as `target(space=…, metric=…, mode=…, **args)` with Ray Tune's own search space.
    """

    name_alone = True
    name: Literal["random", "grid", "optuna"] | None = None
    target: ImportPath | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.name is None) == (self.target is None):
            yield "", "exactly one of name (random, grid, optuna) and target (an import path of a Ray Tune searcher) is needed"
        if self.args and self.target is None:
            yield "args", "only with target"


class Scheduler(Part):
    """What stops or changes a trial while it runs. `max`, `grace` and `interval` are counted in `unit`.

    `max` is every trial's length (None: the job's own). asha: the first rung is at `grace`, each next one `reduction` times
    later. median: from `grace` on, with `min_trials` others to compare with. pbt: every `interval` the worst `quantile` of the
    trials copies one of the best and changes its `mutate` keys (None: those of the space that a running optimizer can take).
    """

    name_alone = True
    name: Literal["none", "asha", "median", "pbt"] = "none"
    unit: Literal["steps", "epochs"] = "epochs"
    max: Count | None = None
    grace: Count = 1
    reduction: Annotated[float, Field(gt=1)] = 4.0
    min_trials: Count = 3
    interval: Count = 1
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    mutate: Annotated[list[Text], Field(min_length=1)] | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        own = {"asha": ("grace", "reduction"), "median": ("grace", "min_trials"), "none": ()}.get(
            self.name, ("interval", "quantile", "resample", "mutate")
        )
        for key in ("grace", "reduction", "min_trials", "interval", "quantile", "resample", "mutate"):
            if key not in own and self.is_set(key):
                yield key, f"not an option of {self.name}, which has {', '.join(('unit', 'max', *own))}"
        if self.max is not None and "grace" in own and self.grace > self.max:
            yield "grace", f"at most scheduler.max ({self.max}) is allowed"


def _search(value: Any) -> Any:
    return {"target": value} if isinstance(value, str) and ("." in value or ":" in value) else from_name(value)


class SweepConfig(Part):
    """Many trials of the job (`raydist sweep`).

    `samples`: trials of random, optuna and searchers (None: 10), for grid how often each point is trained (None: once).
    `slots`: warm workers run trial after trial, cold ones one each. `scale_lr`: with the global batch, from the job's own.
    `concurrency`: trials at once, at most (None: what the cluster holds). `seed` of the search (None: the job's).
    """

    space: Annotated[dict[Text, Any], Field(min_length=1)]
    metric: Text = "eval_loss"
    mode: Mode = "min"
    samples: Count | None = None
    budget: Budget = Field(default_factory=Budget)
    search: Annotated[
        Search, BeforeValidator(_search, json_schema_input_type=Literal["random", "grid", "optuna"] | ImportPath | Search)
    ] = Field(default_factory=lambda: Search(name="random"))
    scheduler: Annotated[
        Scheduler, BeforeValidator(from_name, json_schema_input_type=Literal["none", "asha", "median", "pbt"] | Scheduler)
    ] = Field(default_factory=Scheduler)
    slots: Literal["warm", "cold"] = "warm"
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    concurrency: Count | None = None
    seed: Whole | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        try:
            tree = read_space(self.space)
        except SpaceError as error:
            yield from ((f"space.{key}", message) for key, message in error.problems)
            return
        for key, node in tree.nodes:
            name = f"space.{'.'.join(key)}"
            if self.search.name == "grid" and isinstance(node, Range):
                yield name, "search: grid goes through lists: use grid or choice here, or search: random"
            options = node.options if isinstance(node, Options) else ()
            if self.search.target is not None and any(isinstance(option, Tree | list) for option in options):
                yield name, "a searcher of Ray Tune chooses among plain values; use search: random or optuna"
        if self.scheduler.name == "pbt" and self.search.name not in ("random", "grid"):
            yield "search", "pbt changes the settings itself: use search: random or grid"
