"""What Ray Train leaves in a cluster when its controller is killed: taken away, so that the next attempt has the room."""

from __future__ import annotations

from typing import Any


def held() -> set[str]:
    """Placement groups of this driver's job that hold resources, by id."""
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()  # the last bytes of each id are those of the job
    table: dict[str, dict[str, Any]] = placement_group_table()
    return {name for name, group in table.items() if name.endswith(job) and group["state"] != "REMOVED"}


def release(before: set[str]) -> None:
    """Remove the placement groups of this job that were not there `before`, and Ray Train's helper that should have done so.

    The helper (`PlacementGroupCleaner`, a detached actor) asks the dashboard's API whether the controller lives. On a cluster
    without a dashboard it gets no answer, waits for ever, and the workers' CPUs stay taken (Ray 2.60).
    """
    import ray
    from ray._private.state import actors
    from ray._private.worker import global_worker
    from ray._raylet import ActorID, PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    worker: Any = global_worker
    for name in held() - before:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
    job = ray.get_runtime_context().get_job_id()
    for name, actor in actors().items():
        if actor["ActorClassName"] == "PlacementGroupCleaner" and actor["JobID"] == job and actor["State"] == "ALIVE":
            worker.core_worker.kill_actor(ActorID(bytes.fromhex(name)), True)
