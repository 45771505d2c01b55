"""`raydist sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raydist.cli_arguments import Overrides


def sweep(
    job: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file, with a sweep section.")],
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster; without one, a local one is started.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was interrupted.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier sweep of this name aside and start anew.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show Ray's own messages and tracebacks.")] = False,
) -> None:
    """Train many trials of a job and find the best. Exit code 1 when no trial has a finite metric."""
    from raydist.cli import load
    from raydist.screen import Screen
    from raydist.sweep.run import run_sweep
    from raydist.sweep.table import result

    screen = Screen()
    journal = run_sweep(load(job, overrides), resume, fresh, address=address, screen=screen, verbose=verbose)
    for line in result(journal):
        screen.say(line)
