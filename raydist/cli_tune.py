"""`raydist tune lr` and `raydist tune batch`."""

from __future__ import annotations

from typing import Annotated

import typer

from raydist.cli_arguments import JobFile, Overrides

tune = typer.Typer(
    help="Find a job's learning rate or micro-batch size by short trials in this process. No run's folder is touched.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Png = Annotated[bool, typer.Option("--png", help="Also write the plot as a picture.")]


@tune.command("lr")
def tune_lr(
    job: JobFile,
    overrides: Overrides = None,
    low: Annotated[float, typer.Option(help="The rate of the first step.")] = 1e-6,
    high: Annotated[float, typer.Option(help="The rate of the last step.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps from the one to the other.")] = 100,
    png: _Png = False,
) -> None:
    """Learning-rate range test: raise the rate step by step, and see where the loss falls fastest. Exit code 1 when nowhere."""
    from raydist.cli import load
    from raydist.tuning import show
    from raydist.tuning.lr_range import range_test
    from raydist.tuning.trial import one_process

    config = load(job, overrides)
    with one_process(config) as world:
        test = range_test(config, world, low, high, steps)
    if world.is_main:
        print(show.lr_text(config, test))
        print(*show.write(config, "lr", show.lr_csv(test), show.lr_chart(test), png), sep="\n")
    if test.steepest is None:
        raise typer.Exit(1)


@tune.command("batch")
def tune_batch(
    job: JobFile,
    overrides: Overrides = None,
    largest: Annotated[int | None, typer.Option("--max", metavar="ROWS", help="Try no more rows than this.")] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Stop before a size needs more; else a GPU's, or what is free here.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps at each size; the first 3 are not timed.")] = 20,
    png: _Png = False,
) -> None:
    """Try micro-batches of 1, 2, 4, … rows until one does not fit: rows a second of each, the largest and the fastest."""
    from raydist.cli import load
    from raydist.tuning import show
    from raydist.tuning.micro_batch import try_sizes
    from raydist.tuning.trial import one_process

    config = load(job, overrides)
    with one_process(config) as world:
        sizes = try_sizes(config, world, steps, largest, None if memory is None else memory * 1024)
    print(show.batch_text(config, sizes))
    print(*show.write(config, "batch", show.batch_csv(sizes), show.batch_chart(sizes), png), sep="\n")
