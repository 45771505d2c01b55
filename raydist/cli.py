"""The command line. Exit codes: 0 finished, 1 training failed, 2 the job file or the command is wrong, 3 interrupted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydist import cli_jobs, cli_report
from raydist.cli_arguments import JobFile, Overrides
from raydist.cli_bench import bench
from raydist.cli_doctor import doctor
from raydist.cli_init import init
from raydist.cli_plan import plan
from raydist.cli_run import run
from raydist.cli_sweep import sweep
from raydist.cli_tune import tune
from raydist.environment import hide
from raydist.errors import ConfigError, Interrupted, RaydistError, Stopped

if TYPE_CHECKING:
    from raydist.config import JobConfig

app = typer.Typer(
    help="Train a PyTorch model from one job file: in one process, under torchrun, or on a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_WRONG_COMMAND: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of what the parser raises: click's own, or the one that newer typer releases bring along."""

_CTRL_C = 130


@app.command()
def train(
    job: JobFile,
    overrides: Overrides = None,
    local: Annotated[
        bool, typer.Option("--local", help="Train in this process, without Ray: the same run, with one worker.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster; without one, a local one is started.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on although settings changed. A run or checkpoint folder: go on from there.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start anew.")] = False,
    dashboard: Annotated[
        str | None, typer.Option(metavar="HOST", help="Show Ray's dashboard of the local cluster at this IP: 127.0.0.1.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show Ray's own messages and tracebacks.")] = False,
) -> None:
    """Train a job. A run that was interrupted goes on where it was; one that is finished is left alone."""
    config = load(job, overrides)
    from raydist.runners.local import train_local, under_torchrun
    from raydist.screen import Screen

    screen = Screen()
    torchrun = under_torchrun()
    main = not torchrun or os.environ.get("RANK") == "0"
    if main:
        announce(config, screen)
    if dashboard is not None and (torchrun or local):
        raise ConfigError("--dashboard is Ray's, and this run is without Ray (--local, torchrun)")
    if torchrun or local:
        summary = train_local(config, resume, fresh, screen)
    else:
        from raydist.runners.ray_train import train_ray

        summary = train_ray(config, resume, fresh, address=address, screen=screen, verbose=verbose, dashboard=dashboard)
    if main:
        screen.table(summary)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The keys as a Markdown page instead.")] = False,
) -> None:
    """Print the JSON Schema of a job file, for editors."""
    if markdown:
        from raydist.config_reference import markdown as page

        print(page(), end="")
        return
    from raydist.config import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run folder, or a checkpoint folder in it.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the newest.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights (train.ema) instead of the plain ones.")] = False,
) -> None:
    """Write a run's weights as safetensors, with plain parameter names."""
    from raydist.export import export_weights

    print(export_weights(run, out, best=best, ema=ema))


app.command()(init)
app.command()(sweep)
app.command()(plan)
app.command()(doctor)
app.command(context_settings=cli_jobs.PASS_ON)(run)
app.command(context_settings=cli_jobs.PASS_ON)(cli_jobs.submit)
app.command()(cli_jobs.jobs)
app.command()(cli_jobs.logs)
app.command()(cli_jobs.stop)
app.command()(cli_report.report)
app.command()(cli_report.watch)
app.command()(bench)
app.add_typer(tune, name="tune")


def load(job: Path, overrides: list[str] | None) -> JobConfig:
    """The job file with overrides. Modules in the current folder and beside the job file can be imported, as by `python -m`."""
    from raydist.config import load_config

    for folder in (str(Path.cwd()), str(job.expanduser().absolute().parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    return load_config(job, overrides or ())


def announce(config: JobConfig, screen: Any) -> None:
    """Say which files are meant: relative paths were resolved against the job file's folder."""
    for part, data in (("train", config.data.train), ("eval", config.data.eval)):
        if data is not None:
            where = data.path if data.path is not None else data.target
            screen.say(f"data.{part}: {where if isinstance(where, str) else ', '.join(where or [])}")
    screen.say(f"run: {config.storage.rstrip('/')}/{config.name}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:] if arguments is None else arguments))
    return guarded(lambda: app(args=arguments, standalone_mode=False, prog_name="raydist"), verbose)


def guarded(command: Callable[[], Any], verbose: bool = False) -> int:
    """Run `command`; what it raises becomes one message on stderr and an exit code."""
    try:
        code = command()
        if code == _CTRL_C:  # newer typer releases catch it and give back an exit code
            raise KeyboardInterrupt
    except typer.Exit as done:
        return done.exit_code
    except _WRONG_COMMAND as error:
        error.show()
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("raydist: stopped at once; the last committed checkpoint stays good", file=sys.stderr)
        return _CTRL_C
    except (Interrupted, Stopped) as stopped:
        print(hide(f"raydist: {stopped}"), file=sys.stderr)
        return stopped.exit_code
    except RaydistError as error:
        _tell(error, verbose)
        return error.exit_code
    except Exception as error:
        _tell(error, True)
        return 1
    return code if isinstance(code, int) else 0


def _tell(error: Exception, traceback: bool) -> None:
    if traceback:
        import traceback as tracebacks

        sys.stderr.write(hide("".join(tracebacks.format_exception(error))))
    kind = "" if isinstance(error, RaydistError) else f"{type(error).__name__}: "
    title = "wrong job or command" if isinstance(error, ConfigError) else "failed"
    print(hide(f"raydist: {title}: {kind}{error}"), file=sys.stderr)
