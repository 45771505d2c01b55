"""Breaks a small run in every way we know and prints one table: fault, outcome, lost steps, seconds to recover.

python jobs/chaos.py                        all named faults, then 20 random kills
python jobs/chaos.py "kill rank 1" nan      those whose name contains one of these
python jobs/chaos.py --random 20 --seed 1   random kills only
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("PYTHONPATH", sys.path[0])

from tests.chaos.cases import CASES, STEPS, Case, random_kills
from tests.chaos.cluster import Nodes, busy, listening, nodes, placement_groups, shared_memory, titles, unheld
from tests.chaos.harness import Report, run_case
from tests.chaos.runs import Undisturbed


def main() -> int:
    """Run what was asked; 1 when something did not end as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of faults")
    parser.add_argument("--random", type=int, metavar="N", help="this many kills at random over one run")
    parser.add_argument("--seed", type=int, default=1, help="of the random kills")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.names or any(name.lower() in case.name.lower() for name in asked.names)]
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    if asked.random is not None:
        kills = [random_kills(asked.random, asked.seed)] if asked.random else []
        cases = [*(cases if asked.names or not kills else []), *kills]
    elif not asked.names:
        cases.append(random_kills(20, asked.seed))
    if not cases:
        parser.error(f"no fault is called like {', '.join(asked.names)}; --list prints the names")
    with tempfile.TemporaryDirectory(prefix="raydist-chaos-") as folder:
        reports, left = run_all(cases, Path(folder))
    print(table(reports))
    for report in reports:
        if report.name.endswith(f"seed {asked.seed}"):
            print(goodput(report))
    print(left)
    bad = [report for report in reports if report.problems]
    for report in bad:
        print(f"\n{report.name}: {report.outcome}", *(f"  {problem}" for problem in report.problems), sep="\n")
    print(f"\n{len(reports) - len(bad)} of {len(reports)} as promised")
    return 1 if bad or not left.endswith("nothing") else 0


def run_all(cases: list[Case], folder: Path) -> tuple[list[Report], str]:
    """Each case on one cluster; and words for what was left behind, in the cluster and after it."""
    memory, reports = shared_memory(), []
    ports = listening({os.getpid()})
    with nodes() as cluster:
        undisturbed = Undisturbed(folder)
        for case in cases:
            began = time.monotonic()
            reports.append(run_case(case, folder, cluster, undisturbed))
            good = "ok" if not reports[-1].problems else f"NOT AS PROMISED: {reports[-1].problems}"
            print(f"{case.name}: {good} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
        left = [*left_in(cluster)]
        session = cluster.session
    time.sleep(1.0)
    left += [f"process {title}" for title in titles(session).values()]
    left += [f"{listening({os.getpid()}) - ports} listening ports"] if listening({os.getpid()}) > ports else []
    left += [f"shared memory {file}" for file in unheld(shared_memory() - memory)]
    counts = "processes, listening ports, shared-memory files, placement groups left behind: "
    return reports, counts + ("; ".join(left) or "nothing")


def left_in(cluster: Nodes) -> list[str]:
    """What the runs left in the cluster; Ray takes a moment to end actors."""
    deadline = time.monotonic() + 15
    while (busy(cluster.session) or placement_groups()) and time.monotonic() < deadline:
        time.sleep(0.2)
    groups = placement_groups()
    return [f"actor {title}" for title in busy(cluster.session)] + ([f"{groups} placement groups"] if groups else [])


def table(reports: list[Report]) -> str:
    """The table, as Markdown."""
    rows = ["| fault | outcome | lost steps | seconds to recover | as promised |", "|---|---|---|---|---|"]
    for report in reports:
        outcome = report.outcome if len(report.outcome) <= 90 else report.outcome[:89] + "…"
        if report.named is not None:
            outcome += f", named after {report.named:.1f} s"
        took = report.seconds_to_recover
        lost = "" if report.lost is None else report.lost
        again = "" if took is None else f"{took:.1f}"
        rows.append(f"| {report.name} | {outcome} | {lost} | {again} | {'no' if report.problems else 'yes'} |")
    return "\n".join(rows)


def goodput(report: Report) -> str:
    """Of the random kills: steps that count by steps computed, and the time from a kill to the next step."""
    lost = report.lost or 0
    recovered = report.recovered or [float("nan")]
    return (
        f"goodput {STEPS / (STEPS + lost):.2f} ({STEPS} steps count, {STEPS + lost} were computed); "
        f"from a kill to the next step: median {statistics.median(recovered):.1f} s, most {max(recovered):.1f} s; "
        f"whole run {report.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
