"""What each stage does in which order under a schedule, and how long that takes at best: the schedule's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from raydist.config_pipeline import PipelineStrategy

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; a backward in two: for the inputs, for the weights."""


@dataclass(frozen=True)
class Action:
    """One micro-batch through one run of layers."""

    kind: Kind
    run: int
    micro: int


@dataclass(frozen=True)
class Span:
    """When a stage did an action; seconds."""

    action: Action
    start: float
    end: float


def orders(strategy: PipelineStrategy) -> list[list[Action]]:
    """The actions of each stage in order: torch's own lists (torch 2.13), and for gpipe and 1f1b as their classes run."""
    stages, micro = strategy.stages, strategy.micro
    if strategy.schedule in ("gpipe", "1f1b"):
        return [_single(stage, stages, micro, strategy.schedule == "gpipe") for stage in range(stages)]
    from raydist.pipeline.schedules import SCHEDULES

    held = [run for run in range(strategy.runs) if strategy.rank_of(run) == 0]
    stand_ins = [
        SimpleNamespace(
            stage_index=run, num_stages=strategy.runs, group_size=stages, group_rank=0, is_first=run == 0,
            is_last=run == strategy.runs - 1, submod=None,
        )
        for run in held
    ]  # fmt: skip
    engine: Any = SCHEDULES[strategy.schedule](stand_ins, micro, loss_fn=lambda *_: None)
    order = [[a for a in engine.pipeline_order[stage] if _is_work(a)] for stage in range(stages)]
    return [[Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in mine] for mine in order]


def _is_work(action: Any) -> bool:
    return action is not None and action.computation_type.value in ("F", "B", "I", "W")


def _single(stage: int, stages: int, micro: int, all_first: bool) -> list[Action]:
    """`all_first`: every forward before the first backward (GPipe); else as many as there are stages from here on (1F1B)."""
    ahead = micro if all_first else min(micro, stages - stage)
    found = [Action("F", stage, at) for at in range(ahead)]
    for at in range(micro):
        found.append(Action("B", stage, at))
        if ahead + at < micro:
            found.append(Action("F", stage, ahead + at))
    return found


def simulate(ordered: Sequence[Sequence[Action]], seconds: Mapping[tuple[Kind, int], float]) -> list[list[Span]]:
    """Each stage's actions in time when sending costs nothing: each starts when the stage is free and its input there.

    `seconds` of each (kind, run). A forward needs the run before, a backward its own forward and the run after.
    """
    last = max(action.run for actions in ordered for action in actions)
    done: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in ordered]
    while any(len(mine) < len(actions) for mine, actions in zip(spans, ordered, strict=True)):
        moved = False
        for mine, actions in zip(spans, ordered, strict=True):
            while len(mine) < len(actions):
                action = actions[len(mine)]
                needed = [done.get(key) for key in _needs(action, last)]
                if any(at is None for at in needed):
                    break
                start = max([mine[-1].end if mine else 0.0, *(at for at in needed if at is not None)])
                end = start + seconds[action.kind, action.run]
                mine.append(Span(action, start, end))
                done["W" if action.kind == "W" else "F" if action.kind == "F" else "B", action.run, action.micro] = end
                moved = True
        assert moved, "a schedule that waits for itself"
    return spans


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    if action.kind == "F":
        return [("F", action.run - 1, action.micro)] if action.run else []
    if action.kind == "W":
        return [("B", action.run, action.micro)]
    own = [("F", action.run, action.micro)]
    return own if action.run == last else [*own, ("B", action.run + 1, action.micro)]


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The part of the stages' time between the first start and the last end in which they do nothing."""
    start = min(span.start for stage in spans for span in stage)
    end = max(span.end for stage in spans for span in stage)
    busy = sum(span.end - span.start for stage in spans for span in stage)
    return 1.0 - busy / (len(spans) * (end - start)) if end > start else 0.0


def limit(strategy: PipelineStrategy, costs: Sequence[float]) -> float:
    """The bubble of the schedule itself when run `r` takes `costs[r]` forward and backward, a third of it forward."""
    third = {(kind, run): cost / 3 for run, cost in enumerate(costs) for kind in ("F", "I", "W")}
    whole = {("B", run): 2 * cost / 3 for run, cost in enumerate(costs)}
    return bubble(simulate(orders(strategy), third | whole))  # type: ignore[arg-type]
