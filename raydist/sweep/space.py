"""From a sweep's space to whole, validated jobs: do the keys exist, which settings does a trial get, what job do they make."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from raydist import storage
from raydist.config import JobConfig, parse_config, to_plain
from raydist.config_sweep import Key, Options, Range, SweepConfig, Tree, read_space
from raydist.config_words import is_section, keys_of, members, nearest, not_null
from raydist.errors import ConfigError
from raydist.randomness import derive

SAMPLES = 10
"""Trials of a search that would go on for ever."""
_OWN = ("name", "storage", "sweep", "env", "loggers")
"""Keys that a trial's place or the sweep itself depends on."""
_GRID_LIMIT = 100_000

Pick = Callable[[str, Range | Options], Any]
"""Gives a number for a Range, the index of an option for Options; the name tells the draws of a space apart."""
Settings = dict[str, Any]
"""Dotted key of the job file -> value."""


# -- do the keys exist -------------------------------------------------------------------------------------------------


def check_keys(config: JobConfig, tree: Tree) -> None:
    """ConfigError that lists all keys of the space that name nothing in the job file, each with the nearest that does."""
    job = to_plain(config)
    problems = list(dict.fromkeys(_unknown(job, tree, ())))
    if problems:
        raise ConfigError("sweep.space:\n" + "\n".join(f"  {line}" for line in problems))


def _unknown(job: dict[str, Any], tree: Tree, above: Key) -> Iterator[str]:
    for key, node in tree.nodes:
        whole = (*above, *key)
        if whole[0] in _OWN:
            yield f"{'.'.join(whole)}: it says where a trial is kept or how it runs, and cannot be swept"
            continue
        if (words := _missing(job, whole)) is not None and not tree.whole:
            yield f"{'.'.join(whole)}: {words}"
            continue
        for option in node.options if isinstance(node, Options) else ():
            if isinstance(option, Tree):
                yield from _unknown(job, option, whole)


def _missing(job: dict[str, Any], key: Key) -> str | None:
    """Why `key` names nothing; None when it does."""
    kinds: list[Any] = [JobConfig]
    here: Any = job
    for depth, part in enumerate(key):
        sections = [kind for kind in kinds if is_section(kind)]
        known = list(dict.fromkeys(name for section in sections for name in keys_of(section)))
        if not sections:
            known = [str(name) for name in here] if isinstance(here, dict) else []
            if isinstance(here, list):
                known = [str(number) for number in range(len(here))]
        if part not in known:
            before = ".".join(key[:depth])
            near = nearest(part, known).replace("did you mean ", f"did you mean {before}." if before else "did you mean ")
            where = f"{before} has {', '.join(known)}" if known else f"{before} has no keys in the job file: write them there"
            return f"names nothing in the job file; {near}{where if before else 'its sections are ' + ', '.join(known)}"
        kinds = [member for section in sections for member in _kinds(keys_of(section).get(part))] if sections else []
        here = here.get(part) if isinstance(here, dict) else here[int(part)] if isinstance(here, list) else None
    return None


def _kinds(field: Any) -> list[Any]:
    """The types that a section's field may hold, bare."""
    if field is None:
        return []
    annotation, _ = not_null(field.annotation, ())
    found = []
    for member in members(annotation):
        bare, _ = not_null(member, ())
        if get_origin(bare) is dict and is_section(get_args(bare)[1]):
            continue  # a map of sections is looked at as the job file has it
        found.append(bare)
    return [kind for kind in found if is_section(kind)]


# -- one trial's settings ------------------------------------------------------------------------------------------------


def draw(tree: Tree, pick: Pick) -> Settings:
    """One trial's settings, in the order of the space."""
    found: Settings = {}
    _draw(tree, (), "", pick, found)
    return found


def _draw(tree: Tree, above: Key, label: str, pick: Pick, found: Settings) -> None:
    for key, node in tree.nodes:
        whole = (*above, *key)
        name = f"{label}{'.'.join(key)}"
        if isinstance(node, Range):
            found[".".join(whole)] = pick(name, node)
        elif isinstance(node, Options):
            index = int(pick(name, node))
            option = node.options[index]
            if not isinstance(option, Tree):
                found[".".join(whole)] = option
            elif option.whole:
                inner: Settings = {}
                _draw(option, (), f"{name}[{index}].", pick, inner)
                value: dict[str, Any] = {}
                for dotted, item in inner.items():
                    put(value, dotted, item)
                found[".".join(whole)] = value
            else:
                _draw(option, whole, f"{name}[{index}].", pick, found)
        else:
            found[".".join(whole)] = node


def at_random(rng: random.Random) -> Pick:
    """Draws from `rng`."""

    def pick(name: str, node: Range | Options) -> Any:
        if isinstance(node, Options):
            return rng.randrange(len(node.options))
        if node.kind == "randint":
            return rng.randrange(int(node.low), int(node.high))
        if node.kind == "loguniform":
            return math.exp(rng.uniform(math.log(node.low), math.log(node.high)))
        value = rng.uniform(node.low, node.high)
        return value if node.step is None else on_grid(value, node)

    return pick


def on_grid(value: float, node: Range) -> float | int:
    """The multiple of the step that is nearest, within the range; an integer where all of them are."""
    assert node.step is not None
    low, high = math.ceil(node.low / node.step - 1e-9), math.floor(node.high / node.step + 1e-9)
    count = min(max(round(value / node.step), low), high)
    return count * node.step if isinstance(node.step, int) else float(f"{count * node.step:.12g}")


