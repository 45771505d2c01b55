"""`raydist submit`, `jobs`, `logs` and `stop`: jobs on a cluster that runs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.errors import ConfigError, Stopped

Address = Annotated[
    str | None,
    typer.Option(
        envvar=["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"],
        metavar="http://HOST:PORT",
        help="The cluster's dashboard; without one, port 8265 of this machine.",
    ),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `raydist jobs` lists it.")]

PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_OURS = ("--no-wait", "--dry-run", "--exclude", "--python")


def submit(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND ARGUMENTS...", help="Such as: train job.yaml seed=1")],
    address: Address = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and return, instead of following it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Files to leave out, as in a .gitignore. May be repeated.")
    ] = None,
    python: Annotated[str, typer.Option(help="The cluster's Python, where raydist's requirements are installed.")] = "python",
) -> None:
    """Run a raydist command on a cluster, with this folder's files. Exit code 0 only when the job succeeded, else its own."""
    import raydist
    from raydist.plain_table import size
    from raydist.runners.needs import demands, own_arguments
    from raydist.runners.packing import describe, pack, write_zip

    arguments = [*command, *context.args]
    if late := [name for name in own_arguments(arguments) if name.split("=")[0] in _OURS]:
        raise ConfigError(f"submit: {late[0]} is submit's own option; put it before {arguments[0]}")
    root = Path(os.getcwd())
    wants = demands(root, arguments)
    package = pack(root, wants.needs, exclude or (), own=Path(raydist.__file__).parent)
    for line in [*describe(package), *wants.notes]:
        _say(line)
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            _say(f"compressed: {size(write_zip(package, Path(folder) / 'package.zip'))}; nothing was sent (--dry-run)")
        return
    from raydist.runners import jobs

    client = jobs.connect(address)
    grace = wants.config.failure.grace if wants.config is not None else 30.0
    job = jobs.submit(client, package, jobs.entrypoint(arguments, python), grace)
    if no_wait:
        _say(f"job {job} was sent; {_hints(job, address)}")
        print(job)
        return
    _say(f"job {job}")
    raise typer.Exit(_follow(client, job, address))


def jobs(address: Address = None) -> None:
    """List the jobs that were sent to a cluster, newest first."""
    from raydist.plain_table import aligned
    from raydist.runners import jobs as ray_jobs

    rows = ray_jobs.table(ray_jobs.connect(address))
    head = ["job", "status", "started", "for", "command"]
    print("\n".join(aligned([head, *rows], indent="")) if rows else "no job was sent to this cluster")


def logs(
    job: JobId,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends, and return its exit code.")] = False,
) -> None:
    """Print what a job has printed."""
    from raydist.runners import jobs as ray_jobs

    client = ray_jobs.connect(address)
    if follow:
        ray_jobs.details(client, job)
        raise typer.Exit(_follow(client, job, address))
    _write(ray_jobs.logs(client, job))


def stop(
    job: JobId,
    address: Address = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask, and return at once.")] = False,
) -> None:
    """Stop a job: it saves a checkpoint first, as on Ctrl-C, and the same submit goes on from there."""
    from raydist.runners import jobs as ray_jobs

    info = ray_jobs.stop(ray_jobs.connect(address), job, wait=not no_wait)
    _say(ray_jobs.verdict(info, job) if info.status.is_terminal() else f"job {job} was asked to stop")


def _follow(client: Any, job: str, address: str | None) -> int:
    """Show the log until the job ends; its exit code. Ctrl-C leaves the job alone."""
    from raydist.runners import jobs as ray_jobs

    try:
        info = ray_jobs.follow(client, job, _write)
    except KeyboardInterrupt:
        raise Stopped(f"job {job} goes on; {_hints(job, address)}") from None
    _say(ray_jobs.verdict(info, job))
    return ray_jobs.exit_code(info)


def _hints(job: str, address: str | None) -> str:
    where = f" --address {address}" if address else ""
    return f"`raydist logs {job} -f{where}` follows it, `raydist stop {job}{where}` stops it"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(f"raydist: {text}", file=sys.stderr, flush=True)
