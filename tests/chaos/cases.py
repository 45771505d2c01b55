"""The named faults: what is done to a run of 16 steps on two workers, and how it must end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.faults import Fault

STEPS, SAVE_EVERY, EVAL_EVERY = 16, 4, 8
GATE = {"kind": "slow", "rank": 0, "step": 7, "seconds": 5.0}
"""Holds the run before step 7, so that something can be done to it from outside there."""

Act = Literal["controller", "raylet", "preempt", "grow", "driver", "ctrl_c", "ctrl_c_twice", "sigterm"]


@dataclass(frozen=True)
class Case:
    """One fault. `faults` are raydist's own; `act` is done from outside when the first of them happens."""

    name: str
    faults: list[dict[str, Any]]
    says: str
    """Words of an event (a verdict, a warning, a failure) or of the error, as a regular expression."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings by dotted path, over the common job."""
    act: Act | None = None
    ends: bool = False
    """Whether the run must end with an error instead of finishing."""
    weights: Literal["equal", "close", "other"] = "equal"
    """Against the undisturbed run: bit-equal, to 1e-6, or (rows were left out) only counted."""
    lost: int = 2 * SAVE_EVERY
    """The most steps that may be done again: those since the last save, and of the one that was under way."""
    left_out: int = 0
    """Rows of global batches that must not count."""
    nodes: int | None = None
    """Nodes at the start, for the cases where that matters."""


def fault(kind: str, rank: int = 1, step: int = 7, **more: Any) -> dict[str, Any]:
    entry = {"kind": kind, "rank": rank, "step": step, **more}
    Fault(**entry)  # refuses what it does not know
    return entry


def named(rank: int, words: str) -> str:
    return rf"^rank {rank} \(step \d+, process \d+ on \S+\) {words}"


HANG = {"failure.hang_timeout": 8}
ELASTIC = {"scaling.workers": [1, 2], "scaling.resources": {"slot": 1}, "task.args.dropout": 0.0}
DIED = "its process ended without a word"
ALWAYS = {"failure.max_restarts": 1}
MEMORY = {"checkpoint.memory": {"steps": 1}}
COPY = "from step 6, which a copy in memory held"

