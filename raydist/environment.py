"""The job file's `env`: variables of the workers, and the secrets among them, which are never shown or written.

A secret is what a name like KEY, TOKEN, SECRET or PASSWORD holds, or what `${NAME}` takes from the environment in which raydist
was started. In the settings a literal secret reads `***`; in what raydist prints and writes, `hide` puts that in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from raydist.errors import ConfigError

MASK = "***"

_NAME = re.compile(r"(?:.*_)?[A-Z0-9]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?:_.*)?", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SHORTEST = 6
"""Shorter secrets are not looked for in text: they would be found in words that have nothing to do with them."""

_secrets: set[str] = set()
"""Of this process: what `hide` hides."""


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody's business: WANDB_API_KEY, but not TOKENIZERS_PARALLELISM."""
    return _NAME.fullmatch(name) is not None


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """As the settings show them: a secret is `***` unless it is made of references alone."""
    return {name: MASK if is_secret(name) and _REFERENCE.sub("", value) else value for name, value in env.items()}


def resolve(env: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """The values, each `${NAME}` taken from `there`; secrets are hidden from now on. ConfigError names all that is missing."""
    wrong = []
    values = {}
    for name, value in env.items():
        wrong += [
            f"env.{name} refers to ${{{asked}}}, which is not set where raydist was started; export {asked} there"
            for asked in _REFERENCE.findall(value)
            if asked not in there
        ]
        if value == MASK and is_secret(name):
            wrong.append(f"env.{name} is {MASK}: the value was left out when this file was written; write ${{{name}}}")
        values[name] = _REFERENCE.sub(lambda found: there.get(found[1], ""), value)
    if wrong:
        raise ConfigError("\n".join(wrong))
    keep_secret(secrets_of(env, values).values())
    return values


def secrets_of(env: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Those of the resolved `values` that must not be seen. A path that a harmless name refers to may be."""
    return {
        name: value
        for name, value in values.items()
        if is_secret(name)
        or any(is_secret(asked) for asked in _REFERENCE.findall(env[name]))
        or (_REFERENCE.search(env[name]) and not value.startswith(("/", "~")))
    }


def keep_secret(values: Iterable[str]) -> None:
    """Hide these values in what this process prints and writes from now on."""
    _secrets.update(value for value in values if len(value) >= _SHORTEST)


def hide(text: str) -> str:
    """`text` with `***` for every secret in it."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


@contextmanager
def applied(values: Mapping[str, str]) -> Iterator[None]:
    """Within it, this process has these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
