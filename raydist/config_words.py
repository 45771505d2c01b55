"""Values, keys and types in a user's words: what stands in the job file, and what a key takes."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from raydist.config_types import MAX_INTEGER, Part, absolute, import_path

_BOUNDS = (
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "<="),
    (annotated_types.Lt, "lt", "<"),
)


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
    near = closest(word, known)
    return "" if near is None else f"did you mean {near}? "


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` may be a slip of; upper and lower case do not matter."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[near[0]] if near else None


def keys_of(model: type[Part]) -> dict[str, FieldInfo]:
    """The keys as a job file writes them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and what is annotated on it."""
    extra: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        extra += tuple(more)
    return annotation, extra


def members(annotation: Any) -> list[Any]:
    """The members of a union, flat; a type that is none is its own only member."""
    bare, _ = unwrapped(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [branch for member in get_args(bare) for branch in members(member)]
    return [annotation]


def not_null(annotation: Any, extra: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The type that stands beside null, bare, and all that is annotated on it."""
    annotation, more = unwrapped(annotation)
    extra = (*extra, *more)
    if get_origin(annotation) in (Union, types.UnionType):
        others = [member for member in get_args(annotation) if member is not type(None)]
        if len(others) == 1:
            return not_null(others[0], extra)
    return annotation, extra


def is_section(annotation: Any) -> TypeGuard[type[Part]]:
    """Whether a type is one of the job file's sections."""
    return isinstance(annotation, type) and issubclass(annotation, Part)


def _flat(extra: Iterable[Any]) -> list[Any]:
    """What is annotated, each once, with what `Field(...)` holds spread out."""
    flat: list[Any] = []
    for item in extra:
        flat += [each for each in (item.metadata if isinstance(item, FieldInfo) else [item]) if each not in flat]
    return flat


def _bounds(extra: Iterable[Any]) -> str:
    """` >= 1` or ` > 0 and < 1`."""
    return " and".join(
        f" {sign} {getattr(item, key):g}"
        for kind, key, sign in _BOUNDS
        for item in _flat(extra)
        if isinstance(item, kind) and getattr(item, key) != MAX_INTEGER
    )


def _limit(extra: Iterable[Any], kind: type[annotated_types.MinLen | annotated_types.MaxLen]) -> int | None:
    found = [item for item in _flat(extra) if isinstance(item, kind)]
    return getattr(found[0], "min_length", None) or getattr(found[0], "max_length", None) if found else None


def _least(extra: tuple[Any, ...]) -> str:
    """`non-empty ` or `2-entry ` or nothing, of text or a list."""
    least, most = _limit(extra, annotated_types.MinLen), _limit(extra, annotated_types.MaxLen)
    return "" if not least else f"{least}-entry " if least == most else "non-empty "


def own_names(annotation: Any) -> tuple[str, ...]:
    """The names that choose a model, where its `name` alone may stand for it: a strategy's, a precision's."""
    bare, _ = unwrapped(annotation)
    if not is_section(bare) or not bare.name_alone:
        return ()
    return get_args(not_null(bare.model_fields["name"].annotation, ())[0])


def _functions(extra: Iterable[Any]) -> list[Any]:
    return [item.func for item in extra if isinstance(item, AfterValidator)]


def allowed(annotation: Any, extra: tuple[Any, ...] = ()) -> str:
    """What a field of this type takes, in words."""
    bare, more = unwrapped(annotation)
    extra = (*extra, *more)
    branches = members(bare)
    if len(branches) > 1 and all(own_names(branch) for branch in branches):
        return f"{', '.join(name for branch in branches for name in own_names(branch))}, or a map with name and its options"
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
        return f"a {_least(extra)}map of names to {'values' if args[1] is Any else allowed(args[1])}"
    if is_section(bare):
        if names := own_names(bare):
            return f"{', '.join(names)}, or a map with name and its options"
        return f"a map with {', '.join(keys_of(bare))}"
    return "any value"
