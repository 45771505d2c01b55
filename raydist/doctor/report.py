"""What the doctor saw (`Survey`), what it says of it (`Finding`), and how that is printed. Neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from raydist.plain_table import aligned

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was found, on which node or pair of nodes, and what to do (empty when nothing is)."""

    check: str
    status: Status
    found: str
    where: str = ""
    todo: str = ""


@dataclass
class Seen:
    """One node. `facts` is what `probe.facts` gave there, or None with a `problem`; `offset` its clock against the driver's.

    `sources`: IP of each other node -> own address towards it, None without a route. `storage` and `unreadable` are as `probe`
    gives them; None when there was no job to ask about, or no answer.
    """

    node_id: str
    ip: str
    name: str
    head: bool
    resources: dict[str, float]
    facts: dict[str, Any] | None = None
    problem: str | None = None
    offset: tuple[float, float] | None = None
    sources: dict[str, str | None] = field(default_factory=dict)
    storage: dict[str, Any] | None = None
    unreadable: dict[str, str] | None = None


@dataclass
class Reduced:
    """An all-reduce: `ranks[i]` is what rank i gave (`reduce.all_reduce`), or None with the reason why none was tried."""

    backend: str
    where: list[str]
    ranks: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None


@dataclass
class Survey:
    """All that was gathered. `links` are `net.reach`'s answers with `source` added; `source` and `node` are node ids."""

    nodes: list[Seen]
    driver: dict[str, str | None]
    lost: list[str] = field(default_factory=list)
    wanted: int | None = None
    missing: list[str] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    reduced: list[Reduced] = field(default_factory=list)
    storage: str | None = None
    needed_bytes: int | None = None
    shared_found: list[str] | None = None
    data: list[str] = field(default_factory=list)

    @property
    def told(self) -> list[Seen]:
        """Nodes that answered."""
        return [node for node in self.nodes if node.facts is not None]


def text(findings: Sequence[Finding]) -> str:
    """The table, and under it what to do about each line that is not ok."""
    rows = [["", "check", "where", "found"]]
    rows += [[finding.status, finding.check, finding.where, finding.found] for finding in findings]
    lines = aligned(rows, indent="")
    todo = [finding for finding in findings if finding.todo and finding.status in ("warn", "fail")]
    if todo:
        lines += ["", "what to do"]
        lines += [f"  {f.check}{f' ({f.where})' if f.where else ''}: {f.todo}" for f in todo]
    counts = {status: sum(f.status == status for f in findings) for status in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def plain(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as JSON."""
    return {"good": not failed(findings), "findings": [asdict(finding) for finding in findings]}


def failed(findings: Sequence[Finding]) -> bool:
    """Whether something must be mended before training."""
    return any(finding.status == "fail" for finding in findings)
