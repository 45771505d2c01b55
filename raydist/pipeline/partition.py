"""Where to cut: layers into contiguous runs of which the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from raydist.errors import ConfigError


def cut(
    costs: Sequence[float], runs: int, memory: Sequence[float] | None = None, limit: float | None = None
) -> list[tuple[int, int]]:
    """`runs` half-open ranges over the layers, none empty, with the least possible maximum of summed `costs`.

    No run's summed `memory` exceeds `limit`. Exact: dynamic programming over (runs, layers), O(runs * layers²). Raises
    ConfigError when there are fewer layers than runs, or no cut keeps within the limit.
    """
    count = len(costs)
    if count < runs:
        raise ConfigError(f"strategy.stages: {runs} runs of layers are needed and the model has {count} layers; lower stages")
    time, held = [0.0, *accumulate(costs)], [0.0, *accumulate(memory or [0.0] * count)]
    infinite = float("inf")
    best = [0.0] + [infinite] * count
    choices: list[list[int]] = []
    for _ in range(runs):
        now, choice = [infinite] * (count + 1), [0] * (count + 1)
        for stop in range(1, count + 1):
            for start in range(stop - 1, -1, -1):
                slowest = time[stop] - time[start]
                if slowest >= now[stop] or (limit is not None and held[stop] - held[start] > limit):
                    break  # both only grow as the run gets longer
                if (value := max(best[start], slowest)) < now[stop]:
                    now[stop], choice[stop] = value, start
        best, choices = now, [*choices, choice]
    if best[count] == infinite:
        raise ConfigError(
            f"strategy.memory_gb: no cut of {count} layers into {runs} runs keeps each within it; add stages or raise it"
        )
    ranges, stop = [], count
    for choice in reversed(choices):
        ranges.append((choice[stop], stop))
        stop = choice[stop]
    return ranges[::-1]


def cut_as_asked(asked: Sequence[int] | Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges from numbers of layers, or from the names of the first layer of each run but the first. ConfigError if unfit."""
    if isinstance(asked[0], int):
        ends = list(accumulate(int(n) for n in asked))
        if ends[-1] != len(names):
            raise ConfigError(f"strategy.cut: adds up to {ends[-1]} layers and the model has {len(names)}: {', '.join(names)}")
        return list(zip([0, *ends[:-1]], ends, strict=True))
    starts = []
    for name in asked:
        if name not in names:
            raise ConfigError(f"strategy.cut: no layer {name!r}; the model has {', '.join(names)}")
        starts.append(list(names).index(str(name)))
    edges = [0, *starts, len(names)]
    if any(a >= b for a, b in pairwise(edges)):
        raise ConfigError(f"strategy.cut: names must follow the layers' order, and none be the first: {', '.join(names)}")
    return list(pairwise(edges))
