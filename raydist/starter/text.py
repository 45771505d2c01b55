"""`raydist init --kind text`, and `--kind custom`, which looks at no data."""

from __future__ import annotations

from pathlib import Path

from raydist.errors import ConfigError
from raydist.starter.starter import TAIL, Starter, epochs_for, reference, run_name, task_source, value

LEAST_BYTES = 4000
MOST_BYTES = 2 * 2**30


def text(data: str, evaluation: str | None, folder: Path) -> Starter:
    """The starter for one file of plain text. ConfigError: no file, empty, too short, or not text."""
    path = Path(data).expanduser()
    if evaluation is not None:
        raise ConfigError("--eval: --kind text holds out the last tenth of its file; leave --eval away")
    if not path.is_file():
        raise ConfigError(
            f"--data: {data} is {'a folder' if path.is_dir() else 'not there'}; --kind text wants one file of plain text"
        )
    size = path.stat().st_size
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise ConfigError(f"--data: {data} has {size} bytes; --kind text wants {LEAST_BYTES} to {MOST_BYTES}")
    try:
        with path.open("rb") as opened:
            start = opened.read(2**20)
    except OSError as error:
        raise ConfigError(f"--data: {data} cannot be read: {error}") from error
    if b"\0" in start:
        raise ConfigError(f"--data: {data} is no plain text (it has zero bytes); save it as UTF-8")
    context = 64 if size >= 100_000 else 32
    rows = size * 9 // 10 // context
    batch = 32 if rows > 320 else 8
    epochs = min(10, epochs_for(rows, batch, 800))
    steps = max(1, -(-rows // batch) * epochs)
    name = reference(str(path), folder)
    lines = [
        "# What this trains: a transformer that predicts each next byte of a text. Written by `raydist init`; it is yours.",
        f"# - {size} bytes; the last tenth is held out for evaluation",
        "# The loss is in nats a byte (exp(loss) is the perplexity); knowing nothing costs ln 256 = 5.5.",
        f"name: {value(run_name(data))}",
        "seed: 0",
        "task:",
        "  target: ./task.py:TextTask          # the model and its loss: see there",
        f"  args: {{context: {context}, dim: 96, heads: 4, layers: 2}}",
        "data:",
    ]
    for part, more in (("train", ", shuffle: true"), ("eval", "")):
        lines.append(
            f'  {part}: {{target: "./task.py:Windows", args: {{file: {value(name)}, split: {part}, context: {context}}}{more}}}'
        )
    lines += [
        f"batch: {{global_size: {batch}}}           # windows of one optimizer step, over all workers",
        f"train: {{epochs: {epochs}, eval_every: {{epochs: 1}}}}",
    ]
    job = "\n".join(lines) + "\n" + TAIL.format(lr="3.0e-3", warmup=min(50, max(1, steps // 10)), best="eval_loss", mode="min")
    return Starter(job, task_source("text"), notes=[f"{size} bytes; the last tenth is held out for evaluation"])


def custom() -> Starter:
    """A job and a task that train on made-up rows, to be filled with one's own."""
    job = """\
# A job with data, model and loss of your own: see the three marked places in task.py. It runs as it is, on made-up rows.
name: custom
seed: 0
task: {target: ./task.py:MyTask, args: {hidden: 64}}
data:
  train: {target: "./task.py:Rows", args: {rows: 2000, seed: 0}, shuffle: true}   # or files: {path: data/*.parquet, …}
  eval: {target: "./task.py:Rows", args: {rows: 500, seed: 1}}
batch: {global_size: 32}            # rows of one optimizer step, over all workers
train: {epochs: 5, eval_every: {epochs: 1}}
"""
    return Starter(job + TAIL.format(lr="1.0e-2", warmup=20, best="eval_loss", mode="min"), task_source("custom"))
