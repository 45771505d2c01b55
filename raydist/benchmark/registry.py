"""The benchmarks by name: which script under `jobs/bench` measures each, and the bar it must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.benchmark.rows import Bar
from raydist.errors import ConfigError

FOLDER = Path("jobs") / "bench"


@dataclass(frozen=True)
class Benchmark:
    """`what` in a phrase; `script` under `jobs/bench` writes its rows; several benchmarks may come from one script's runs."""

    name: str
    what: str
    script: str
    bar: Bar


_RAY = "ray train"

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("step", "step time, 2 workers", "runs.py", Bar("ratio", 1.02, 1.0, "torchrun")),
    Benchmark("start", "command to first step, embedded Ray", "runs.py", Bar("ratio", 0.8, 0.5, _RAY)),
    Benchmark("cluster_start", "command to first step, running cluster", "cluster_start.py", Bar("ratio", 0.8, 0.5, _RAY)),
    Benchmark("finish", "last step to exit", "runs.py", Bar("ratio", 0.7, 0.3, _RAY)),
    Benchmark("data", "reading parquet on two ranks", "data.py", Bar("speed-up", 1.5, 2.0, "ray")),
    Benchmark("ckpt", "step with saves beside it", "checkpoint.py", Bar("ratio", 1.05, 1.01, "no saving", "in the background")),
    Benchmark("resume", "first step at 99 % of an epoch ÷ at 1 %", "resume.py", Bar("ratio", 1.1, 1.0, "at 1 %", "at 99 %")),
    Benchmark("sweep", "12 short trials", "sweep.py", Bar("speed-up", 5.0, 10.0, "nested tune")),
    Benchmark("pipeline", "step time, stages", "pipeline.py", Bar("ratio", 1.03, 1.0, "torchrun")),
    Benchmark("bubble", "stages that sleep", "pipeline.py", Bar("ratio", 1.10, 1.03, "limit")),
    Benchmark("scale", "overhead of a step that sleeps", "scale.py", Bar("value", 2.0, 1.0)),
    Benchmark("memory", "peak resident memory", "runs.py", Bar("ratio", 1.05, 0.9, _RAY)),
)
NAMES = tuple(benchmark.name for benchmark in BENCHMARKS)


def find(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of these names, in the table's order; all without names. Raises ConfigError for an unknown one."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(f"no benchmark {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    return [benchmark for benchmark in BENCHMARKS if not names or benchmark.name in names]


def bar_of(name: str) -> Bar:
    """The bar of a benchmark."""
    return find([name])[0].bar


def find_folder(given: Path | None) -> Path:
    """The folder of the benchmarks' scripts: `given` or the current folder is a checkout of raydist, or that folder itself.

    Raises ConfigError when it is not there: the scripts are no part of the installed package.
    """
    start = (given or Path.cwd()).expanduser().absolute()
    for folder in (start / FOLDER, start, *(parent / FOLDER for parent in start.parents)):
        if (folder / "contenders").is_dir() and (folder / "runs.py").exists():
            return folder
    raise ConfigError(
        f"no benchmarks in {start}: their scripts are in the repository ({FOLDER}), not in the installed package. "
        "Run `raydist bench` in a checkout, or name one with --folder"
    )
