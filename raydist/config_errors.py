"""Words for what is wrong with a job file: key path, place, value, what is allowed, the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import Discriminator, ValidationError
from pydantic.fields import FieldInfo

from raydist.config_types import MAX_INTEGER, Part, kind_of
from raydist.config_words import allowed, clean, is_section, keys_of, members, nearest, not_null, own_names, show, unwrapped
from raydist.environment import is_secret

Path = tuple[str | int, ...]
MISSING = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at a key path of the job file."""

    path: Path
    message: str
    value: Any = MISSING

    def words(self, places: Mapping[Path, str]) -> str:
        """`batch.micro_size (line 9) = 8.5: message`; the place is that of the nearest key that was written."""
        place = next((f" ({places[self.path[:n]]})" for n in range(len(self.path), 0, -1) if self.path[:n] in places), "")
        value = "" if self.value is MISSING or is_hidden(self.path) else f" = {show(self.value)}"
        return f"{dotted(self.path) or 'the job'}{place}{value}: {self.message}"


def is_hidden(path: Path) -> bool:
    """Whether the value at `path` may be a secret."""
    return path[:1] == ("env",) and (len(path) < 2 or is_secret(str(path[1])))


def dotted(path: Path) -> str:
    """`data.train.transforms.0.args`, as overrides write it."""
    return clean(".".join(str(part) for part in path))


def at(data: Any, path: Path) -> Any:
    """The value at `path` of plain data, or MISSING."""
    for part in path:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if not inside:
            return MISSING
        data = data[part]
    return data


def _locate(model: type[Part], loc: tuple[str | int, ...], data: Any) -> tuple[Path, str, type[Part] | None]:
    """The key path that a pydantic location means, what is allowed there, and the model that holds the last key.

    Unions put the name of their member into the location; those are dropped, and an error in a union of plain values
    ends at the union, so that its members' errors become one.
    """
    annotation: Any = model
    extra: tuple[Any, ...] = ()
    whole: tuple[Any, tuple[Any, ...]] = (model, ())
    path: Path = ()
    owner: type[Part] | None = None
    for part in loc:
        annotation, extra = not_null(annotation, extra)
        branches = members(annotation)
        if len(branches) > 1:
            annotation, extra = _chosen(branches, part, at(data, path)) if _is_tagged(extra) else None, ()
            if annotation is None:
                break
            continue
        origin = get_origin(annotation)
        if is_section(annotation):
            owner, path = annotation, (*path, part)
            field = keys_of(annotation).get(str(part))
            if field is None:
                return path, "", owner
            annotation, extra = field.annotation, (*field.metadata, field)
        elif origin in (list, dict):
            path, owner = (*path, part), None
            annotation, extra = get_args(annotation)[-1], ()
        else:
            break
        whole = annotation, extra
    return path, allowed(*whole), owner


def _is_tagged(extra: tuple[Any, ...]) -> bool:
    return any(isinstance(item, Discriminator) or (isinstance(item, FieldInfo) and item.discriminator) for item in extra)


def _chosen(branches: list[Any], tag: Any, value: Any) -> Any:
    """The member of a tagged union: by the kind of value, or by the literal `name` of models."""
    for branch in branches:
        bare, _ = unwrapped(branch)
        if tag in own_names(bare):
            return branch
        kind = "map" if is_section(bare) or get_origin(bare) is dict else "list" if get_origin(bare) is list else "value"
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
    if item["loc"][-1:] == ("[key]",):
        path, _, _ = _locate(model, item["loc"][:-2], data)
        key = item["input"]
        yield Problem(path, "a key is empty" if key == "" else f"the key {show(key)} is not text; quote it")
        return
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
    elif kind == "invalid_key" and owner is not None:
        yield Problem(path[:-1], f"the key {show(item['input'])} is not text; allowed: {', '.join(keys_of(owner))}")
    elif kind == "extra_forbidden" and owner is not None:
        known = list(keys_of(owner))
        yield Problem(path, f"unknown key; {nearest(str(path[-1]), known)}allowed: {', '.join(known)}", value)
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
    elif isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INTEGER and "an integer" in fits:
        hint = f"; write {int(value)}"
    elif isinstance(value, int) and value > MAX_INTEGER and "an integer" in fits:
        hint = " and below 2**63"
    elif isinstance(value, str) and ("number" in fits or "an integer" in fits):
        quoted = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.IGNORECASE)
        hint = "; it is quoted, so it is text: remove the quotes" if quoted else ""
    word = value.get("name") if isinstance(value, dict) else value
    if isinstance(word, str):
        near = nearest(word, re.split(r", or |, | or ", fits))
    return f"{near}allowed: {fits}{hint}"
