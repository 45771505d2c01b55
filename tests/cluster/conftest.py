"""One Ray cluster for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of 6 CPUs, without a dashboard."""
    import ray

    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
