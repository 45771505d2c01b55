"""Reading speed: raydist's Ray Data stream against Ray's default path and a torch DataLoader, on the same parquet files.

    python jobs/bench/data.py --rows 2000000 --repeats 3 --json data.json

Two reader processes stand for two ranks. Contenders run in turn, `--repeats` times; medians are printed. For each one:

epoch_s     from the request (files not yet listed) to the last row of one epoch on every rank
first_s     from the request to the first batch on every rank
rows_s      rows per second after the first batch
cpu_s       CPU seconds of all processes: what reading costs, and a figure that a busy machine disturbs less
peak_mb     highest memory of all processes (proportional set size, shared memory included) above the idle level after the
            first turn, in which each contender runs once uncounted

Ray's default is what Ray Train does with `datasets=`: `read_parquet(...).streaming_split(ranks, equal=True)`, then
`iter_torch_batches`; once as it is and once with a local shuffle buffer of 8 global batches. It keeps no order over world sizes
and drops up to ranks - 1 rows. The DataLoader has one worker process a rank, which shuffles row groups and the rows of each,
and passes its 64 features as one tensor (65 tensors a batch take it ten times as long). raydist runs with `shuffle: true`;
`direct` means that each rank reads all files itself. Last comes the time to raydist's first batch when resuming
at 1, 50 and 99 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, IterableDataset

FEATURES = 64
FILES = 8
ROW_GROUP = 32_768
SHUFFLE_BATCHES = 8
SETTLE_S = 3.0
CONTENDERS = ("raydist", "raydist-direct", "ray", "ray-shuffle", "dataloader")


def write_files(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(FILES):
        low, high = rows * number // FILES, rows * (number + 1) // FILES
        columns: dict[str, Any] = {f"f{i:02d}": rng.random(high - low, dtype=np.float32) for i in range(FEATURES)}
        table = pa.table({**columns, "id": np.arange(low, high)})
        pq.write_table(table, folder / f"part-{number:02d}.parquet", row_group_size=ROW_GROUP)


class Hub:
    """Hands rank 0's object to every rank, as torch.distributed does in a run."""

    def __init__(self) -> None:
        import asyncio

        self.values: dict[tuple[str, int], Any] = {}
        self.changed = asyncio.Condition()

    async def put(self, key: tuple[str, int], value: Any) -> None:
        async with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    async def get(self, key: tuple[str, int]) -> Any:
        async with self.changed:
            await self.changed.wait_for(lambda: key in self.values)
            return self.values[key]


