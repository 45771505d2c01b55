"""`raydist bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydist.errors import ConfigError

if TYPE_CHECKING:
    from raydist.benchmark.run import Found
    from raydist.benchmark.verdicts import Verdict


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; all without a name.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of every contender.")] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there, and the chart beside it (.html, .png).")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with baseline.json, by ratio; exit code 1 if worse.")] = False,
    save: Annotated[bool, typer.Option("--save-baseline", help="Make these figures the baseline.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="A checkout of raydist, where jobs/bench is; default: the current folder.")
    ] = None,
    names_only: Annotated[bool, typer.Option("--list", help="Print the benchmarks and their bars, and stop.")] = False,
) -> None:
    """Measure raydist and what one would use instead, in turn, on this machine, and print one table with ratios and bars."""
    from raydist.benchmark.registry import find, find_folder
    from raydist.benchmark.run import run_all
    from raydist.benchmark.show import text
    from raydist.benchmark.verdicts import check_baseline, judge, new_baseline, regressions
    from raydist.plain_table import aligned

    chosen = find(names or [])
    if names_only:
        print("\n".join(aligned([(b.name, b.bar.words(b.bar.bar), b.bar.against, b.what) for b in chosen], indent="")))
        return
    scripts = find_folder(folder)
    where = scripts / "baseline.json"
    if check and not where.exists():
        raise ConfigError(f"--check compares with {where}, which is not there; make it with --save-baseline")
    before: dict[str, Any] = check_baseline(json.loads(where.read_text()), str(where)) if where.exists() else {}
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--json: no folder {out.absolute().parent}")
    found = run_all(chosen, scripts, rounds, quick, _say)
    verdicts = [judge(row) for row in found.rows]
    print(text(verdicts, found.problems, chosen))
    if out is not None:
        _write(out, verdicts, found, quick)
    if save:
        where.write_text(json.dumps(new_baseline(verdicts, before), indent=2) + "\n")
        print(where)
    worse = regressions(verdicts, before) if check else []
    print("\n".join(["", "worse than the baseline:", *worse]) if worse else "", end="\n" if worse else "")
    sys.stdout.flush()
    if worse or found.problems:
        raise typer.Exit(1)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _write(out: Path, verdicts: list[Verdict], found: Found, quick: bool) -> None:
    """The figures as JSON, with the machine that they were measured on, and the chart."""
    from raydist.benchmark.machine import machine
    from raydist.benchmark.show import write_chart

    rows = [verdict.plain() for verdict in verdicts]
    plain = {"machine": machine(), "quick": quick, "rows": rows, "problems": found.problems, "seconds": found.seconds}
    out.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n")
    written, why = write_chart(verdicts, out.with_suffix(".html")) if verdicts else ([], "")
    print("\n".join(map(str, [out, *written])))
    if why:
        _say(why)
