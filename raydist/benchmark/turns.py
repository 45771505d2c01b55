"""What the scripts under `jobs/bench` share: their options, and contenders taking turns."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from raydist.benchmark.rows import Row

T = TypeVar("T")


def options(doc: str | None, names: Sequence[str], rounds: int, quick_rounds: int) -> argparse.Namespace:
    """The options of a script: `only` (the benchmarks to measure), `rounds`, `quick`, `json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(names), choices=list(names), metavar="NAME")
    parser.add_argument("--rounds", type=int, help=f"turns of each contender: {rounds}, or {quick_rounds} with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    given.rounds = given.rounds or (quick_rounds if given.quick else rounds)
    return given


def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int, what: str = "") -> dict[str, list[T]]:
    """Run each contender once a round, in turn (A B A B …), so that a machine that drifts meets all alike."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            began = time.monotonic()
            found[name].append(run())
            told = f"  {what} round {number + 1} of {rounds}: {name}, {time.monotonic() - began:.1f} s"
            print(told, file=sys.stderr, flush=True)
    return found


def write(rows: Sequence[Row], path: Path | None) -> None:
    """The rows as JSON, to `path` or to stdout."""
    text = json.dumps({"rows": [row.plain() for row in rows]}, indent=2, ensure_ascii=False) + "\n"
    if path is None:
        print(text)
    else:
        path.write_text(text)
