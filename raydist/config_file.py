"""The job file as text: YAML in and out, and `key.path=value` overrides; the job's sections are not known here.

YAML is read as 1.1 (PyYAML's safe loader) with these differences: `1e-3`, `1e3` are numbers; `1:30` and dates stay text;
`010` is refused (8 or 10?); a repeated key is refused. What is written reads back as the same values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from raydist.config_errors import dotted, is_hidden
from raydist.config_words import show
from raydist.errors import ConfigError

Places = dict[tuple[str | int, ...], str]
"""Key path -> where it was written, such as `line 7` or `command line`."""

_BOOL, _INT, _FLOAT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "merge"))
_IMPLICIT = [
    (_BOOL, r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    (_INT, r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    (_FLOAT, r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    (_FLOAT, r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_MERGE, r"<<", "<"),
]
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")


class _Loader(yaml.SafeLoader):
    """Safe, with the rules of this module."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode):
            _refuse_repeats(node)
        return node


def _refuse_repeats(node: yaml.MappingNode) -> None:
    seen: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            lines = f"lines {first.start_mark.line + 1} and {key.start_mark.line + 1}"
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is repeated ({lines})", key.start_mark)


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number or a bool; words that a tag forces into one are an error with its place."""
    kind = node.tag.rsplit(":", 1)[-1]
    if kind == "int" and _LEADING_ZERO.fullmatch(node.value):
        sign, digits = re.fullmatch(r"([-+]?)[0_]*(.*)", node.value).groups()  # type: ignore[union-attr]
        words = f'{node.value} is ambiguous (octal?): write {sign}{digits or 0}, or "{node.value}" for text'
        raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
    try:
        text = node.value.replace("_", "")
        if kind == "bool":
            return loader.bool_values[text.lower()]
        if kind == "int":
            return int(text, 0)
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    except (ValueError, KeyError):
        words = (
            f"{show(node.value)} is no {kind}"
            if len(node.value) < 4000
            else f"a number of {len(node.value)} digits is too long"
        )
        raise yaml.constructor.ConstructorError(None, None, words, node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Quotes what either this loader or a plain YAML 1.1 loader would read as something else; no aliases."""

    yaml_implicit_resolvers = copy.deepcopy(yaml.SafeDumper.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: build
    for tag, build in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rsplit(":", 1)[-1] in ("null", "str", "seq", "map")
}
for _tag, _pattern, _first in _IMPLICIT:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))
for _tag in (_BOOL, _INT, _FLOAT):
    _Loader.add_constructor(_tag, _scalar)


def parse_yaml(text: str, source: str) -> tuple[Any, Places]:
    """The value of a YAML text and where its keys stand. Raises ConfigError with `source`, line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        places: Places = {}
        _note_places(node, (), places)
        return loader.construct_document(node), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{where}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
        raise ConfigError(
            f"{source}, {where}: the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, or an alias (*name) inside its own anchor (&name)") from None


def _note_places(node: yaml.Node, path: tuple[str | int, ...], places: Places) -> None:
    places[path] = f"line {node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                _note_places(value, (*path, key.value), places)
                places[(*path, key.value)] = f"line {key.start_mark.line + 1}"
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_places(value, (*path, index), places)


def read_job_file(path: Path) -> tuple[dict[Any, Any], Places]:
    """The mapping in a job file and where its keys stand. Raises ConfigError when it is none, or unreadable."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the job file in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        where = f"line {before.count(10) + 1}, column {len(before) - before.rfind(10)}"
        raise ConfigError(f"{path}, {where}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8") from None
    data, places = parse_yaml(text, str(path))
    if data is None:
        raise ConfigError(f"{path}: the file is empty; a job file is a YAML mapping with task, data, batch, train, optimizer")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else f"single value ({show(data)})"
        raise ConfigError(f"{path}: holds a {kind}; a job file is a YAML mapping (key: value lines)")
    return data, places


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML folds some line ends (U+0085, ...) into blanks unless the text is double-quoted.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)


def dump_yaml(data: Any) -> str:
    """YAML text that reads back as `data`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def plain(data: Any, source: str, path: tuple[Any, ...] = (), inside: tuple[int, ...] = ()) -> Any:
    """A deep copy made of dict, list, str, int, float, bool and None (a tuple becomes a list).

    Raises ConfigError that names `source` and the key path of anything else, and of a value that contains itself.
    """
    where = f"{source}: {dotted(path) or 'the job'}"
    if id(data) in inside or len(inside) > 100:
        raise ConfigError(f"{where}: nested too deeply, or a value that contains itself")
    inside = (*inside, id(data))
    if isinstance(data, dict):
        return {plain(k, source, path): plain(v, source, (*path, k), inside) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [plain(item, source, (*path, index), inside) for index, item in enumerate(data)]
    if isinstance(data, int) and data.bit_length() > 4096:
        raise ConfigError(f"{where}: {show(data)} is too large")
    if data is None or type(data) in (str, int, float, bool):
        return data
    kinds = "text, numbers, true/false, null, lists, maps"
    raise ConfigError(f"{where}: a {type(data).__name__} cannot stand in a job file; allowed: {kinds}")


def apply_overrides(data: dict[Any, Any], overrides: Sequence[str], places: Places) -> list[str]:
    """Set each `key.path=value` in `data` (changed in place) and note its place; returns what is wrong with them.

    A map that is missing, null or true/false is made on the way; a plain word (`strategy: ddp`) becomes `{name: word}`.
    """
    wrong = []
    for override in overrides:
        try:
            _apply(data, override, places)
        except ConfigError as error:
            wrong.append(str(error))
    return wrong


def _apply(data: dict[Any, Any], override: str, places: Places) -> None:
    key_path, equals, text = override.partition("=")
    keys = key_path.strip().split(".")
    source = f"override {show(f'{key_path}=' if is_hidden(tuple(keys)) else override)}"
    if not equals:
        raise ConfigError(f"{source}: no = in it; an override is key.path=value, such as optimizer.lr=1e-2")
    if not all(keys):
        raise ConfigError(
            f"{source}: {'no key before =' if not key_path.strip() else 'an empty key in the path'}; such as optimizer.lr=1e-2"
        )
    if not text.strip():
        raise ConfigError(f'{source}: no value after =; write null for none, "" for empty text')
    value, _ = parse_yaml(text, source)
    value = plain(value, source)
    here: Any = data
    path: tuple[str | int, ...] = ()
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        part: Any = key
        if isinstance(here, list):
            part = _index(key, len(here), source, ".".join(keys[:depth]))
        path = (*path, part)
        if last:
            here[part] = value
            break
        below = here[part] if isinstance(here, list) else here.get(part)
        if not isinstance(below, dict | list):
            here[part] = _opened(below, part, source, ".".join(keys[: depth + 1]), ".".join(keys))
            places[path] = "command line"
        here = here[part]
    for stale in [known for known in places if known[: len(path)] == path]:
        del places[stale]
    places[path] = "command line"


def _index(key: str, length: int, source: str, where: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < length:
        return int(key)
    allowed = f"an index from 0 to {length - 1}" if length else f"{where}=[...] sets it"
    raise ConfigError(f"{source}: {where} is a list of {length}; allowed: {allowed}")


def _opened(value: Any, key: str | int, source: str, where: str, whole: str) -> dict[str, Any]:
    if value is None or isinstance(value, bool):
        return {}
    if isinstance(value, str) and key in ("strategy", "precision"):
        return {"name": value}
    raise ConfigError(f"{source}: {where} is {show(value)}, not a map, so {whole} cannot be set")
