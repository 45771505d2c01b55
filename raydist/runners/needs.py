"""What a job needs of this machine, and what it expects on the cluster: the paths of its job file and command. No ray."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydist.config import JobConfig, diff_settings, load_config, parse_config, to_plain
from raydist.config_file import read_job_file
from raydist.environment import MASK, is_secret, masked
from raydist.errors import ConfigError
from raydist.runners.packing import Need

COMMANDS = ("train", "sweep", "run", "doctor", "plan")
"""raydist's commands that make sense on the cluster."""
_OF_A_JOB = ("train", "sweep")
"""Those that train what a job file says: they need the files that it names."""

_ELSEWHERE = "/" + "/".join(["elsewhere"] * 40)
"""No path of the job file stays the same when it is read as if the file were there, but for absolute ones."""
_OUTPUTS = re.compile(r"storage|loggers\.\d+\.dir")
_FILE_TARGET = re.compile(r"(?P<file>.+\.py):[^/]*")
_MODULE = re.compile(r"(?P<first>[A-Za-z_]\w*)[\w.]*[:.]\w[\w.]*")


@dataclass(frozen=True)
class Demands:
    """`needs` go into the package; `notes` say what must be on the cluster already."""

    needs: list[Need] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: JobConfig | None = None


def demands(root: Path, arguments: Sequence[str]) -> Demands:
    """What `raydist ARGUMENTS…`, run in the folder `root`, asks for. ConfigError when it could not run on a cluster."""
    if not arguments or arguments[0] not in COMMANDS:
        given = f"{arguments[0]!r} is none" if arguments else "none is given"
        raise ConfigError(
            f"submit: a command of raydist is needed ({', '.join(COMMANDS)}) and {given}; such as: submit train job.yaml"
        )
    for argument in arguments:
        if not _is_text(argument):
            raise ConfigError(f"submit: the argument {argument!r} is not UTF-8 and cannot be sent")
    for argument in own_arguments(arguments):
        if argument == "--address" or argument.startswith("--address="):
            raise ConfigError(f"submit: the job runs on the cluster that it is sent to; put --address before {arguments[0]}")
    _no_secrets(own_arguments(arguments))
    if arguments[0] == "run":
        return _of_script(root, arguments)
    named = [name for name in arguments[1:] if not name.startswith("-") and os.path.exists(root / name)]
    needs = [_need(root, name, [str(root / name)]) for name in named]
    if arguments[0] not in _OF_A_JOB:
        return Demands(needs)
    job = next((name for name in arguments[1:] if name.lower().endswith((".yaml", ".yml")) and "=" not in name), None)
    if job is None:
        raise ConfigError(f"submit {arguments[0]}: no job file (.yaml) is given")
    overrides = [a for a in arguments[1:] if not a.startswith("-") and "=" in a]
    if os.path.isabs(os.path.expanduser(job)):
        raise ConfigError(
            f"submit {arguments[0]}: {job} will not be at that place on the cluster; name it from the working directory {root}"
        )
    if _outside(root, str(root / job)):
        raise ConfigError(
            f"submit {arguments[0]}: {job} lies outside the working directory {root}; run submit in a folder that holds it"
        )
    config = load_config(root / job, overrides)
    data, _ = read_job_file(root / job)
    changes = diff_settings(parse_config(data, _ELSEWHERE, overrides), config)
    relative = {key: [b for a, b in zip(_texts(there), _texts(here), strict=True) if a != b] for key, there, here in changes}
    for key, paths in relative.items():
        if _OUTPUTS.fullmatch(key):
            raise ConfigError(
                f"{key}: {paths[0]} is written as a path from the job file; on the cluster that is in the package's temporary "
                f"copy, where results would be lost. Set a folder that all nodes share, or a URI: {key}=/mnt/shared/runs "
                f"or {key}=s3://bucket/runs"
            )
        needs.append(_need(root, key, [_file(path) for path in paths]))
    needs += _modules(root, (root / job).parent, config)
    return Demands(needs, _expected(config, relative), config)


