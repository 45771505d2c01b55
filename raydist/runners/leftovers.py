"""What Ray Train leaves in a cluster when its controller is killed: taken away, so that the next attempt has the room."""

from __future__ import annotations

import os
import signal
from typing import Any

_HELPER = "PlacementGroupCleaner"


def held() -> set[str]:
    """Placement groups of this driver's job that hold resources, by id."""
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()  # the last bytes of each id are those of the job
    table: dict[str, dict[str, Any]] = placement_group_table()
    return {name for name, group in table.items() if name.endswith(job) and group["state"] != "REMOVED"}


def release(before: set[str]) -> None:
    """Remove the placement groups of this job that were not there `before`, and Ray Train's helper that should have done so.

    The helper (a detached actor) asks the dashboard's API whether the controller lives. On a cluster without a dashboard it
    gets no answer, waits for ever, and the workers' CPUs stay taken (Ray 2.60). It has no name and this process no handle of
    it, so a task on its node ends it.
    """
    import ray
    from ray._private.state import actors
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    end: Any = ray.remote(num_cpus=0)(_end)
    for name in held() - before:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
    job = ray.get_runtime_context().get_job_id()
    ending = []
    for actor in actors().values():
        if actor["ActorClassName"] == _HELPER and actor["JobID"] == job and actor["State"] == "ALIVE":
            there = NodeAffinitySchedulingStrategy(actor["Address"]["NodeID"], soft=True)
            ending.append(end.options(scheduling_strategy=there).remote(actor["Pid"]))
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=30.0)


def _end(pid: int) -> None:
    """SIGKILL a process of this machine if it is the helper: the number may be another process's by now."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if _HELPER.encode() in file.read():
                os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
