"""What a step costs beside the work, at 1, 2, 4, 8 and 16 workers: a step that sleeps 50 ms, its time minus those 50 ms.

    python jobs/bench/scale.py [--rounds N] [--quick] [--json FILE]

Sleeping leaves the CPUs free, so that a small machine holds 16 workers; Ray is told that there are as many CPUs. What is left
is one small all-reduce of gradients, the loop, and what the runner adds. Plain torchrun is shown beside it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from starting import Runs

from raydist.benchmark.rows import Row
from raydist.benchmark.turns import options, take_turns, write

WARM = 20


def main() -> int:
    from cases import SLEEP_S, case

    asked = options(__doc__, ("scale",), rounds=3, quick_rounds=1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="raydist-bench-") as scratch:
        for workers in (1, 4, 16) if asked.quick else (1, 2, 4, 8, 16):
            made = case("sleep", 60, workers)
            folder = Path(scratch) / str(workers)
            folder.mkdir()
            contenders = Runs(folder, workers).contenders(made, ("raydist", "torchrun"))
            found = take_turns(contenders, asked.rounds, f"{workers} workers")
            values = {name: [1e3 * (m.step_s(WARM) - SLEEP_S) for m in ms] for name, ms in found.items()}
            means = {name: [1e3 * (m.mean_step_s(WARM) - SLEEP_S) for m in ms] for name, ms in found.items()}
            plural = "worker" if workers == 1 else "workers"
            rows.append(Row("scale", f"{workers} {plural}", "ms", values, judged=workers == 16, more={"mean_ms": means}))
    write(rows, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
