"""Nodes as `--nodes 2x8xA100` describes them, and which workers each one takes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raydist.errors import ConfigError

if TYPE_CHECKING:
    from raydist.config import JobConfig

_SHAPE = re.compile(
    r"(?P<count>\d+)x(?:(?P<cpus_alone>\d+)cpu|(?P<gpus>\d+)(?:x(?P<type>[A-Za-z][A-Za-z0-9-]*)(?::(?P<gib>\d+))?)?"
    r"(?:\+(?P<cpus>\d+)cpu)?)",
    re.IGNORECASE,
)

GPU_GB = {
    "T4": 16, "P100": 16, "V100": 16, "L4": 24, "A10": 24, "A10G": 24, "A30": 24, "L40": 48, "L40S": 48, "A40": 48, "A6000": 48,
    "A100": 40, "A100-40G": 40, "A100-80G": 80, "H100": 80, "H200": 141, "GH200": 96, "B200": 180,
}  # fmt: skip
"""Memory by type in GB (10^9 bytes), from NVIDIA's data sheets; a plain A100 is taken for the smaller one."""


@dataclass(frozen=True)
class Node:
    """What one node has. `cpus` None: not said, so not checked. `gpu_bytes` None: not known."""

    name: str
    gpus: float = 0
    cpus: float | None = None
    gpu_type: str | None = None
    gpu_bytes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)


def parse_nodes(shapes: list[str]) -> list[Node]:
    """Nodes from shapes such as `2x8xA100` (2 nodes of 8 GPUs), `2x8xA100-80G+96cpu`, `1x4xMI300:192`, `4x16cpu`.

    Several may be joined by commas. ConfigError with what is allowed.
    """
    nodes: list[Node] = []
    for shape in (part.strip() for text in shapes for part in text.split(",")):
        found = _SHAPE.fullmatch(shape)
        if found is None or int(found["count"]) < 1:
            raise ConfigError(
                f"--nodes {shape!r} is no shape: write NODESxGPUS[xTYPE[:GIB]][+CPUScpu] or NODESxCPUScpu, "
                "such as 2x8xA100, 2x8xA100-80G+96cpu, 1x4xMYGPU:48 or 4x16cpu"
            )
        cpus = found["cpus_alone"] or found["cpus"]
        memory = int(found["gib"]) * 2**30 if found["gib"] else memory_of(found["type"])
        for _ in range(int(found["count"])):
            nodes.append(
                Node(
                    f"node {len(nodes)}",
                    gpus=float(found["gpus"] or 0),
                    cpus=None if cpus is None else float(cpus),
                    gpu_type=found["type"],
                    gpu_bytes=memory,
                )
            )
    return nodes


def memory_of(gpu_type: str | None) -> int | None:
    """Bytes of a GPU of this type; None for one that is not in the table."""
    gb = GPU_GB.get((gpu_type or "").upper())
    return None if gb is None else gb * 10**9


def this_machine() -> list[Node]:
    """The machine the command runs on, as a cluster of one node."""
    import torch

    gpus = torch.cuda.device_count()
    kind, memory = None, None
    if gpus:
        kind, memory = torch.cuda.get_device_name(0), int(torch.cuda.get_device_properties(0).total_memory)
    return [Node("this machine", float(gpus), float(os.cpu_count() or 1), kind, memory)]


def gpus_per_worker(config: JobConfig, nodes: list[Node]) -> float:
    """As on a cluster: `auto` is one GPU a worker where there are GPUs, and none where there are none."""
    asked = config.scaling.gpus_per_worker
    if asked != "auto":
        return float(asked)
    return 1.0 if config.scaling.backend != "gloo" and any(node.gpus for node in nodes) else 0.0


def holds(node: Node, config: JobConfig, gpus: float) -> int:
    """How many workers fit on a node."""
    scaling = config.scaling
    limits = [node.resources.get(name, 0.0) / amount for name, amount in scaling.resources.items() if amount]
    if gpus:
        limits.append(node.gpus / gpus)
    if node.cpus is not None:
        limits.append(node.cpus / scaling.cpus_per_worker)
    return int(min(limits, default=0.0) + 1e-9)


@dataclass(frozen=True)
class Placement:
    """`ranks[i]` are the ranks on node i; `problem` says why the job cannot start, or is None."""

    workers: int
    gpus_per_worker: float
    fits: int
    ranks: list[list[int]]
    problem: str | None = None
    notes: list[str] = field(default_factory=list)


def place(config: JobConfig, nodes: list[Node]) -> Placement:
    """Workers on nodes, each node filled before the next (Ray's PACK, which Ray Train asks for), fewest nodes first."""
    low, high = asked(config)
    gpus = gpus_per_worker(config, nodes)
    room = [holds(node, config, gpus) for node in nodes]
    fits = sum(room)
    workers = min(high, fits)
    problem = None
    if fits < low:
        problem = (
            f"scaling.workers: at least {low} workers are asked for and {fits} fit (each takes {_needs(config, gpus)}; "
            f"there are {_there(nodes)}). Lower scaling.workers or what each takes, or add nodes"
        )
        workers = 0
    ranks: list[list[int]] = [[] for _ in nodes]
    left, next_rank = workers, 0
    for at in sorted(range(len(nodes)), key=lambda at: -room[at]):
        here = min(left, room[at])
        ranks[at] = list(range(next_rank, next_rank + here))
        left, next_rank = left - here, next_rank + here
    notes = []
    if gpus and all(node.cpus is None for node in nodes):
        notes.append("CPUs of the nodes are not given (+96cpu), so scaling.cpus_per_worker is not checked")
    if gpus == 0 and any(node.gpus for node in nodes):
        notes.append("the nodes have GPUs and the job uses none (scaling.gpus_per_worker or scaling.backend says so)")
    return Placement(workers, gpus, fits, ranks, problem, notes)


def asked(config: JobConfig) -> tuple[int, int]:
    """Fewest and most workers."""
    return config.workers


def _needs(config: JobConfig, gpus: float) -> str:
    parts: dict[str, Any] = {"GPU": gpus, "CPU": config.scaling.cpus_per_worker, **config.scaling.resources}
    return ", ".join(f"{amount:g} {name}" for name, amount in parts.items() if amount)


def _there(nodes: list[Node]) -> str:
    parts = [f"{sum(node.gpus for node in nodes):g} GPUs"]
    if all(node.cpus is not None for node in nodes):
        parts.append(f"{sum(node.cpus or 0 for node in nodes):g} CPUs")
    return f"{' and '.join(parts)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
