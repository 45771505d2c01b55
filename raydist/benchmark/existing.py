"""Scripts that can be run by themselves with options and JSON of their own: how to ask them, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydist.benchmark.rows import Row


@dataclass(frozen=True)
class Reader:
    """`arguments(rounds, quick)` for the script's command line, and `rows` of what it wrote."""

    arguments: Callable[[int | None, bool], list[str]]
    rows: Callable[[dict[str, Any]], list[Row]]


def _data_arguments(rounds: int | None, quick: bool) -> list[str]:
    contenders = ["--contenders", "raydist,ray"] if quick else []
    return ["--rows", "1000000" if quick else "2000000", "--repeats", str(rounds or (1 if quick else 3)), *contenders]


def _data_rows(found: dict[str, Any]) -> list[Row]:
    """Medians over the script's own turns: one figure of each contender."""
    contenders = found["contenders"]
    return [
        Row("data", case, "s", {name: [of[key]] for name, of in contenders.items()})
        for case, key in (("whole epoch", "epoch_s"), ("first batch", "first_s"))
    ]


def _checkpoint_arguments(rounds: int | None, quick: bool) -> list[str]:
    return ["--turns", str(rounds or (2 if quick else 5)), "--steps", "80" if quick else "120"]


def _checkpoint_rows(found: dict[str, Any]) -> list[Row]:
    values = {name: [1e3 * second for second in seconds] for name, seconds in found["seconds"].items()}
    return [Row("ckpt", "100 MB every 10 steps", "ms", values)]


READERS = {
    "data.py": Reader(_data_arguments, _data_rows),
    "checkpoint.py": Reader(_checkpoint_arguments, _checkpoint_rows),
}
