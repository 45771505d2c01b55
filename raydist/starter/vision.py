"""`raydist init --kind vision`: a folder of images, one sub-folder a class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from raydist.data.files import SUFFIXES, list_files
from raydist.data.images import class_of, classes_of
from raydist.errors import ConfigError, DataError
from raydist.starter.starter import TAIL, Starter, batch_size, class_names, epochs_for, reference, run_name, task_source, value

EVAL_FOLDERS = ("eval", "val", "valid", "validation", "test")
LOOKED_AT = 200
MOST_COPIED = 500 * 2**20
LONGEST_SIDE = 96


def vision(data: str, evaluation: str | None, folder: Path) -> Starter:
    """The starter for images in class folders. ConfigError: none there, no classes, too few, or one that cannot be read."""
    root = Path(data).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"--data: {data} is no folder; --kind vision wants a folder with one sub-folder of images for each class"
        )
    train = root
    if evaluation is None and (root / "train").is_dir():
        found = [root / name for name in EVAL_FOLDERS if (root / name).is_dir()]
        if found:
            train, evaluation = root / "train", str(found[0])
    files, classes, sizes = _look(str(train), "--data")
    counts = Counter(class_of(file) for file in files)
    size, mode = _size(sizes), "L" if all(kind in ("1", "L") for *_, kind in sizes) else "RGB"
    starter = Starter("", task_source("vision"))
    starter.notes = [
        f"{len(files)} images of {len(classes)} classes, {min(counts.values())} to {max(counts.values())} images each"
    ]
    if len({(height, width) for height, width, _ in sizes}) > 1 or size != sizes[0][:2]:
        starter.notes.append(f"every image is resized to {size[0]} x {size[1]} (height x width)")
    if evaluation is not None:
        others = _look(evaluation, "--eval")[1]
        if others != classes:
            strange = sorted(set(others) ^ set(classes))
            raise ConfigError(
                f"--eval: {evaluation} and {train} must have the same class folders; in one only: {', '.join(strange[:5])}"
            )
        paths, rows = [reference(str(train), folder), reference(evaluation, folder)], len(files)
    else:
        held_out = _split(files, starter, train)
        paths, rows = ["split/train", "split/eval"], len(files) - held_out
    starter.job = _job(run_name(str(root)), paths, rows, classes, size, mode, starter.notes)
    return starter


def _look(path: str, key: str) -> tuple[tuple[Any, ...], tuple[str, ...], list[tuple[int, int, str]]]:
    """Files, classes, and (height, width, mode) of some of the images."""
    try:
        files = list_files(path, "images").files
        classes = classes_of(files)
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from error
    if len(classes) < 2:
        found = f"only {classes[0]!r}" if classes else "no sub-folder"
        raise ConfigError(f"{key}: {path} needs one sub-folder of images for each class, at least two; it has {found}")
    from PIL import Image, UnidentifiedImageError

    sizes = []
    for at in np.linspace(0, len(files) - 1, min(len(files), LOOKED_AT), dtype=int):
        try:
            with Image.open(files[at].path) as image:
                image.load()
                sizes.append((image.height, image.width, image.mode))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{key}: {files[at].path}: this image cannot be read ({error}); mend or remove it") from error
    return files, classes, sizes


def _size(sizes: list[tuple[int, int, str]]) -> tuple[int, int]:
    """The images' own size where it is one and small; else the median, made to fit, in multiples of 8."""
    height, width = (int(np.median([one[side] for one in sizes])) for side in (0, 1))
    if len({one[:2] for one in sizes}) == 1 and max(height, width) <= LONGEST_SIDE:
        return height, width
    shrink = min(1.0, LONGEST_SIDE / max(height, width))
    return max(8, round(height * shrink / 8) * 8), max(8, round(width * shrink / 8) * 8)


def _split(files: tuple[Any, ...], starter: Starter, train: Path) -> int:
    """Plan copies of all images, of each class 15 % (at least one) for evaluation; how many those are."""
    total = sum(file.size for file in files)
    if total > MOST_COPIED:
        raise ConfigError(
            f"--data: {train} holds {total / 2**20:.0f} MiB, and init copies up to {MOST_COPIED / 2**20:.0f} MiB to hold "
            "some out: move some images of each class to another folder yourself and give it as --eval"
        )
    rng, held_out = np.random.default_rng(0), 0
    by_class: dict[str, list[Any]] = {}
    for file in files:
        by_class.setdefault(class_of(file), []).append(file)
    for name, members in by_class.items():
        if len(members) < 2:
            raise ConfigError(f"--data: class {name!r} has one image; two are the least: one to train on, one to evaluate")
        rest = set(rng.permutation(len(members))[: max(1, round(0.15 * len(members)))].tolist())
        held_out += len(rest)
        for at, file in enumerate(members):
            starter.copies[f"split/{'eval' if at in rest else 'train'}/{file.name}"] = Path(file.path)
    starter.notes.append(
        f"copied to split/: {len(files) - held_out} images to train on, {held_out} to evaluate (of each class 15 %)"
    )
    return held_out


def _job(
    name: str, paths: list[str], rows: int, classes: tuple[str, ...], size: tuple[int, int], mode: str, notes: list[str]
) -> str:
    batch = min(64, batch_size(rows))
    epochs = min(20, epochs_for(rows, batch, 600))
    lines = ["# What this trains: the class of an image, which is the folder it is in. Written by `raydist init`; it is yours."]
    lines += [f"# - {note}" for note in notes]
    lines += [
        f"# Classes: {class_names(classes)}. File endings that are read: {', '.join(SUFFIXES['images'])}.",
        f"name: {value(name)}",
        "seed: 0",
        "task:",
        "  target: ./task.py:VisionTask         # the model and its loss: see there",
        f"  args: {{classes: {len(classes)}, channels: {1 if mode == 'L' else 3}, width: 32}}",
        "data:",
    ]
    for part, path, more in (("train", paths[0], ", shuffle: true"), ("eval", paths[1], "")):
        lines.append(
            f"  {part}: {{path: {value(path)}, format: images{more}, images: {{size: [{size[0]}, {size[1]}], mode: {mode}}}}}"
        )
    lines += [
        f"batch: {{global_size: {batch}}}           # rows of one optimizer step, over all workers",
        f"train: {{epochs: {epochs}, eval_every: {{epochs: 1}}}}",
        "precision: fp32                     # bf16 is faster on GPUs that have it",
    ]
    warmup = min(50, max(1, rows * epochs // batch // 10))
    return "\n".join(lines) + "\n" + TAIL.format(lr="2.0e-3", warmup=warmup, best="eval_accuracy", mode="max")
