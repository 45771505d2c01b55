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
    """Remove the placement groups of this job that were not there `before`."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for name in held() - before:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
