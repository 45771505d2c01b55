"""Columns and sizes as text."""

from __future__ import annotations

import pytest

from raydist.plain_table import aligned, size


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([["a", "bb", "c"], ["aaa", None, "dd"], ["x"]]) == ["  a    bb  c", "  aaa      dd", "  x"]
    assert aligned([]) == []


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 2**20, "1023 MiB"),
        (80e9, "74.5 GiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_sizes(count: float, words: str) -> None:
    assert size(count) == words
