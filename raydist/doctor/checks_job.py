"""Checks of what a job needs: storage, data, and room for its workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from raydist.doctor.report import Finding, Survey
from raydist.plain_table import size
from raydist.planning.nodes import Node, asked, memory_of, place

if TYPE_CHECKING:
    from raydist.config import JobConfig

_BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


def check_storage(survey: Survey) -> list[Finding]:
    """All nodes read and write the same folder, and it has room."""
    if survey.storage is None:
        return [Finding("storage", "skip", "give a job file, or --storage")]
    found: list[Finding] = []
    free: list[int] = []
    for node in survey.told:
        seen = node.storage
        if seen is None:
            todo = "is a network file system hung there? (`df` on that folder)"
            found.append(Finding("storage", "fail", "no answer in time", node.name, todo))
        elif seen["error"] is not None:
            todo = "let the user that Ray runs as write there"
            found.append(Finding("storage", "fail", seen["error"], node.name, todo))
        elif not seen["reads"] or not seen["writes"] or node.node_id not in (survey.shared_found or []):
            words = f"{survey.storage} here is not the driver's folder of that name"
            todo = "mount the same file system on all nodes, or use an object store (storage: s3://…)"
            found.append(Finding("storage", "fail", words, node.name, todo))
        elif seen["free"] is not None:
            free.append(seen["free"])
    if found:
        return found
    room = f", {size(min(free))} free" if free else ""
    if survey.needed_bytes is not None and free and min(free) < survey.needed_bytes:
        words = f"{size(min(free))} free, and the job's checkpoints take about {size(survey.needed_bytes)}"
        return [Finding("storage", "fail", words, todo="free some space, lower checkpoint.keep, or choose another storage")]
    shared = "shared by all nodes" if len(survey.nodes) > 1 else "writable"
    return [Finding("storage", "ok", f"{survey.storage}: {shared}{room}")]


def check_data(survey: Survey) -> list[Finding]:
    """Every node reads the job's data."""
    if not survey.data:
        return [Finding("data", "skip", "give a job file that names files")]
    found = [
        Finding("data", "fail", f"{path}: {why}", node.name, "mount or copy the data there, or use a URI that all nodes reach")
        for node in survey.told
        for path, why in (node.unreadable if node.unreadable is not None else {"the data": "no answer in time"}).items()
    ]
    return found or [Finding("data", "ok", f"{len(survey.data)} paths, readable on each node")]


def check_demands(survey: Survey, config: JobConfig | None) -> list[Finding]:
    """The workers fit on the nodes, as Ray counts them."""
    if config is None:
        return [Finding("job", "skip", "give a job file")]
    nodes = [as_node(node.name, node.resources) for node in survey.nodes]
    placed = place(config, nodes)
    if placed.problem is not None:
        return [Finding("job", "fail", placed.problem, todo="change scaling in the job file, or add nodes")]
    low, high = asked(config)
    wish = f"{low}" if low == high else f"{low} to {high}"
    fits = f"{wish} workers asked for, {placed.fits} fit, {placed.workers} would start"
    return [Finding("job", "warn", f"{fits}; {note}", todo="see the job's scaling") for note in placed.notes] or [
        Finding("job", "ok", fits)
    ]


def as_node(name: str, resources: dict[str, float]) -> Node:
    """A node as the planner knows it, from the resources that Ray lists."""
    kind = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), None)
    return Node(
        name,
        gpus=resources.get("GPU", 0.0),
        cpus=resources.get("CPU", 0.0),
        gpu_type=kind,
        gpu_bytes=memory_of(kind),
        resources={key: amount for key, amount in resources.items() if key not in _BUILT_IN},
    )


def paths_of(config: JobConfig) -> list[str]:
    """Files that the workers open: data and the job's own modules."""
    found: list[str] = []
    for data in (config.data.train, config.data.eval):
        if data is None:
            continue
        found += [data.path] if isinstance(data.path, str) else list(data.path or [])
        targets = [data.target, *(transform.target for transform in data.transforms), data.collate]
        found += [target.rpartition(":")[0] for target in targets if target and _is_file(target)]
    parts = [config.task.target, *(t.target for t in (config.task.model, config.task.loss) if t is not None)]
    found += [target.rpartition(":")[0] for target in parts if target and _is_file(target)]
    return list(dict.fromkeys(found))


def _is_file(target: str) -> bool:
    return target.rpartition(":")[0].endswith(".py") and os.sep in target
