"""`raydist report` and `raydist watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raydist.errors import ConfigError


def report(
    paths: Annotated[
        list[str], typer.Argument(metavar="RUN|SWEEP...", help="Folders of runs or sweeps; several are compared.")
    ],
    out: Annotated[
        str | None, typer.Option("-o", "--out", help="The HTML file; default: report.html in the folder, or here for several.")
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write each chart as a picture, beside the page.")] = False,
) -> None:
    """Write one HTML page about runs or sweeps: it needs no network and no server."""
    from raydist import storage
    from raydist.report.build import collect, report

    where = report(paths, out)
    print(where)
    if png:
        from raydist.report.pictures import write_pictures

        if not storage.is_local(where):
            raise ConfigError(f"--png writes to local folders only, and {where} is none; give --out report.html")
        page = storage.local_path(where)
        for path in write_pictures(collect(paths)[2], page.with_name(f"{page.stem}-png")):
            print(path)


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder: <storage>/<name> of its job file.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show a run that another process or cluster makes, live, until it is over. It only reads the run's folder."""
    from raydist.watch import watch

    if "://" not in run:
        run = str(Path(run).expanduser())
    watch(run, once=once, every=every)
