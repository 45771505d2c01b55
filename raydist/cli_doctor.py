"""`raydist doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli_arguments import Overrides


def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.YAML]", help="A job file, to check its demands too.")] = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The cluster's head node; without one, this machine is examined.")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option(metavar="N|NAMES", help="How many nodes there must be, or which ones to examine.")
    ] = None,
    storage: Annotated[str | None, typer.Option(help="A folder or URI that must be shared (a job file names its own).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Examine a cluster, or this machine, in less than a minute. Exit code 1 when something would stop or spoil training."""
    from raydist.cli import load
    from raydist.doctor.report import failed, plain, text
    from raydist.doctor.run import examine

    config = None if job is None else load(job, overrides)
    where = storage if storage is None or "://" in storage else str(Path(storage).expanduser().absolute())
    findings = examine(address, config, where, nodes)
    print(json.dumps(plain(findings), indent=2) if as_json else text(findings))
    sys.stdout.flush()
    if failed(findings):
        raise typer.Exit(1)