@dataclass(frozen=True)
class Plan:
    """How many trials there are, and for random and grid search which settings number k has: a function of seed and k alone."""

    config: JobConfig
    sweep: SweepConfig
    tree: Tree

    @property
    def trials(self) -> int:
        """Trials asked for in total."""
        named = self.sweep.search.name in ("random", "grid")
        samples = self.sweep.samples or (1 if self.sweep.search.name == "grid" or self._grids else SAMPLES)
        count = samples * (math.prod(len(node.options) for _, node in self._grids) if named else 1)
        return count if self.sweep.budget.trials is None else min(count, self.sweep.budget.trials)

    @property
    def _grids(self) -> list[tuple[str, Options]]:
        """Lists at the top of the space that are gone through in turn."""
        every = self.sweep.search.name == "grid"
        return [(".".join(k), n) for k, n in self.tree.nodes if isinstance(n, Options) and (n.grid or every)]

    def settings(self, number: int) -> Settings:
        """Those of trial `number`, from 0."""
        grids = self._grids
        points = math.prod(len(node.options) for _, node in grids)
        index, fixed = number % points, {}
        for name, node in reversed(grids):
            index, fixed[name] = divmod(index, len(node.options))
        seed = self.config.seed if self.sweep.seed is None else self.sweep.seed
        other = at_random(random.Random(derive(seed, "sweep", number)))
        return draw(self.tree, lambda name, node: fixed[name] if name in fixed else other(name, node))


# -- one trial's job -----------------------------------------------------------------------------------------------------


def put(data: Any, dotted: str, value: Any) -> None:
    """Set a dotted key in plain data; maps that are missing are made, a plain word becomes `{name: word}`."""
    *way, last = dotted.split(".")
    for part in way:
        below = data[int(part)] if isinstance(data, list) else data.get(part)
        if not isinstance(below, dict | list):
            below = {"name": below} if isinstance(below, str) else {}
            data[int(part) if isinstance(data, list) else part] = below
        data = below
    if isinstance(data, list):
        data[int(last)] = copy.deepcopy(value)
    else:
        data[last] = copy.deepcopy(value)


def job_of(config: JobConfig, sweep: SweepConfig, settings: Settings, name: str, place: str) -> JobConfig:
    """The whole job of a trial, to be kept at `<place>/<name>`. Raises ConfigError when the settings make none."""
    job = {**to_plain(config), "env": dict(config.env), "name": name, "storage": place}
    job.pop("sweep", None)
    job = copy.deepcopy(job)
    longest = sweep.scheduler.max
    if longest is not None:
        epochs = sweep.scheduler.unit == "epochs"
        job["train"] |= {"epochs": longest if epochs else None, "max_steps": None if epochs else longest}
    for key, value in settings.items():
        put(job, key, value)
    if sweep.scale_lr != "none":
        ratio = job["batch"]["global_size"] / config.batch.global_size
        job["optimizer"]["lr"] *= ratio if sweep.scale_lr == "linear" else math.sqrt(ratio)
    words = ", ".join(f"{key}={value}" for key, value in settings.items())
    try:
        return parse_config(job, config.base_dir or Path.cwd())
    except ConfigError as error:
        lines = str(error).splitlines()[1:]
        raise ConfigError(f"sweep.space: {words} is no valid job\n" + "\n".join(lines)) from None


def name_of(number: int) -> str:
    """The name of a trial and of its folder."""
    return f"{number:05d}"


def trial_job(config: JobConfig, root: str, number: int, settings: Settings) -> JobConfig:
    """The job of trial `number` of the sweep at `root`. Raises ConfigError when the settings make none."""
    assert config.sweep is not None
    return job_of(config, config.sweep, settings, name_of(number), storage.join(root, "trials"))


def check(config: JobConfig) -> Plan:
    """The plan of the job's sweep, after all that can be checked without training. Raises ConfigError."""
    sweep = config.sweep
    if sweep is None:
        raise ConfigError(
            "the job file has no sweep section; such as\n"
            "  sweep: {space: {optimizer.lr: {loguniform: [1e-4, 1e-1]}}, samples: 10}"
        )
    tree = read_space(sweep.space)
    check_keys(config, tree)
    _check_length(config, sweep, tree)
    plan = Plan(config, sweep, tree)
    if plan.trials > _GRID_LIMIT:
        raise ConfigError(f"sweep.space: {plan.trials} trials; more than {_GRID_LIMIT} need budget.trials or a smaller grid")
    known = sweep.search.name in ("random", "grid")
    numbers = range(min(plan.trials, 200)) if known else ()
    for settings in itertools.chain(_corners(tree), (plan.settings(number) for number in numbers)):
        job_of(config, sweep, settings, "check", config.storage)
    return plan


def _check_length(config: JobConfig, sweep: SweepConfig, tree: Tree) -> None:
    if sweep.scheduler.max is None:
        return
    for key, _ in tree.nodes:
        if ".".join(key) in ("train.epochs", "train.max_steps", "train"):
            raise ConfigError(
                f"sweep.space: {'.'.join(key)} is drawn, and sweep.scheduler.max says how long a trial is: leave one out"
            )


def _corners(tree: Tree) -> Iterator[Settings]:
    """Settings in which each option of each choice comes up once, with the low and the high ends of the ranges."""
    most = max((len(node.options) for _, node in tree.nodes if isinstance(node, Options)), default=1)
    for index in range(max(2, most)):

        def pick(name: str, node: Range | Options, index: int = index) -> Any:
            if isinstance(node, Options):
                return index % len(node.options)
            end = node.high if index % 2 else node.low
            if node.kind == "randint":
                return int(end) - (index % 2)
            return end if node.step is None else on_grid(end, node)

        yield draw(tree, pick)
