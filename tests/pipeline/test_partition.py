"""The cut: as good as trying them all, within the memory limit, and as asked."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from raydist.errors import ConfigError
from raydist.pipeline import cut, cut_as_asked


def tried(costs: list[float], memory: list[float], runs: int, limit: float) -> float | None:
    """The least maximum over all cuts, by trying them all."""
    found = [
        max(sum(costs[a:b]) for a, b in pairwise(edges))
        for inner in combinations(range(1, len(costs)), runs - 1)
        if (edges := (0, *inner, len(costs))) and all(sum(memory[a:b]) <= limit for a, b in pairwise(edges))
    ]
    return min(found, default=None)


def test_equals_trying_all() -> None:
    generator = random.Random(0)
    for _ in range(200):
        count = generator.randint(2, 9)
        costs, memory = ([float(generator.randint(0, 20)) for _ in range(count)] for _ in range(2))
        runs, limit = generator.randint(1, count), float(generator.randint(10, 80))
        best = tried(costs, memory, runs, limit)
        if best is None:
            with pytest.raises(ConfigError, match="memory_gb: no cut"):
                cut(costs, runs, memory, limit)
            continue
        ranges = cut(costs, runs, memory, limit)
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])] and ranges[-1][1] == count
        assert all(a < b and sum(memory[a:b]) <= limit for a, b in ranges)
        assert max(sum(costs[a:b]) for a, b in ranges) == best


def test_as_asked_by_counts_and_by_names() -> None:
    names = ["in", "a", "b", "out"]
    assert cut_as_asked([1, 3], names) == [(0, 1), (1, 4)]
    assert cut_as_asked(["b"], names) == [(0, 2), (2, 4)]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([1, 2], "adds up to 3 layers and the model has 4: in, a, b, out"),
        (["c"], "no layer 'c'; the model has in, a, b, out"),
        (["b", "a"], "names must follow the layers' order"),
        (["in"], "names must follow the layers' order"),
    ],
)
def test_refuses_a_cut_that_does_not_fit(asked: list[int] | list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut_as_asked(asked, ["in", "a", "b", "out"])


def test_fewer_layers_than_runs() -> None:
    with pytest.raises(ConfigError, match="3 runs of layers are needed and the model has 2 layers"):
        cut([1.0, 1.0], 3)
