"""Ranks that stay over all tests of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import RankPool


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Up to 4 of them."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def more_ranks() -> Iterator[RankPool]:
    """Up to 8 of them."""
    pool = RankPool(8)
    yield pool
    pool.close()
