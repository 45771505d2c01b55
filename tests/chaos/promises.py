"""Which promises a run did not keep: each step and each row once, the weights of the undisturbed run, the right words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from raydist.checkpoint import load
from raydist.errors import RaydistError
from raydist.rundir import RunDir
from raydist.state import TrainState
from tests.chaos.cases import STEPS, Case
from tests.chaos.runs import SIZE, lines_of, state_of
from tests.chaos.task import times_used


def problems_of(
    case: Case, run: Path, error: RaydistError | None, expected: tuple[TrainState, list[dict[str, Any]]]
) -> list[str]:
    """What is not as promised."""
    run_dir = RunDir(str(run))
    events, summary = run_dir.read_events(), run_dir.read_summary() or {}
    told = [str(event.get("reason")) for event in events] + [str(summary.get("reason"))] + ([str(error)] if error else [])
    found = [] if any(re.search(case.says, words) for words in told) else [f"nobody said {case.says!r}, but {told}"]
    hang = next((e for e in events if e["kind"] == "hang"), None)
    if hang is not None and not hang["stack"] and "stopped" not in hang["reason"]:
        found.append("the hang has no stack")
    if case.ends:
        if error is None or summary.get("status") != "failed":
            found.append(f"it should have failed; the summary says {summary.get('status')}")
        return found
    if error is not None or summary.get("status") != "finished":
        return [*found, f"it should have finished: {error}"]
    steps = [line["step"] for line in lines_of(run)]
    if steps != list(range(1, STEPS + 1)):
        found.append(f"metrics.jsonl has steps {steps}")
    lost = sum(event.get("lost_steps", 0) for event in events)
    if lost > case.lost or summary["rows_seen"] != STEPS * SIZE or summary["steps"] != STEPS:
        found.append(f"lost {lost} steps (at most {case.lost}); steps {summary['steps']}, rows seen {summary['rows_seen']}")
    return found + rows_problems(case, run) + weights_problems(case, run, expected)


def rows_problems(case: Case, run: Path) -> list[str]:
    """Each row once an epoch, but for those of batches that must not count."""
    found = []
    middle = run / "checkpoints" / f"step-{STEPS // 2:08d}"
    checks = [(state_of(run).model, 2)] + ([(load(str(middle))[0].model, 1)] if (middle / "manifest.json").exists() else [])
    for model, epochs in checks:
        if case.name.startswith(("corrupt", "disk full")) and epochs == 1:
            continue
        used = times_used(model, SIZE)
        wrong = [row for row, times in enumerate(used) if times != epochs]
        if len(wrong) != case.left_out or any(used[row] != epochs - 1 for row in wrong):
            found.append(f"rows used not once an epoch, after {epochs}: {[(row, used[row]) for row in wrong]}")
    return found


def weights_problems(case: Case, run: Path, expected: tuple[TrainState, list[dict[str, Any]]]) -> list[str]:
    """Weights, averaged weights and momentum are those of the undisturbed run, and so is each line of metrics."""
    if case.weights == "other":
        return []
    state, other = state_of(run), expected[0]
    tolerance = 0.0 if case.weights == "equal" else 1e-6
    found = []
    for part, ours, theirs in (("model", state.model, other.model), ("ema", state.ema, other.ema)):
        assert ours is not None and theirs is not None
        for name, tensor in ours.items():
            same = torch.equal(tensor, theirs[name]) if not tolerance else (tensor - theirs[name]).abs().max() <= tolerance
            if not same:
                found.append(f"{part} {name} is off by {float((tensor - theirs[name]).abs().max()):.2e}")
    for key, slot in state.optimizer["state"].items():
        momentum, theirs = slot.get("momentum_buffer"), other.optimizer["state"][key].get("momentum_buffer")
        if momentum is not None and (momentum - theirs).abs().max() > tolerance:
            found.append(f"the momentum of parameter {key} is off by {float((momentum - theirs).abs().max()):.2e}")
    if not tolerance and lines_of(run) != expected[1]:
        found.append("metrics.jsonl differs from the undisturbed run's")
    return found
