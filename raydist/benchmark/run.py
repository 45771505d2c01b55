"""Runs the scripts of the benchmarks that were asked for, one after the other, and gathers their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydist.benchmark.existing import READERS
from raydist.benchmark.registry import Benchmark
from raydist.benchmark.rows import Row, row_from
from raydist.errors import RaydistError

Say = Callable[[str], None]


@dataclass
class Found:
    """Rows of all benchmarks, why those that have none have none, and the seconds that each script took."""

    rows: list[Row] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def run_all(benchmarks: Sequence[Benchmark], folder: Path, rounds: int | None, quick: bool, say: Say) -> Found:
    """Run each script once for all its benchmarks. One that fails or is missing becomes a problem; the others go on."""
    found = Found()
    for script in dict.fromkeys(benchmark.script for benchmark in benchmarks):
        names = [benchmark.name for benchmark in benchmarks if benchmark.script == script]
        if not (folder / script).exists():
            found.problems.update(dict.fromkeys(names, f"its script {folder.name}/{script} is missing"))
            continue
        say(f"{', '.join(names)}: {script}")
        began = time.monotonic()
        try:
            rows = run_script(folder / script, names, rounds, quick)
        except RaydistError as error:
            found.problems.update(dict.fromkeys(names, str(error)))
            continue
        finally:
            found.seconds[script] = time.monotonic() - began
        found.rows += [row for row in rows if row.bench in names]
        given = {row.bench for row in rows}
        found.problems.update({name: f"{script} wrote no row of it" for name in names if name not in given})
    order = [benchmark.name for benchmark in benchmarks]
    found.rows.sort(key=lambda row: order.index(row.bench))
    return found


def run_script(script: Path, names: Sequence[str], rounds: int | None, quick: bool) -> list[Row]:
    """The rows that a script writes. Raises RaydistError with its last words when it fails or writes something else."""
    reader = READERS.get(script.name)
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch:
        out = Path(scratch) / "rows.json"
        arguments = own_arguments(names, rounds, quick) if reader is None else reader.arguments(rounds, quick)
        root = str(script.parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        done = subprocess.run(
            [sys.executable, str(script), *arguments, "--json", str(out)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RaydistError(f"{script.name} ended with {done.returncode}; what it said is above")
        return read_rows(script.name, out)


def own_arguments(names: Sequence[str], rounds: int | None, quick: bool) -> list[str]:
    """What a script that writes rows itself understands (`turns.options`)."""
    return ["--only", *names, *(["--rounds", str(rounds)] if rounds else []), *(["--quick"] if quick else [])]


def read_rows(script: str, path: Path) -> list[Row]:
    """The rows in the JSON file that `script` wrote."""
    try:
        plain: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RaydistError(f"{script} wrote no JSON: {error}") from error
    if "rows" in plain and isinstance(plain["rows"], list):
        return [row_from(row) for row in plain["rows"]]
    if script not in READERS:
        raise RaydistError(f'{script} wrote JSON without "rows": {", ".join(plain)}')
    try:
        return READERS[script].rows(plain)
    except KeyError as error:
        raise RaydistError(f"{script} wrote JSON without {error}") from error
