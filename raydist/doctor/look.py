"""Gather the survey: one agent on each node, asked in stages that all end before a deadline."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raydist.doctor import agent as agent_module
from raydist.doctor import net, probe, reduce
from raydist.doctor.report import Reduced, Seen, Survey

if TYPE_CHECKING:
    from raydist.config import JobConfig

BUDGET_S = 45.0
"""For everything after the connection, so that all of it stays below a minute."""
START_S, ASK_S, REDUCE_S = 30.0, 10.0, 10.0


class Deadline:
    """What is left of a budget in seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, most: float) -> float:
        return max(0.0, min(most, self.end - time.monotonic()))


@dataclass
class _Node:
    seen: Seen
    ray: dict[str, Any]
    greeting: str
    actor: Any = None
    ports: list[int] = field(default_factory=list)


def look(
    config: JobConfig | None,
    storage: str | None,
    data: list[str],
    only: list[str],
    wanted: int | None,
    budget_s: float = BUDGET_S,
) -> Survey:
    """Ask every node of the connected cluster (or those in `only`: IPs, host names or starts of ids)."""
    import ray

    deadline = Deadline(budget_s)
    for module in (agent_module, probe, net, reduce):  # nodes need neither raydist nor this version of it
        ray.cloudpickle.register_pickle_by_value(module)
    entries = ray.nodes()
    alive = [entry for entry in entries if entry["Alive"]]
    chosen = [entry for entry in alive if not only or any(_is(entry, name) for name in only)]
    names = _names(entries)
    nodes = [_start(entry, names[entry["NodeID"]]) for entry in chosen]
    nodes.sort(key=lambda node: (not node.seen.head, node.seen.name))
    survey = Survey(
        [node.seen for node in nodes],
        probe.versions(),
        lost=[names[entry["NodeID"]] for entry in entries if not entry["Alive"]],
        wanted=wanted,
        missing=[name for name in only if not any(_is(entry, name) for entry in alive)],
        storage=storage,
        data=data,
    )
    try:
        _facts(nodes, deadline)
        told = [node for node in nodes if node.seen.facts is not None]
        _clocks(told, deadline)
        _links(survey, told, deadline)
        if storage is not None:
            _storage(survey, told, storage, deadline)
        if data:
            for node, found in _ask(told, deadline, "unreadable", data):
                node.seen.unreadable = found if isinstance(found, dict) else None
        survey.reduced = [_all_reduce(told, "gloo", 0.0, deadline)]
        if told and all(node.seen.resources.get("GPU") for node in told):
            survey.reduced.append(_all_reduce(told, "nccl", 1.0, deadline))
    finally:
        for node in nodes:
            ray.kill(node.actor)
    return survey


def resources_by_name() -> dict[str, dict[str, float]]:
    """Node name -> resources, of the connected cluster's living nodes."""
    import ray

    entries = [entry for entry in ray.nodes() if entry["Alive"]]
    names = _names(entries)
    return {names[entry["NodeID"]]: _resources(entry) for entry in entries}


def _resources(entry: dict[str, Any]) -> dict[str, float]:
    return {name: float(amount) for name, amount in entry["Resources"].items() if not name.startswith("node:")}


def _is(entry: dict[str, Any], name: str) -> bool:
    return name in (entry["NodeManagerAddress"], entry["NodeManagerHostname"]) or (
        len(name) >= 4 and entry["NodeID"].startswith(name)
    )


