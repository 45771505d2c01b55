"""Words for what is wrong with a job file: key path, place, value, what is allowed, the nearest valid key."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, Discriminator, ValidationError
from pydantic.fields import FieldInfo

from raydist.config_types import MAX_INTEGER, Part, absolute, import_path, kind_of

Path = tuple[str | int, ...]
MISSING = object()
_BOUNDS = (
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "<="),
    (annotated_types.Lt, "lt", "<"),
)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at a key path of the job file."""

    path: Path
    message: str
    value: Any = MISSING

    def words(self, places: Mapping[Path, str]) -> str:
        """`batch.micro_size (line 9) = 8.5: message`; the place is that of the nearest key that was written."""
        place = next((f" ({places[self.path[:n]]})" for n in range(len(self.path), 0, -1) if self.path[:n] in places), "")
        value = "" if self.value is MISSING else f" = {show(self.value)}"
        return f"{dotted(self.path) or 'the job'}{place}{value}: {self.message}"


def dotted(path: Path) -> str:
    """`data.train.transforms.0.args`, as overrides write it."""
    return clean(".".join(str(part) for part in path))


def show(value: Any) -> str:
    """The value as a job file would write it, cut short."""
    text = clean(_flow(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flow(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def clean(text: str) -> str:
    """Text with control characters and the like escaped, for one line of a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean lr? ` or nothing."""
    known = list(known)
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[near[0]]}? " if near else ""


def at(data: Any, path: Path) -> Any:
    """The value at `path` of plain data, or MISSING."""
    for part in path:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if not inside:
            return MISSING
        data = data[part]
    return data


def keys_of(model: type[Part]) -> dict[str, FieldInfo]:
    """The keys as a job file writes them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and what is annotated on it."""
    extra: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        extra += tuple(more)
    return annotation, extra


def _branches(annotation: Any) -> list[Any]:
    """The members of a union, flat; a type that is none is its own only member."""
    bare, _ = _split(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [branch for member in get_args(bare) for branch in _branches(member)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Part)


def _bounds(extra: Iterable[Any]) -> str:
    """` >= 1` or ` > 0 and < 1`."""
    flat: list[Any] = []
    for item in extra:
        flat += item.metadata if isinstance(item, FieldInfo) else [item]
    return " and".join(
        f" {sign} {getattr(item, key):g}" for kind, key, sign in _BOUNDS for item in flat if isinstance(item, kind)
    )


def _limit(extra: Iterable[Any], kind: type[annotated_types.MinLen | annotated_types.MaxLen]) -> int | None:
    flat = [each for item in extra for each in (item.metadata if isinstance(item, FieldInfo) else [item])]
    found = [item for item in flat if isinstance(item, kind)]
    return getattr(found[0], "min_length", None) or getattr(found[0], "max_length", None) if found else None


def _least(extra: tuple[Any, ...]) -> str:
    """`non-empty ` or `2-entry ` or nothing, of text or a list."""
    least, most = _limit(extra, annotated_types.MinLen), _limit(extra, annotated_types.MaxLen)
    return "" if not least else f"{least}-entry " if least == most else "non-empty "


def _names(annotation: Any) -> tuple[str, ...]:
    """The names that choose a model, where its `name` alone may stand for it: a strategy's, a precision's."""
    bare, _ = _split(annotation)
    return get_args(bare.model_fields["name"].annotation) if _is_model(bare) and bare.name_alone else ()


def _functions(extra: Iterable[Any]) -> list[Any]:
    return [item.func for item in extra if isinstance(item, AfterValidator)]


def allowed(annotation: Any, extra: tuple[Any, ...] = ()) -> str:
    """What a field of this type takes, in words."""
    bare, more = _split(annotation)
    extra = (*extra, *more)
    branches = _branches(bare)
    if len(branches) > 1 and all(_names(branch) for branch in branches):
        return f"{', '.join(name for branch in branches for name in _names(branch))}, or a map with name and its options"
    if len(branches) > 1:
        words = [word for branch in branches for word in [allowed(branch, extra)] if word]
        others = list(dict.fromkeys(word for word in words if word != "null"))
        null = "" if "null" not in words else ", or null" if len(others) > 1 else " or null"
        return " or ".join(others) + null
    return _allowed_plain(bare, extra)


def _allowed_plain(bare: Any, extra: tuple[Any, ...]) -> str:
    origin, args = get_origin(bare), get_args(bare)
    if bare is type(None):
        return "null"
    if bare is bool:
        return "true or false"
    if bare is int:
        return f"an integer{_bounds(extra)}"
    if bare is float:
        return f"a finite number{_bounds(extra)}"
    if bare is str:
        if import_path in _functions(extra):
            return "an import path such as torch.nn:Linear or ./file.py:Name"
        return "a path" if absolute in _functions(extra) else f"{_least(extra)}text"
    if origin is Literal:
        return ", ".join(str(word) for word in args)
    if origin is list:
        return f"a {_least(extra)}list, each {allowed(args[0])}"
    if origin is dict:
        return "a map of names to values" if args[1] is Any else f"a map of names to {allowed(args[1])}"
    if _is_model(bare):
        if names := _names(bare):
            return f"{', '.join(names)}, or a map with name and its options"
        return f"a map with {', '.join(keys_of(bare))}"
    return "any value"


def _locate(model: type[Part], loc: tuple[str | int, ...], data: Any) -> tuple[Path, str, type[Part] | None]:
    """The key path that a pydantic location means, what is allowed there, and the model that holds the last key.

    Unions put the name of their member into the location; those are dropped, and an error in a union of plain values
    ends at the union, so that its members' errors become one.
    """
    annotation: Any = model
    extra: tuple[Any, ...] = ()
    path: Path = ()
    owner: type[Part] | None = None
    for part in loc:
        annotation, more = _split(annotation)
        extra = (*extra, *more)
        branches = [branch for branch in _branches(annotation) if branch is not type(None)]
        if len(branches) > 1:
            tagged = any(
                isinstance(item, Discriminator) or (isinstance(item, FieldInfo) and item.discriminator) for item in extra
            )
            chosen = _chosen(branches, part, at(data, path)) if tagged else None
            if chosen is None or part == "value":
                break
            annotation, extra = chosen, ()
            continue
        annotation, more = _split(branches[0])
        extra = (*extra, *more)
        origin = get_origin(annotation)
        if _is_model(annotation):
            owner = annotation
            field = keys_of(annotation).get(str(part))
            path = (*path, part)
            if field is None:
                return path, "", owner
            annotation, extra = field.annotation, tuple(field.metadata)
            if field.discriminator:
                extra = (*extra, field)
        elif origin in (list, dict) and part != "[key]":
            path = (*path, part)
            annotation, extra, owner = get_args(annotation)[-1], (), None
        else:
            break
    return path, allowed(annotation, extra), owner


def _chosen(branches: list[Any], tag: Any, value: Any) -> Any:
    """The member of a tagged union: by the kind of value, or by the literal `name` of models."""
    for branch in branches:
        bare, _ = _split(branch)
        if tag in _names(bare):
            return branch
        kind = "map" if _is_model(bare) or get_origin(bare) is dict else "list" if get_origin(bare) is list else "value"
        if kind == tag == kind_of(value):
            return branch
    return None


def explain(error: ValidationError, model: type[Part], data: Any) -> Iterator[Problem]:
    """One problem for each thing that pydantic found, in the order found; the members of a union speak as one."""
    seen: set[Path] = set()
    for item in error.errors(include_url=False):
        for problem in _explain(item, model, data):
            if item["type"] == "raydist" or problem.path not in seen:
                yield problem
            seen.add(problem.path)


def _explain(item: Any, model: type[Part], data: Any) -> Iterator[Problem]:
    path, fits, owner = _locate(model, item["loc"], data)
    value, kind = at(data, path), item["type"]
    if kind not in ("missing", "raydist") and value is MISSING and isinstance(at(data, path[:-1]), str):
        path, value = path[:-1], at(data, path[:-1])  # `precision: fp17`, a name that stands for {name: fp17}
    if kind == "raydist":
        for key, message in item["ctx"]["problems"]:
            below = (*path, *key.split(".")) if key else path
            found = at(data, below)
            yield Problem(below, message, MISSING if isinstance(found, dict) else found)
    elif kind == "missing":
        yield Problem(path, f"missing; allowed: {fits}")
    elif kind == "extra_forbidden":
        known = list(keys_of(owner)) if owner is not None else []
        yield Problem(path, f"unknown key; {nearest(str(path[-1]), known)}allowed: {', '.join(known)}", value)
    elif item["loc"][-1:] == ("[key]",):
        yield Problem(path, f"the key {show(item['input'])} is not text; quote it")
    else:
        yield Problem(path, _why(kind, item, value, fits), value)


def _why(kind: str, item: Any, value: Any, fits: str) -> str:
    """What is wrong with a value, and what would not be."""
    if kind == "value_error":
        reason = str(item["ctx"]["error"])
        return reason if fits in ("text", "a path") else f"{reason}; allowed: {fits}"
    near = hint = ""
    if isinstance(value, bool) and "text" in fits:
        hint = '; YAML reads yes/no/on/off as true/false: quote it, such as "no"'
    elif isinstance(value, int | float) and not isinstance(value, bool) and "text" in fits:
        hint = f'; quote it: "{value}"'
    elif isinstance(value, float) and value.is_integer() and "an integer" in fits:
        hint = f"; write {int(value)}"
    elif isinstance(value, int) and value > MAX_INTEGER and "an integer" in fits:
        hint = " and below 2**63"
    elif isinstance(value, str) and ("number" in fits or "an integer" in fits):
        quoted = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.IGNORECASE)
        hint = "; it is quoted, so it is text: remove the quotes" if quoted else ""
    if isinstance(value, str):
        near = nearest(value, re.split(r", or |, | or ", fits))
    return f"{near}allowed: {fits}{hint}"
