"""The building blocks of the job file's sections: strict numbers and words, paths, import paths, and the base class."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

MAX_INTEGER = 2**63 - 1
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_IMPORT_PATH = re.compile(rf"{_DOTTED}:{_DOTTED}|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_FILE_PATH = re.compile(rf"(?P<file>.+\.py):(?P<name>{_DOTTED})")
_BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def from_name(value: Any) -> Any:
    """The section that a plain word stands for: `strategy: ddp` is `strategy: {name: ddp}`."""
    return {"name": value} if isinstance(value, str) else value


class Part(BaseModel):
    """Base of every section: unknown keys and loose types are refused, a built section is never changed.

    `problems` yields `(key, message)` for what only the whole section can tell; all of them are reported at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    name_alone: ClassVar[bool] = False
    """Whether the job file may write only the section's `name` in its place."""

    def problems(self) -> Iterator[tuple[str, str]]:
        return iter(())

    @model_validator(mode="after")
    def _whole(self) -> Any:
        refuse(list(self.problems()))
        return self

    def is_set(self, key: str) -> bool:
        """Whether `key` holds something other than its default: a resolved file, which writes defaults out, loads again."""
        return bool(getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True))


def refuse(problems: list[tuple[str, str]]) -> None:
    """Raise what a pydantic validator must raise for these `(key path, message)`; nothing when there are none."""
    if problems:
        words = "; ".join(f"{key}: {message}" for key, message in problems)
        raise PydanticCustomError("raydist", "{words}", {"words": words, "problems": problems})


def kind_of(value: Any) -> str:
    """Discriminator of unions: a map, a list or a plain value, so that an error speaks of the one that was written."""
    if isinstance(value, dict | BaseModel):
        return "map"
    return "list" if isinstance(value, list) else "value"


def absolute(path: str, info: ValidationInfo) -> str:
    """`path` with ~ expanded, and absolute when the base folder is known; a URI as it is.

    A pattern is joined to the base folder with that folder's own pattern characters escaped.
    """
    if "\0" in path:
        raise ValueError("a path cannot hold a NUL character")
    if _URI.match(path):
        return path
    path = os.path.expanduser(path)
    base = (info.context or {}).get("base_dir")
    if base is None or os.path.isabs(path):
        return path
    base = os.path.abspath(base)
    return os.path.normpath(os.path.join(glob.escape(base) if glob.has_magic(path) else base, path))


def import_path(target: str, info: ValidationInfo) -> str:
    """`target` with its file made absolute. Raises ValueError when it is no import path."""
    if found := _FILE_PATH.fullmatch(target):
        return f"{absolute(found['file'], info)}:{found['name']}"
    if not _IMPORT_PATH.fullmatch(target):
        raise ValueError("not an import path")
    return target


def _env_value(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _read_bool(value: Any) -> Any:
    return _BOOL_WORDS.get(value.lower(), value) if isinstance(value, str) else value


Bool = Annotated[bool, BeforeValidator(_read_bool)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
"""An integer >= 1."""
Whole = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
"""An integer >= 0."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(absolute)]
EnvValue = Annotated[str, BeforeValidator(_env_value)]
"""Text; a whole number is taken as it is written."""
ImportPath = Annotated[str, AfterValidator(import_path)]


class Target(Part):
    """Something to import and call with `args`: `pkg.mod:Name`, `pkg.mod.Name` or `./file.py:Name`."""

    target: ImportPath
    args: dict[str, Any] = Field(default_factory=dict)
