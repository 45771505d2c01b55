"""A Ray cluster of one or two simulated nodes, what can be done to it from outside, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raydist.runners.cluster import quiet

AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
SERVICES = ("ray::IDLE", *AGENTS, "ray::_AutoscalingCoordinatorActor")


class Nodes:
    """A head node of 6 CPUs and, when wanted, a second one of 1; each has one `slot` for an elastic worker."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        sooner = {
            "health_check_period_ms": 1000
        }  # Ray calls a node dead after five of these without an answer; 3000 by default
        head = {"num_cpus": 6, "resources": {"slot": 1}, "include_dashboard": False, "_system_config": sooner}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")
        self.second: Any = None
        self.address = str(self.cluster.address)
        self.session = str(self.cluster.head_node.get_session_dir_path())

    def want(self, nodes: int) -> None:
        """Have this many nodes."""
        if nodes == 2 and self.second is None:
            self.add_second()
        elif nodes == 1 and self.second is not None:
            self.cluster.remove_node(self.second, allow_graceful=False)
            self.second = None
            _until(lambda: _alive() == 1, "the second node's end")

    def add_second(self) -> None:
        """Add a node. In the main thread: Ray sets signal handlers then."""
        self.second = self.cluster.add_node(num_cpus=1, resources={"slot": 1})

    def kill_second(self) -> None:
        """SIGKILL the raylet of the second node."""
        from ray._private import ray_constants

        for info in self.second.all_processes[ray_constants.PROCESS_TYPE_RAYLET]:
            os.kill(info.process.pid, signal.SIGKILL)

    def preempt_second(self) -> None:
        """Announce the end of the second node, as a cloud's preemption notice does."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + 120) * 1000)
        accepted = GcsClient(address=self.address).drain_node(self.second.node_id, reason, "preemption (chaos)", deadline)
        assert accepted[0] if isinstance(accepted, tuple) else accepted

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@contextmanager
def nodes() -> Iterator[Nodes]:
    quiet(False)
    cluster = Nodes()
    try:
        yield cluster
    finally:
        cluster.close()


def _alive() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def _until(true: Any, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


# -- processes ----------------------------------------------------------------------------------------------------------


def titles(session: str) -> dict[int, str]:
    """pid -> title of each process of a Ray session: those that have a file of its folder open, or name it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            files = [os.readlink(file) for file in (entry / "fd").iterdir()]
        except OSError:
            continue  # it has just ended
        if session in title or any(file.startswith(session) for file in files):
            found[int(entry.name)] = title
    return found


def busy(session: str) -> list[str]:
    """Workers and actors of a session that do something; Ray keeps idle ones and services of the cluster."""
    return [title for title in titles(session).values() if title.startswith("ray::") and not title.startswith(SERVICES)]


def kill_controller(session: str) -> None:
    """SIGKILL the actor process of Ray Train's controller."""
    pids = [pid for pid, title in titles(session).items() if title.startswith("ray::TrainController")]
    assert len(pids) == 1, f"{len(pids)} controllers in {sorted(titles(session).values())}"
    os.kill(pids[0], signal.SIGKILL)


def listening(pids: set[int]) -> int:
    """Number of TCP ports that these processes listen on."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(fields[9])
    held = set()
    for pid in pids:
        try:
            links = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
        held |= {inode for inode in inodes if f"socket:[{inode}]" in links}
    return len(held)


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()}


def placement_groups() -> int:
    """Those of the connected cluster that still hold something."""
    from ray.util import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def unheld(files: set[str]) -> set[str]:
    """Of these files, those that no process has open or mapped: left behind."""
    left = {file for file in files if Path(file).exists()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and left:
            try:
                maps = (entry / "maps").read_text()
                links = {os.readlink(file) for file in (entry / "fd").iterdir()}
            except OSError:
                continue
            left = {file for file in left if file not in links and file not in maps}
    return left
