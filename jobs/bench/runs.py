"""Whole runs on two workers: step time, command to first step, last step to exit, and memory, of every contender.

    python jobs/bench/runs.py [--only step start finish memory] [--rounds N] [--quick] [--json FILE]

The first turn of the digits is not timed: it fills the page cache, and the memory is watched in it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from starting import Runs, same_losses, write_digits

from raydist.benchmark.command import Measured
from raydist.benchmark.rows import Row
from raydist.benchmark.turns import options, take_turns, write

ALL = ("raydist", "torchrun", "ray train", "accelerate")
WARM = {"digits_cnn": 66, "transformer": 10}


def digits_rows(folder: Path, names: list[str], rounds: int, quick: bool) -> list[Row]:
    from cases import case

    write_digits()
    made = case("digits_cnn", 220 if quick else 660)
    runs = Runs(folder)
    contenders = runs.contenders(made, ALL)
    rows = []
    watched = {name: (lambda run=run: run(memory=True)) for name, run in contenders.items()}
    first = take_turns(watched, 1, "memory")
    if "memory" in names:
        for what in ("worker", "all"):
            case_name = {"worker": "a worker", "all": "all processes"}[what]
            rows.append(Row("memory", case_name, "MiB", {n: [getattr(m[0], f"{what}_mb")] for n, m in first.items()}))
    if set(names) & {"step", "start", "finish"}:
        found = take_turns(contenders, rounds, "digits_cnn")
        note = same_losses(runs.losses)
        values = {name: [m.start_s for m in ms] for name, ms in found.items()}
        rows.append(Row("start", "digits_cnn", "s", values))
        rows.append(Row("finish", "digits_cnn", "s", {name: [m.finish_s for m in ms] for name, ms in found.items()}))
        rows.append(step_row("digits_cnn", found, note))
    return rows


def step_row(name: str, found: dict[str, list[Measured]], note: str) -> Row:
    values = {contender: [1e3 * m.step_s(WARM[name]) for m in ms] for contender, ms in found.items()}
    means = {contender: statistics.median(1e3 * m.mean_step_s(WARM[name]) for m in ms) for contender, ms in found.items()}
    return Row("step", name, "ms", values, note, more={"mean_ms": means})


def transformer_rows(folder: Path, rounds: int, quick: bool) -> list[Row]:
    from cases import case

    made = case("transformer", 30 if quick else 80)
    runs = Runs(folder)
    found = take_turns(runs.contenders(made, ("raydist", "torchrun") if quick else ALL), rounds, "transformer")
    return [step_row("transformer", found, same_losses(runs.losses))]


def main() -> int:
    asked = options(__doc__, ("step", "start", "finish", "memory"), rounds=5, quick_rounds=2)
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch:
        rows = []
        for part, wanted in (("digits", True), ("text", "step" in asked.only)):
            folder = Path(scratch) / part
            folder.mkdir()
            if wanted and part == "digits":
                rows += digits_rows(folder, asked.only, asked.rounds, asked.quick)
            elif wanted:
                rows += transformer_rows(folder, asked.rounds, asked.quick)
    write([row for row in rows if row.bench in asked.only], asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
