"""One Ray cluster for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of 6 CPUs, without a dashboard."""
    import ray

    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Ray sets for the driver on its first run, or for Ray Tune, does not stay for the next test."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        if name.startswith(("RAY_", "TUNE_")):
            del os.environ[name]