def _no_secrets(arguments: Sequence[str]) -> None:
    """ConfigError for a literal secret in the command, which everybody who sees the cluster's jobs can read."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        found = _VARIABLE.fullmatch(f"--env={argument}" if before == "--env" else argument)
        if found and is_secret(found[1]) and masked({found[1]: found[2]})[found[1]] == MASK:
            raise ConfigError(
                f"submit: {found[1]} would stand in the job's command, which the dashboard and `raydist jobs` show to all; "
                f"set it on the cluster's head node instead, and give {found[1]}='${{{found[1]}}}'"
            )


_VARIABLE = re.compile(r"(?:env\.|--env=)([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_WITH_VALUE = {
    *("-w", "--workers", "--address", "--max-restarts", "--tee", "--log-dir", "--env"),
    *("--cpus-per-worker", "--gpus-per-worker", "--grace"),
}
"""Options of `raydist run` that take the next argument."""


def own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Those of raydist: what follows the script of `run` is the script's own."""
    return arguments[: _script_at(arguments)] if arguments[:1] == ["run"] else arguments


def _script_at(arguments: Sequence[str]) -> int:
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return at + 1 if arguments[at : at + 1] == ["--"] else at


def _of_script(root: Path, arguments: Sequence[str]) -> Demands:
    """`run`: the script, or the module where it is a file of `root`, and files and folders of `root` that arguments name."""
    at = _script_at(arguments)
    if at >= len(arguments):
        raise ConfigError("submit run: no script is given; such as: submit run --workers 4 script.py")
    options, script = arguments[1:at], arguments[at]
    module = "-m" in options or "--module" in options
    if module:
        needs = _module_files(root, script.split(".")[0], root, script)
    elif os.path.isabs(script) or _outside(root, str(root / script)) or not (root / script).is_file():
        raise ConfigError(f"submit run: there is no file {script} in {root}; only that folder's files are sent")
    else:
        needs = [_need(root, script, [str(root / script)])]
    for name in arguments[at + 1 :]:
        inside = name and not name.startswith("-") and not os.path.isabs(name) and not _outside(root, str(root / name))
        if inside and os.path.exists(root / name) and os.path.normpath(name) != os.curdir:
            needs.append(_need(root, name, [str(root / name)]))
    folders = [arguments[i + 1] for i in range(at - 1) if arguments[i] == "--log-dir"]
    folders += [option.partition("=")[2] for option in options if option.startswith("--log-dir=")]
    if not folders or not os.path.isabs(folders[-1]):
        return Demands(needs, ["the ranks' logs stay in the job's temporary folder; --log-dir names one that all nodes share"])
    return Demands(needs)


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in argument


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _file(path: str) -> str:
    found = _FILE_TARGET.fullmatch(path)
    return found["file"] if found else path


def _need(root: Path, key: str, paths: Sequence[str]) -> Need:
    """The need for these absolute paths or patterns. ConfigError for one outside `root`."""
    names: list[str] = []
    for path in paths:
        if _outside(root, path):
            raise ConfigError(
                f"{key}: {path} lies outside the working directory {root}, and only that is sent: run submit in a folder that "
                "holds both, or give an absolute path or a URI that is there on the cluster"
            )
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        names += [os.path.relpath(one, root) for one in found or [path]]
    return Need(key, tuple(names))


def _outside(root: Path, path: str) -> bool:
    return os.path.relpath(path, root).split(os.sep)[0] == os.pardir


def _modules(root: Path, beside: Path, config: JobConfig) -> list[Need]:
    """Python modules of the working directory that the job file's import paths name: git may ignore them."""
    needs = []
    for key, value in _leaves(config):
        found = _MODULE.fullmatch(value) if key.rsplit(".", 1)[-1] in ("target", "collate") else None
        if found is None:
            continue
        for folder in (root, beside):
            if sources := _module_files(folder, found["first"], root, key):
                needs += sources
                break
    return needs


def _module_files(folder: Path, name: str, root: Path, key: str) -> list[Need]:
    file, package = folder / f"{name}.py", folder / name
    if package.joinpath("__init__.py").is_file():
        sources = sorted(package.rglob("*.py"))
    else:
        sources = [file] if file.is_file() else []
    return [_need(root, key, [str(source) for source in sources])] if sources else []


def _leaves(config: JobConfig) -> list[tuple[str, str]]:
    """Key path and value of each text in the settings."""
    everything = diff_settings({}, to_plain(config))
    return [(key, text) for key, _, value in everything for text in _texts(value)]


def _expected(config: JobConfig, relative: dict[str, list[str]]) -> list[str]:
    """What the cluster's nodes must have: absolute paths, and the driver the variables that `env` refers to."""
    keys = ("path", "target", "collate", "dir")
    return [
        f"{key}: {path} is looked up on the cluster's nodes"
        for key, path in _leaves(config)
        if (key == "storage" or key.rsplit(".", 1)[-1] in keys) and path.startswith("/") and path not in relative.get(key, ())
    ]
