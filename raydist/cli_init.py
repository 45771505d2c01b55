"""`raydist init`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.errors import ConfigError

if TYPE_CHECKING:
    from raydist.starter.starter import Starter


class Kind(StrEnum):
    """What is trained."""

    TABULAR = "tabular"
    VISION = "vision"
    TEXT = "text"
    CUSTOM = "custom"


class Predict(StrEnum):
    """How a target is read."""

    CLASS = "class"
    NUMBER = "number"


TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")


def init(
    kind: Annotated[Kind | None, typer.Option(help="What to train; without it, what the data looks like.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Parquet, CSV or JSON lines (tabular), a folder of image folders (vision), a text file (text)."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="tabular: the column to predict.")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Data to evaluate on; without it, some of --data is held out.")
    ] = None,
    predict: Annotated[
        Predict | None, typer.Option(help="tabular: what the target is, where a look at it may be wrong.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write a job file and a task file that train as they are, from a look at the data."""
    starter = _starter(kind, data, target, evaluation, predict, out.expanduser())
    for path in starter.write(out.expanduser(), force):
        typer.echo(f"wrote {path}")
    for note in starter.notes:
        typer.echo(f"  {note}")
    job = out / "job.yaml"
    typer.echo(f"train it with: raydist train {job}  (--local: in this process, without Ray)")


def _starter(
    kind: Kind | None, data: str | None, target: str | None, evaluation: str | None, predict: Predict | None, out: Path
) -> Starter:
    kind = kind or _kind(data)
    if kind is Kind.CUSTOM:
        if data is not None or evaluation is not None:
            raise ConfigError("--kind custom looks at no data: leave --data away, or give --kind tabular, vision or text")
    elif data is None:
        raise ConfigError(f"--kind {kind} needs --data: the data to look at")
    if kind is not Kind.TABULAR and (target is not None or predict is not None):
        raise ConfigError(f"--target and --predict are for --kind tabular, and this is {kind}")
    if data is None:
        from raydist.starter.text import custom

        return custom()
    if kind is Kind.VISION:
        from raydist.starter.vision import vision

        return vision(data, evaluation, out)
    if kind is Kind.TEXT:
        from raydist.starter.text import text

        return text(data, evaluation, out)
    from raydist.starter.tabular import tabular

    return tabular(data, target, evaluation, out, predict)


def _kind(data: str | None) -> Kind:
    """What the data looks like, by its names."""
    if data is None:
        raise ConfigError("give --data (a table, a folder of images, a text file), or --kind custom for a job without any")
    if data.lower().endswith(TEXT_ENDINGS):
        return Kind.TEXT
    folder = Path(data).expanduser()
    if folder.is_dir():
        from raydist.data.files import SUFFIXES

        if any(path.suffix.lower() in SUFFIXES["images"] for path in folder.rglob("*")):
            return Kind.VISION
    return Kind.TABULAR
