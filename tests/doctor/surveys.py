"""Surveys of invented clusters: all well, and then one thing is not."""

from __future__ import annotations

from typing import Any

from raydist.doctor.report import Finding, Reduced, Seen, Survey

VERSIONS: dict[str, str | None] = {
    "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "raydist": "0.1.0", "cuda": None, "nccl": None, "driver": None,
}  # fmt: skip
GOOD_RANK = {"right": True, "bytes_per_s": 1e9, "error": None}


def facts(host: str, ip: str, **changes: Any) -> dict[str, Any]:
    return {
        "host": host,
        "resolves_to": [ip],
        "versions": dict(VERSIONS),
        "gpus": {"seen": [], "broken": []},
        "interfaces": {"lo": ["127.0.0.1"], "eth0": [ip], "docker0": ["172.17.0.1"]},
        "environment": {},
        "shm": {"total": 8 * 2**30, "free": 8 * 2**30},
        "files": 65536,
        "cpus": 4,
        **changes,
    }


def well(count: int = 2, **resources: float) -> Survey:
    """`count` nodes a, b, … at 10.0.0.1, …; everything is as it should be."""
    nodes = []
    for at in range(count):
        ip, name = f"10.0.0.{at + 1}", "abcdefgh"[at]
        amounts = {"CPU": 4.0, "object_store_memory": float(2**30), **resources}
        node = Seen(f"id-{name}", ip, name, at == 0, amounts, facts(name, ip), offset=(0.001, 0.001))
        node.sources = {f"10.0.0.{other + 1}": ip for other in range(count) if other != at}
        node.storage = {"reads": True, "writes": True, "free": 10 * 2**30, "error": None}
        node.unreadable = {}
        nodes.append(node)
    links = [link(a, b, 40000 + k) for a in nodes for b in nodes if a is not b for k in range(3)]
    return Survey(
        nodes,
        dict(VERSIONS),
        links=links,
        reduced=[Reduced("gloo", [node.name for node in nodes], [dict(GOOD_RANK) for _ in nodes])],
        storage="/shared/runs",
        shared_found=["token.txt", *(node.node_id for node in nodes)],
        data=["/data/train"],
    )


def link(source: Seen, target: Seen, port: int, error: str | None = None, what: str = "process group") -> dict[str, Any]:
    return {"source": source.node_id, "node": target.node_id, "ip": target.ip, "port": port, "what": what, "error": error}


def one(findings: list[Finding], status: str) -> Finding:
    """The only finding that is not ok, which has this status and, when it is bad, says what to do."""
    bad = [finding for finding in findings if finding.status != "ok"]
    assert len(bad) == 1, findings
    assert bad[0].status == status
    assert bad[0].todo
    return bad[0]
