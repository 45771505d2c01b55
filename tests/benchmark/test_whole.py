"""Every benchmark, quickly: all rows are there, no contender skipped work, and the figures are numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.benchmark.registry import NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_whole_suite_gives_every_row(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "raydist", "bench", "--quick", "--folder", str(ROOT), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1700)
    found = json.loads(out.read_text())
    assert found["problems"] == {} and done.returncode == 0, done.stderr[-3000:]
    assert {row["bench"] for row in found["rows"]} == set(NAMES)
    for row in found["rows"]:
        assert math.isfinite(row["figure"]) and row["figure"] > 0, row
        assert len(row["each_round"]) >= 1 and all(
            len(values) == len(row["each_round"]) for values in row["values"].values()
        ), row
    assert "bars met" in done.stdout and out.with_suffix(".html").stat().st_size > 10_000