def _names(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Node id -> the shortest name that tells the nodes apart: host name, IP, or the start of the id."""
    for kind in ("NodeManagerHostname", "NodeManagerAddress"):
        names = {entry["NodeID"]: str(entry[kind]) for entry in entries}
        if all(names.values()) and len(set(names.values())) == len(names):
            return names
    return {entry["NodeID"]: str(entry["NodeID"])[:8] for entry in entries}


def _start(entry: dict[str, Any], name: str) -> _Node:
    head = "node:__internal_head__" in entry["Resources"]
    seen = Seen(entry["NodeID"], entry["NodeManagerAddress"], name, head, _resources(entry))
    greeting = f"raydist-{secrets.token_hex(8)}"
    return _Node(seen, entry, greeting, _agent(entry["NodeID"], greeting, 0.0))


def _agent(node_id: str, greeting: str, gpus: float) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 8, "scheduling_strategy": here, "max_restarts": 0}
    return ray.remote(agent_module.Agent).options(**options).remote(greeting)


def _ask(nodes: list[_Node], deadline: Deadline, method: str, *args: Any, most: float = ASK_S) -> list[tuple[_Node, Any]]:
    """Call a method of every agent at once; each answer, or the exception or None (no answer in time) in its place."""
    return _collect(nodes, [getattr(node.actor, method).remote(*args) for node in nodes], deadline.left(most))


def _collect(nodes: list[_Node], refs: list[Any], seconds: float) -> list[tuple[_Node, Any]]:
    import ray

    ready = set(ray.wait(refs, num_returns=len(refs), timeout=seconds)[0]) if refs else set()
    answers: list[tuple[_Node, Any]] = []
    for node, ref in zip(nodes, refs, strict=True):
        try:
            answers.append((node, ray.get(ref) if ref in ready else None))
        except Exception as error:  # whatever a node's process may raise is its finding
            answers.append((node, error))
    return answers


def _facts(nodes: list[_Node], deadline: Deadline) -> None:
    for node, found in _ask(nodes, deadline, "facts", most=START_S):
        if isinstance(found, dict):
            node.seen.facts, node.ports = found, found["ports"]
        elif found is None:
            node.seen.problem = f"no process started there within {START_S:g} s"
        else:
            node.seen.problem = f"a process there failed: {str(found).strip().splitlines()[-1]}"


def _clocks(nodes: list[_Node], deadline: Deadline) -> None:
    """Offset of each clock: its answer against the middle of the shortest of five ways there and back (Cristian, 1989)."""
    import ray

    for node in nodes:
        best: tuple[float, float] | None = None
        for _ in range(5):
            before = time.time()
            ready, _ = ray.wait([answer := node.actor.clock.remote()], timeout=deadline.left(2.0))
            if not ready:
                break
            theirs, after = float(ray.get(answer)), time.time()
            if best is None or (after - before) / 2 < best[1]:
                best = theirs - (before + after) / 2, (after - before) / 2
        node.seen.offset = best


def _links(survey: Survey, nodes: list[_Node], deadline: Deadline) -> None:
    refs = []
    for node in nodes:
        others = [other for other in nodes if other is not node]
        targets = [target for other in others for target in _targets(other)]
        refs.append(node.actor.reach.remote(targets, [other.seen.ip for other in others]))
    for node, found in _collect(nodes, refs, deadline.left(ASK_S)):
        if isinstance(found, tuple):
            survey.links += [{**link, "source": node.seen.node_id} for link in found[0]]
            node.seen.sources = found[1]
        else:
            node.seen.problem = "it did not finish trying the other nodes' ports"


def _targets(node: _Node) -> list[dict[str, Any]]:
    base = {"node": node.seen.node_id, "ip": node.seen.ip}
    found = [{**base, "port": port, "what": "process group", "greeting": node.greeting} for port in node.ports]
    for what, key in (("Ray node manager", "NodeManagerPort"), ("Ray object manager", "ObjectManagerPort")):
        found.append({**base, "port": node.ray[key], "what": what, "greeting": None})
    if node.seen.head:
        import ray

        port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
        found.append({**base, "port": port, "what": "Ray head (GCS)", "greeting": None})
    return found


def _storage(survey: Survey, nodes: list[_Node], storage: str, deadline: Deadline) -> None:
    """Write a token here; each node reads it and leaves a file of its own, which must be seen here."""
    from raydist import storage as files

    token = secrets.token_hex(16)
    there = files.exists(storage)
    folder = files.join(storage, f".raydist-doctor-{token[:8]}")
    try:
        files.write_bytes(files.join(folder, "token.txt"), token.encode())
    except Exception as error:
        for node in nodes:
            node.seen.storage = {
                "reads": False,
                "writes": False,
                "free": None,
                "error": f"this machine cannot write there: {error}",
            }
        return
    try:
        refs = [node.actor.storage.remote(folder, token, node.seen.node_id) for node in nodes]
        for node, found in _collect(nodes, refs, deadline.left(ASK_S)):
            node.seen.storage = found if isinstance(found, dict) else None
        survey.shared_found = files.names(folder)
    finally:
        apart = [node for node in nodes if node.seen.node_id not in (survey.shared_found or [])]
        _collect(apart, [node.actor.remove.remote(folder, node.seen.node_id) for node in apart], deadline.left(3.0))
        files.remove(folder)
        if not there and not files.names(storage):
            files.remove(storage)


def _all_reduce(nodes: list[_Node], backend: str, gpus: float, deadline: Deadline) -> Reduced:
    """A process on each node, or two on the only one; with GPUs, processes that have one."""
    import ray

    if len(nodes) == 0:
        return Reduced(backend, [], skipped="no node answers")
    team = nodes if len(nodes) > 1 or gpus else [nodes[0], nodes[0]]
    own = [_agent(node.seen.node_id, node.greeting, gpus) for node in team] if gpus else [n.actor for n in nodes]
    if len(own) < len(team):
        own.append(_agent(nodes[0].seen.node_id, nodes[0].greeting, 0.0))
    where = [node.seen.name for node in team]
    extra = [actor for actor in own if all(actor is not node.actor for node in nodes)]
    try:
        ready = ray.wait([actor.free_port.remote() for actor in own], num_returns=len(own), timeout=deadline.left(ASK_S))[0]
        if len(ready) < len(own):
            why = "GPUs are in use" if gpus else "the nodes' processes did not start in time"
            return Reduced(backend, where, skipped=f"not tried: {why}")
        ranks = _reduce_once(team, own, backend, deadline)
        return Reduced(backend, where, ranks)
    finally:
        for actor in extra:
            ray.kill(actor)


def _reduce_once(team: list[_Node], actors: list[Any], backend: str, deadline: Deadline) -> list[dict[str, Any]]:
    """What each rank says; `actors[i]` on `team[i]` is rank i."""
    import ray

    port = ray.get(actors[0].free_port.remote(), timeout=deadline.left(ASK_S) + 1)
    seconds, ip = deadline.left(REDUCE_S), team[0].seen.ip
    refs = [a.all_reduce.remote(rank, len(actors), ip, port, backend, seconds) for rank, a in enumerate(actors)]
    silent = {"right": False, "bytes_per_s": 0.0, "error": f"no end within {seconds:.0f} s"}
    return [found if isinstance(found, dict) else silent for _, found in _collect(team, refs, seconds + 2)]
