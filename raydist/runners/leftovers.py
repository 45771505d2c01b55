"""What Ray leaves behind, taken away: a killed controller's placement groups, an ended local cluster's processes."""

from __future__ import annotations

from contextlib import suppress
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


def of_local_cluster() -> list[Any]:
    """Every process (`psutil.Process`) of the local cluster that this process started: Ray's own and all that they started."""
    import psutil  # comes with ray
    from ray._private import worker

    node: Any = worker._global_node
    found = []
    for infos in node.all_processes.values() if node is not None else ():
        for info in infos:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def end(processes: list[Any], grace: float = 2.0) -> None:
    """Return when none of `processes` runs any more; those that still do after `grace` seconds are killed.

    Ray's agents may look for a GCS that has ended for a minute before they end too (Ray 2.60, after an interrupted run).
    """
    import psutil

    for process in psutil.wait_procs(processes, timeout=grace)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