class Reader:
    """One rank."""

    def __init__(self, rank: int, ranks: int, hub: Any) -> None:
        self.rank, self.ranks, self.hub = rank, ranks, hub

    def warm(self) -> int:
        import ray.data
        import torch

        import raydist.data.ray_data

        torch.set_num_threads(1)
        return bool(ray.data) + bool(raydist.data.ray_data)

    def consume(
        self, name: str, folder: str, batch: int, run: str, given: Any, began: float, at: float | None
    ) -> dict[str, Any]:
        """Read one epoch, or with `at` the first batch at that part of it. Times in seconds since `began`."""
        first, end, rows, total = 0.0, 0.0, 0, 0
        for ids in self.batches(name, folder, batch, run, given, at):
            end = time.time() - began
            first = first or end
            rows += len(ids)
            total += int(ids.sum())
            if at is not None:
                break
        return {"first": first, "end": end, "rows": rows, "sum": total}

    def batches(self, name: str, folder: str, batch: int, run: str, given: Any, at: float | None) -> Iterator[Any]:
        if name.startswith("raydist"):
            yield from self.raydist(name, folder, batch, run, at)
        elif name == "dataloader":
            data = Files(folder, self.rank, self.ranks, batch // self.ranks)
            yield from (b["id"] for b in DataLoader(data, batch_size=None, num_workers=1))
        else:
            buffer = SHUFFLE_BATCHES * batch if name == "ray-shuffle" else None
            yield from (
                b["id"] for b in given.iter_torch_batches(batch_size=batch // self.ranks, local_shuffle_buffer_size=buffer)
            )

    def raydist(self, name: str, folder: str, batch: int, run: str, at: float | None) -> Iterator[Any]:
        import ray

        from raydist.config import DatasetConfig
        from raydist.data.ray_data import open_ray_train
        from raydist.data.source import Position

        calls = 0

        def exchange(value: Any) -> Any:
            nonlocal calls
            calls += 1
            if self.rank == 0:
                ray.get(self.hub.put.remote((run, calls), value))
                return value
            return ray.get(self.hub.get.remote((run, calls)))

        config = DatasetConfig(path=folder, shuffle=True, engine="direct" if name == "raydist-direct" else "ray")
        source = open_ray_train(
            config, global_size=batch, seed=0, rank=self.rank, world_size=self.ranks, exchange=exchange
        )  # fmt: skip
        start = Position(0, int((source.steps_per_epoch or 0) * (at or 0.0)))
        try:
            for step in source.steps(start, 1 if at is None else 2):
                yield step.batch["id"][: step.rows]
        finally:
            source.close()


class Files(IterableDataset):  # type: ignore[misc]
    """What a user would write for a DataLoader: this rank's files, row groups in random order, rows shuffled in each."""

    def __init__(self, folder: str, rank: int, ranks: int, size: int) -> None:
        self.paths, self.size = sorted(Path(folder).glob("*.parquet"))[rank::ranks], size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        rng = np.random.default_rng(0)
        groups = [(path, g) for path in self.paths for g in range(pq.ParquetFile(path).num_row_groups)]
        for at in rng.permutation(len(groups)):
            path, group = groups[at]
            table = pq.ParquetFile(path).read_row_group(group)
            order = rng.permutation(table.num_rows)
            ids = table["id"].to_numpy()[order]
            features = np.stack([table[name].to_numpy() for name in table.column_names[:FEATURES]], axis=1)[order]
            for low in range(0, table.num_rows, self.size):
                yield {
                    "features": torch.from_numpy(features[low : low + self.size]),
                    "id": torch.from_numpy(ids[low : low + self.size]),
                }


def family(root: int) -> dict[int, float]:
    """This process and all below it, with their CPU seconds."""
    found: dict[int, tuple[int, float]] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / tick)
    own, more = {root}, True
    while more:
        new = {pid for pid, (parent, _) in found.items() if parent in own} - own
        own, more = own | new, bool(new)
    return {pid: found[pid][1] for pid in own if pid in found}


class Watch:
    """Memory (MB above `base`, highest) and CPU seconds of this process and its children, sampled."""

    def __init__(self, root: int, base: float = 0.0) -> None:
        self.root, self.peak, self.base = root, 0.0, base
        self.cpu: dict[int, tuple[float, float]] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self.now()
        self.cpu = {pid: (spent, spent) for pid, (_, spent) in self.cpu.items()}
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()
        self.peak = max(self.peak, self.now())

    @property
    def above(self) -> float:
        return self.peak - self.base

    @property
    def cpu_s(self) -> float:
        return sum(last - first for first, last in self.cpu.values())

    def now(self) -> float:
        total = 0
        for pid, spent in family(self.root).items():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            self.cpu[pid] = (self.cpu.get(pid, (0.0, 0.0))[0], spent)
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return total / 1024

    def _watch(self) -> None:
        while not self.over.wait(1.0):
            self.peak = max(self.peak, self.now())


def run_one(
    name: str, folder: Path, readers: list[Any], batch: int, run: str, base: float, at: float | None = None
) -> dict[str, float]:
    import ray

    time.sleep(SETTLE_S)
    with Watch(os.getpid(), base) as watch:
        began = time.time()
        given: list[Any] = [None] * len(readers)
        if name in ("ray", "ray-shuffle"):
            given = ray.data.read_parquet(str(folder)).streaming_split(len(readers), equal=True)
        found = ray.get(
            [r.consume.remote(name, str(folder), batch, run, g, began, at) for r, g in zip(readers, given, strict=True)]
        )
        del given
    first, end = max(f["first"] for f in found), max(f["end"] for f in found)
    rows = sum(f["rows"] for f in found)
    return {
        "epoch_s": end, "first_s": first, "rows_s": rows / max(end - first, 1e-9), "cpu_s": watch.cpu_s,
        "peak_mb": watch.above, "rows": rows, "sum": sum(f["sum"] for f in found),
    }  # fmt: skip


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import ray
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    hub = ray.remote(num_cpus=0)(Hub).remote()
    make = ray.remote(num_cpus=1)(Reader)
    readers = [make.remote(rank, options.ranks, hub) for rank in range(options.ranks)]
    ray.get([reader.warm.remote() for reader in readers])
    base = 0.0
    names = options.contenders.split(",")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repeat in range(-1, options.repeats):  # the first turn starts Ray's worker processes and fills the page cache
        if repeat == 0:
            time.sleep(SETTLE_S)
            base = Watch(os.getpid()).now()
        for name in names:
            result = run_one(name, folder, readers, options.global_size, f"{name}-{repeat}", base)
            if name.startswith("raydist"):
                assert result["rows"] == options.rows and result["sum"] == options.rows * (options.rows - 1) // 2, result
            if repeat >= 0:
                runs[name].append(result)
            shown = f"{result['epoch_s']:.2f} s, first {result['first_s']:.2f} s, CPU {result['cpu_s']:.1f} s"
            print(f"  {repeat} {name}: {shown}", file=sys.stderr, flush=True)
    table = {
        n: {k: statistics.median(r[k] for r in rs) for k in ("epoch_s", "first_s", "rows_s", "cpu_s", "peak_mb")}
        for n, rs in runs.items()
    }
    resume: dict[str, list[float]] = {at: [] for at in ("0.01", "0.5", "0.99")}
    for repeat in range(options.repeats):
        for at in resume:
            resume[at].append(
                run_one("raydist", folder, readers, options.global_size, f"resume-{at}-{repeat}", base, float(at))["first_s"]
            )
    return {
        "rows": options.rows, "features": FEATURES, "ranks": options.ranks, "global_size": options.global_size,
        "repeats": options.repeats, "contenders": table, "resume_first_s": {k: statistics.median(v) for k, v in resume.items()},
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    lines = [f"{'':16}{'epoch s':>9}{'first s':>9}{'rows/s':>12}{'CPU s':>9}{'peak MB':>9}"]
    for name, row in found["contenders"].items():
        lines.append(
            f"{name:16}{row['epoch_s']:9.2f}{row['first_s']:9.2f}{row['rows_s']:12,.0f}{row['cpu_s']:9.1f}{row['peak_mb']:9.0f}"
        )
    resume = ", ".join(f"{float(at):.0%} {seconds:.2f} s" for at, seconds in found["resume_first_s"].items())
    lines.append(f"first batch when resuming at: {resume}")
    ours = found["contenders"].get("raydist")
    for name in ("ray", "ray-shuffle"):
        other = found["contenders"].get(name)
        if ours and other:
            epoch, first = (other[key] / ours[key] for key in ("epoch_s", "first_s"))
            lines.append(f"raydist against {name}: epoch {epoch:.2f} x, first batch {first:.2f} x as fast")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-size", type=int, default=1024)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    import ray

    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.rows)
        ray.init(num_cpus=options.ranks + 2, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            found = measure(options, Path(folder))
        finally:
            ray.shutdown()
    print(show(found))
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
