"""Command to first step on a Ray cluster that runs already, two workers.

    python jobs/bench/cluster_start.py [--rounds N] [--quick] [--json FILE]

The cluster is one node, started by `ray start --head` for this script and ended with it. A first run of each is not counted.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starting import ENV, Runs, same_losses, write_digits

from raydist.benchmark.rows import Row
from raydist.benchmark.turns import options, take_turns, write
from raydist.errors import RaydistError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster(cpus: int, log: Path) -> Iterator[str]:
    """A head node of its own; its address."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"),
        *("--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--include-dashboard=false", "--disable-usage-stats"),
    ]
    with open(log, "wb") as out:
        head = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENV}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if head.poll() is not None or time.monotonic() > deadline:
                raise RaydistError(f"no cluster came up:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)  # it ends what it started
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)


def main() -> int:
    from cases import case

    asked = options(__doc__, ("cluster_start",), rounds=5, quick_rounds=2)
    write_digits()
    made = case("digits_cnn", 44)
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch, cluster(4, Path(scratch) / "head.log") as address:
        runs = Runs(Path(scratch), address=address)
        contenders = runs.contenders(made, ("raydist", "ray train"))
        take_turns(contenders, 1, "warm-up")
        found = take_turns(contenders, asked.rounds, "running cluster")
        note = same_losses(runs.losses, 0.1)
    values = {name: [m.start_s for m in ms] for name, ms in found.items()}
    ends = {name: [m.finish_s for m in ms] for name, ms in found.items()}
    write([Row("cluster_start", "digits_cnn", "s", values, note, more={"finish_s": ends})], asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
