"""The job file's keys as a Markdown page: `raydist schema --markdown`, which docs/job-file.md is made with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from raydist.config import JobConfig, to_plain
from raydist.config_help import help_of
from raydist.config_types import Part
from raydist.config_words import allowed, is_section, keys_of, members, show, unwrapped

_HEAD = """# The job file

Made by `raydist schema --markdown` from the classes that check a job file; change those, not this page. A key without a
default must be written; a section whose keys all have defaults may be left out. Where a strategy, a precision, a logger or
a scheduler has a `name`, the name alone may stand for it. Relative paths start at the job file's folder.
"""


def markdown() -> str:
    """The page: a heading and a table of keys for each section, in the order in which a job file names them."""
    seen: dict[type[Part], str] = {}
    for place, section in _sections(JobConfig, ""):
        seen.setdefault(section, place)
    return "\n".join([_HEAD, *(_table(section, place) for section, place in seen.items())]).rstrip() + "\n"


def _sections(section: type[Part], place: str) -> Iterator[tuple[str, type[Part]]]:
    yield place, section
    for key, field in keys_of(section).items():
        for inner in _inside(field.annotation):
            yield from _sections(inner, f"{place}.{key}".lstrip("."))


def _inside(annotation: Any) -> Iterator[type[Part]]:
    """The sections that a value of this type holds, also in lists and maps."""
    for member in members(annotation):
        bare, _ = unwrapped(member)
        if is_section(bare):
            yield bare
        elif get_origin(bare) in (list, dict):
            yield from _inside(get_args(bare)[-1])


def _table(section: type[Part], place: str) -> str:
    name = section.model_fields.get("name")
    chosen = name.default if place and name is not None and len(get_args(name.annotation)) == 1 else None
    title = "The whole" if not place else f"`{place}`: {chosen}" if chosen else f"`{place}`"
    rows = [_row(section, key, field) for key, field in keys_of(section).items()]
    text = _cell(inspect.cleandoc(section.__doc__ or "").replace("\n\n", " ").replace("\n", " "))
    return "\n".join([f"## {title}\n", f"{text}\n", "| key | default | allowed | |", "|---|---|---|---|", *rows, ""])


def _row(section: type[Part], key: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    default = "" if field.is_required() else f"`{show(_plain(value))}`"
    if isinstance(value, Part) and len(keys_of(type(value))) > 3:
        default = "its defaults"
    words = _short(allowed(field.annotation, tuple(field.metadata)))
    return f"| `{key}` | {default} | {_cell(words)} | {_cell(help_of(section.__name__, key))} |"


def _plain(value: Any) -> Any:
    return to_plain(value) if isinstance(value, Part) else value


def _short(words: str) -> str:
    """The keys of a map have a table of their own."""
    words = re.sub(r"a map with (?!name and)[\w, ]+?(?= or |$)", "a map", words)
    return re.sub(r"a map( or a map)+", "a map", words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