CASES = [
    Case("kill rank 0", [fault("kill", 0)], DIED),
    Case("kill rank 1", [fault("kill")], rf"^rank 1 died: {DIED}"),
    Case("kill in the first step", [fault("kill", step=1)], f"^rank 1 died: {DIED}", lost=0),
    Case(
        "kill while it saves",
        [fault("slow_storage", 0, 8, where="checkpoint", seconds=3), fault("kill", 0, 8, where="checkpoint", after=1.0)],
        DIED,
    ),
    Case("kill in evaluation", [fault("kill", 1, 8, where="evaluation")], DIED),
    Case("kill after the last step", [fault("kill", 0, 16, where="checkpoint")], DIED),
    Case("kill the controller", [GATE], "Ray Train failed", act="controller"),
    Case("kill the driver", [GATE], "from step 4", act="driver"),
    Case("kill a node's raylet", [{**GATE, "seconds": 25.0}], "2 → 1 workers", ELASTIC, act="raylet", weights="close", nodes=2),
    Case("kill rank 0, copies in memory", [fault("kill", 0)], COPY, MEMORY, lost=1),
    Case(
        "kill a node's raylet, copies in memory",
        [{**GATE, "seconds": 25.0}],
        COPY,
        {**ELASTIC, **MEMORY},
        act="raylet",
        weights="close",
        nodes=2,
        lost=1,
    ),
    Case("preemption notice", [GATE], "2 → 1 workers", ELASTIC, act="preempt", weights="close", lost=0, nodes=2),
    Case("a node comes", [GATE], "1 → 2 workers", ELASTIC, act="grow", weights="close", lost=0, nodes=1),
    Case("SIGTERM", [GATE], "by SIGTERM|from step [78]", act="sigterm", lost=0),
    Case("Ctrl-C", [GATE], "by Ctrl-C|from step [78]", act="ctrl_c", lost=0),
    Case("Ctrl-C twice", [GATE], "from step 4", act="ctrl_c_twice"),
    Case("stop rank 0", [fault("stop", 0)], named(0, r"is stopped \(SIGSTOP"), HANG),
    Case("stop rank 1", [fault("stop")], named(1, r"is stopped \(SIGSTOP"), HANG),
    Case("hang in Python", [fault("hang")], named(1, r"is stuck in Python \(step\) .*faults.py:\d+ in _happen"), HANG),
    Case("hang in data", [fault("hang", where="data")], named(1, "waits for data"), HANG),
    Case("hang, default timeout", [fault("hang")], named(1, "is stuck in Python")),
    Case("odd collective", [fault("collective")], named(1, "is in a collective that the others do not enter"), HANG),
    Case("disk full", [fault("disk_full", 0, 8, where="checkpoint")], "No space left on device", lost=0),
    Case(
        "disk full, then kill",
        [fault("disk_full", 0, 8, where="checkpoint"), fault("kill", step=11)],
        "No space left on device",
    ),
    Case(
        "corrupt checkpoint",
        [fault("corrupt", 0, 11), fault("kill", 1, 11)],
        r"step-00000008 is damaged: .*; falling back to the one before it",
        {"checkpoint.async": False},
    ),
    Case("slow storage", [fault("slow_storage", 0, s, where="checkpoint", seconds=1.5) for s in (4, 8)], "", lost=0),
    Case("NaN row, raise", [fault("nan")], r"^step 7, rank 1: the loss is nan in row", ends=True),
    Case(
        "NaN row, skip",
        [fault("nan")],
        r"^step 7, rank 1: the loss is nan in row.*; skipped on all ranks",
        {"failure.bad_step": "skip"},
        weights="other",
        lost=0,
        left_out=8,
    ),
    Case(
        "NaN row, rollback",
        [fault("nan")],
        r"^step 7, rank 1: the loss is nan in row.*; rolled back 2 applied steps",
        {"failure.bad_step": "rollback", "checkpoint.async": False},
        weights="other",
        lost=0,
        left_out=24,
    ),
    Case("exception, once", [fault("exception")], "^rank 1: RuntimeError: injected exception on rank 1 at step 7"),
    Case(
        "exception, always",
        [fault("exception", times=9)],
        "^rank 1: RuntimeError: injected exception on rank 1 at step 7",
        ALWAYS,
        ends=True,
    ),
    Case(
        "exception in evaluation", [fault("exception", 0, 8, where="evaluation")], "^rank 0: RuntimeError: injected exception"
    ),
    Case("exception in the last step", [fault("exception", 1, 16)], "^rank 1: RuntimeError: injected exception"),
    Case(
        "out of memory, early",
        [fault("oom", step=2)],
        "4 rows did not fit; from step 2 on micro-batches of 2",
        {"batch.micro_size": "auto"},
        weights="close",
        lost=0,
    ),
    Case(
        "out of memory, late",
        [fault("oom")],
        r"^rank 1: .*out of memory; going on with micro-batches of 2; restart 1 of 3",
        {"batch.micro_size": "auto"},
        weights="close",
    ),
]
BY_NAME = {case.name: case for case in CASES}


def random_kills(number: int, seed: int) -> Case:
    """`number` SIGKILLs of a rank, step, place and moment drawn from `seed`."""
    draw = random.Random(seed)
    faults = []
    for _ in range(number):
        where = draw.choice(["step", "step", "data", "evaluation", "checkpoint"])
        every = {"evaluation": EVAL_EVERY, "checkpoint": SAVE_EVERY}.get(where, 1)
        step = every * draw.randint(1, STEPS // every)
        after = 0.0 if step == STEPS else draw.choice([0.0, 0.0, 0.01, 0.03])
        faults.append(fault("kill", draw.randint(0, 1), step, where=where, after=after))
    settings = {"failure.max_restarts": number}
    return Case(f"{number} random kills, seed {seed}", faults, "died", settings, lost=number * 2 * SAVE_EVERY)
