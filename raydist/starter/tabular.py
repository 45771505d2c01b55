"""`raydist init --kind tabular`: what is predicted, from which columns, and how the table is cut into train and eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.errors import ConfigError
from raydist.starter.look import MOST_CATEGORIES, Column, look, nearest, read_table, without_nan
from raydist.starter.starter import TAIL, Starter, batch_size, class_names, epochs_for, reference, run_name, task_source, value

USUAL_TARGETS = ("label", "target", "class", "y")
FEW = 20
"""Integers of at most so many values are classes."""
LEAST_KEPT = 0.8
"""Columns with holes are left out until so many of the rows have no hole."""


def tabular(data: str, target: str | None, evaluation: str | None, folder: Path, predict: str | None) -> Starter:
    """The starter for a table. ConfigError: nothing to predict, or nothing to predict it from."""
    raw = read_table(data)
    table = without_nan(raw)
    target = _target(table, target)
    classes = _classes(table, target, predict)
    columns = [look(table, name) for name in table.column_names if name != target]
    if evaluation is not None:  # the files stay as they are, so NaN cannot become null
        columns = [_as_it_is(raw, column) for column in columns]
    columns, kept = _with_few_holes(table, target, columns)
    used = [column for column in columns if column.use]
    if not used:
        left_out = "; ".join(f"{column.name}: {column.why}" for column in columns) or "it has no other column"
        raise ConfigError(f"--data: {data} has no column to predict {target!r} from ({left_out})")
    starter = Starter("", task_source("tabular"), notes=_notes(table, target, classes, columns, kept))
    table = table.filter(_whole(table, [target, *(column.name for column in used)]))
    if table.num_rows < 10:
        raise ConfigError(f"--data: {data} has {table.num_rows} rows without missing values; 10 are the least to train on")
    if evaluation is None:
        parts = _split(table, [target] * bool(classes) + [c.name for c in used if c.use == "category"])
        starter.tables = dict(zip(("split/train.parquet", "split/eval.parquet"), parts, strict=True))
        paths, rows = list(starter.tables), parts[0].num_rows
        starter.notes.append(f"{parts[1].num_rows} of {table.num_rows} rows, picked at random, are held out for evaluation")
    else:
        _same_columns(evaluation, table, target, used, classes)
        paths, rows = [reference(data, folder), reference(evaluation, folder)], table.num_rows
    starter.job = _job(run_name(data), paths, rows, table, target, classes, used, starter.notes)
    return starter


def _target(table: pa.Table, target: str | None) -> str:
    names = table.column_names
    shown = ", ".join(names[:30]) + (" …" if len(names) > 30 else "")
    if target is None:
        usual = [name for name in names if name.lower() in USUAL_TARGETS]
        if len(usual) != 1:
            raise ConfigError(f"which column is to be predicted? Give --target NAME, one of: {shown}")
        target = usual[0]
    if target not in names:
        raise ConfigError(f"--target: no column {target!r}{nearest(target, names)}; the columns are: {shown}")
    return target


def _classes(table: pa.Table, target: str, predict: str | None) -> list[object] | None:
    """The values of a target that is a class, sorted; None for one that is a number."""
    column = table.column(target).drop_null()
    kind = column.type
    if not len(column):
        raise ConfigError(f"--target: column {target!r} has no value in any row")
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (number or text or pa.types.is_boolean(kind)):
        raise ConfigError(f"--target: column {target!r} holds {kind} values; a target is a number, a text or true/false")
    values = sorted(pc.unique(column).to_pylist())
    if len(values) == 1:
        raise ConfigError(f"--target: column {target!r} is {values[0]!r} in every row, so there is nothing to learn")
    counted = values == list(range(len(values)))
    if number and predict != "class":
        few = len(values) <= FEW and len(column) >= 5 * len(values)
        if predict == "number" or not few or (pa.types.is_floating(kind) and not counted):
            return None
    if predict == "number":
        raise ConfigError(f"--predict number: column {target!r} holds {kind} values, not numbers")
    if pa.types.is_floating(kind) and not counted:
        raise ConfigError(f"--predict class: column {target!r} holds fractions or gaps; make it integers or texts")
    if len(values) > MOST_CATEGORIES or (text and len(values) > len(column) / 2):
        raise ConfigError(
            f"--target: column {target!r} has {len(values)} different values in {len(column)} rows: an id or free text, "
            "no classes"
        )
    return values


def _as_it_is(raw: pa.Table, column: Column) -> Column:
    if column.use and column.missing > raw.column(column.name).null_count:
        return replace(column, use="", why="NaN or infinite values (make them empty, and they are dropped or left out)")
    return column


def _with_few_holes(table: pa.Table, target: str, columns: list[Column]) -> tuple[list[Column], int]:
    """Columns with most holes are left out until LEAST_KEPT of the rows are whole; the rows that are."""
    has_target = pc.sum(table.column(target).is_valid()).as_py()
    while True:
        used = [column for column in columns if column.use]
        kept = pc.sum(_whole(table, [target, *(column.name for column in used)])).as_py() or 0
        worst = max(used, key=lambda column: column.missing, default=None)
        if worst is None or not worst.missing or kept >= LEAST_KEPT * has_target:
            return columns, kept
        why = f"{worst.missing} of {table.num_rows} rows have no value there"
        columns = [replace(column, use="", why=why) if column is worst else column for column in columns]


def _whole(table: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    mask = pc.is_valid(table.column(names[0]))
    for name in names[1:]:
        mask = pc.and_(mask, pc.is_valid(table.column(name)))
    return mask


def _split(table: pa.Table, complete: list[str]) -> tuple[pa.Table, pa.Table]:
    """Shuffled, cut 85 : 15 (at most 10,000 rows to evaluate). Every value of the columns `complete` is in the first part."""
    order = np.random.default_rng(0).permutation(table.num_rows)
    held_out = np.zeros(table.num_rows, dtype=bool)
    held_out[order[: min(10_000, max(2, round(0.15 * table.num_rows)))]] = True
    for name in complete:
        codes = table.column(name).combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
        lost = np.setdiff1d(codes, codes[~held_out])
        held_out &= ~np.isin(codes, lost)
    train, rest = (table.take(order[held_out[order] == part]) for part in (False, True))
    return train, rest


def _same_columns(evaluation: str, table: pa.Table, target: str, used: list[Column], classes: list[object] | None) -> None:
    """ConfigError when the evaluation data lacks a column, or has a category that the training data lacks."""
    other = read_table(evaluation, "--eval")
    for name in (target, *(column.name for column in used)):
        if name not in other.column_names:
            raise ConfigError(f"--eval: {evaluation} has no column {name!r}{nearest(name, other.column_names)}")
    for name in [target] * bool(classes) + [column.name for column in used if column.use == "category"]:
        new = set(pc.unique(other.column(name).drop_null()).to_pylist()) - set(pc.unique(table.column(name)).to_pylist())
        if new:
            shown = ", ".join(repr(one) for one in sorted(new, key=str)[:5])
            raise ConfigError(f"--eval: column {name!r} has values that the training data does not have: {shown}")


def _notes(table: pa.Table, target: str, classes: list[object] | None, columns: list[Column], kept: int) -> list[str]:
    what = f"one of {len(classes)} classes" if classes else "a number"
    notes = [f"{table.num_rows} rows; {target} is predicted: {what}"]
    notes += [f"left out: {column.name} ({column.why})" for column in columns if not column.use]
    if kept < table.num_rows:
        notes.append(f"{table.num_rows - kept} rows with a missing value in the other columns are left out")
    return notes


def _job(
    name: str, paths: list[str], rows: int, table: pa.Table, target: str, classes: list[object] | None, used: list[Column],
    notes: list[str],
) -> str:  # fmt: skip
    numbers = {column.name: column.width for column in used if column.use == "number"}
    categories = {c.name: pc.count_distinct(table.column(c.name)).as_py() for c in used if c.use == "category"}
    scaled = [column.name for column in used if column.scale]
    index = list(categories)
    if classes is None:
        scaled.append(target)
    elif classes != list(range(len(classes))) or pa.types.is_boolean(table.schema.field(target).type):
        index.append(target)
    size = batch_size(rows)
    width = 64 if rows < 5_000 else 128 if rows < 50_000 else 256
    args: dict[str, object] = {
        "numbers": numbers,
        "categories": categories,
        "target": target,
        "classes": classes and len(classes),
    }
    lines = [f"# What this trains: {target}, predicted from {len(used)} columns. Written by `raydist init`; it is yours."]
    lines += [f"# - {note}" for note in notes]
    lines += _meaning(table, target, classes)
    lines += [
        f"name: {value(name)}",
        "seed: 0",
        "task:",
        "  target: ./task.py:TabularTask       # the model and its loss: see there",
        "  args:",
        *(f"    {key}: {value(one)}" for key, one in args.items() if one is not None),
        f"    hidden: [{width}, {width}]                  # widths of the hidden layers",
        "data:",
    ]
    for part, path, more in (("train", paths[0], ", shuffle: true"), ("eval", paths[1], "")):
        names = value([*numbers, *categories, target])
        lines += [f"  {part}:", f"    {{path: {value(path)}{more}, nulls: drop, columns: {names}}}"]
    fit = {"normalize": scaled, "index": index}
    lines += ["  fit:                              # learned from the training data, kept in the checkpoint"]
    lines += [f"    {key}: {value(names)}" for key, names in fit.items() if names]
    best = "eval_accuracy" if classes else "eval_r2"
    epochs = epochs_for(rows, size, 1500)
    lines += [
        f"batch: {{global_size: {size}}}           # rows of one optimizer step, over all workers",
        f"train: {{epochs: {epochs}, eval_every: {{epochs: 1}}, early_stop: {{metric: eval_loss, patience: 10}}}}",
    ]
    warmup = min(50, max(1, rows * epochs // size // 10))
    return "\n".join(lines) + "\n" + TAIL.format(lr="2.0e-3", warmup=warmup, best=best, mode="max")


def _meaning(table: pa.Table, target: str, classes: list[object] | None) -> list[str]:
    """What the classes' numbers mean, and how good a guess would be."""
    if classes is None:
        return [
            "# eval_r2: 0 for a model that always says the mean, 1 for a perfect one; the loss: squared standard deviations."
        ]
    column = table.column(target)
    most = max(entry["counts"] for entry in pc.value_counts(column).to_pylist()) / len(column)
    return [
        f"# Classes: {class_names(classes)}.",
        f"# Always saying the most frequent one is right {most:.1%} of the time.",
    ]
