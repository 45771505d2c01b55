"""`raydist plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raydist.cli_arguments import JobFile, Overrides
from raydist.errors import ConfigError


def plan(
    job: JobFile,
    overrides: Overrides = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE", help="Nodes to place workers on, such as 2x8xA100 or 4x16cpu; else this machine."),
    ] = None,
    address: Annotated[str | None, typer.Option(help="Place the workers on the cluster there, as it is now.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Say what a job will do, without a cluster: batches, steps, memory, placement. Exit code 1 when it cannot start there."""
    from raydist.cli import load
    from raydist.planning.nodes import parse_nodes, this_machine
    from raydist.planning.plan import make_plan
    from raydist.planning.show import text

    if nodes and address:
        raise ConfigError("--nodes describes nodes and --address asks a cluster for them: give one of the two")
    config = load(job, overrides)
    if address:
        from raydist.doctor.run import cluster_nodes

        there = cluster_nodes(address)
    else:
        there = parse_nodes(nodes) if nodes else this_machine()
    made = make_plan(config, there)
    print(json.dumps(made, indent=2) if as_json else text(made))
    if made["problems"]:
        raise typer.Exit(1)
