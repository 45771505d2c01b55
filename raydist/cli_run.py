"""`raydist run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raydist.errors import ConfigError


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module; what follows is its own.")
    ],
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Processes, one a GPU, over all nodes.")] = 1,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster; without one, a local one is started.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to start all workers again after one has failed.")] = 0,
    tee: Annotated[str, typer.Option(metavar="RANKS", help="Whose output to show: 0, 0,2, all or none.")] = "0",
    log_dir: Annotated[Path, typer.Option(help="Where each run gets a folder with its logs, by attempt and rank.")] = Path(
        "runs"
    ),
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]", help="A variable of the workers; without a value, as it is here. May be repeated."
        ),
    ] = None,
    cpus_per_worker: Annotated[float, typer.Option(min=0.0, help="CPUs that a worker takes.")] = 1.0,
    gpus_per_worker: Annotated[str, typer.Option(metavar="N|auto", help="auto: one where the cluster has GPUs.")] = "auto",
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds from SIGTERM or SIGINT to SIGKILL.")] = 30.0,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show Ray's own messages.")] = False,
) -> None:
    """Run a script made for torchrun on Ray, unchanged. Exit code: that of the first rank that fails."""
    from raydist.runners.script import Script, run_script

    if gpus_per_worker != "auto" and not gpus_per_worker.isdigit():
        raise ConfigError(f"--gpus-per-worker {gpus_per_worker}: give auto or a whole number")
    run_script(
        Script(
            arguments=[*(["-m"] if module else []), script, *context.args],
            workers=workers,
            address=address,
            cpus=cpus_per_worker,
            gpus=None if gpus_per_worker == "auto" else int(gpus_per_worker),
            max_restarts=max_restarts,
            tee=tee,
            log_dir=log_dir,
            grace=grace,
            env=_variables(env or ()),
            verbose=verbose,
        )
    )


def _variables(given: list[str] | tuple[()]) -> dict[str, str]:
    found = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(f"--env {item}: {name or 'the name'} is not set here; write --env NAME=VALUE")
        found[name] = value if equals else os.environ[name]
    return found
