"""What holds for every test: one torch thread, quiet Ray, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from raydist.runners.cluster import quiet

torch.set_num_threads(1)  # the machine's cores are shared by the ranks of a test; torchrun does the same
quiet(verbose=False)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAYDIST_CACHE"] = ""  # tests measure, and leave the user's cache alone
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")

# Set when a library is first imported or used, by the library.
SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",  # scikit-learn
    "PYTEST_CURRENT_TEST",
    "RAY_CLIENT_MODE",  # ray's job client
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",  # torch.compile
}
GRACE_S = 2.0


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves environment variables, the folder, threads, processes or a process group changed.

    Fixtures of a wider scope are set up before this one, so what they hold is not counted.
    """
    environment, folder = dict(os.environ), os.getcwd()
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    yield
    left = [*_environment_changes(environment), *_process_group()]
    if os.getcwd() != folder:
        left.append(f"the working folder is now {os.getcwd()}")
        os.chdir(folder)
    _wait_for_the_end(threads, children)
    left += [f"thread {thread.name!r} still runs" for thread in _threads() - threads]
    for child in set(multiprocessing.active_children()) - children:
        left.append(f"process {child.name!r} ({child.pid}) still runs")
        child.kill()
    assert not left, "the test left behind: " + "; ".join(left)


def _environment_changes(before: dict[str, str]) -> list[str]:
    """Names of variables that differ, which are then put back."""
    now = dict(os.environ)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    changed = [name for name in changed if name not in SET_BY_LIBRARIES]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed]


def _process_group() -> list[str]:
    if not (dist.is_available() and dist.is_initialized()):
        return []
    dist.destroy_process_group()
    return ["a default process group"]


def _threads() -> set[threading.Thread]:
    """Threads that would keep the interpreter from ending."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _wait_for_the_end(threads: set[threading.Thread], children: set[multiprocessing.process.BaseProcess]) -> None:
    """Give what is on its way out up to `GRACE_S` seconds, and free what only the garbage collector holds."""
    deadline = time.monotonic() + GRACE_S
    while _threads() - threads or set(multiprocessing.active_children()) - children:
        if time.monotonic() > deadline:
            return
        gc.collect()
        time.sleep(0.02)
