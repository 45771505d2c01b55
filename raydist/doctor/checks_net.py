"""Checks of the ways between nodes: host names, interfaces, ports, and an all-reduce that uses them all."""

from __future__ import annotations

import ipaddress
from collections import defaultdict

from raydist.doctor.net import ephemeral_range
from raydist.doctor.report import Finding, Reduced, Seen, Survey

SLOW_BYTES_PER_S = 50e6


def is_loopback(ip: str) -> bool:
    """Whether only the machine itself can use this address."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def check_host_name(survey: Survey) -> list[Finding]:
    """The host's own name leads to an address that others can use: gloo listens where it leads."""
    found: list[Finding] = []
    for node in survey.told:
        facts = node.facts or {}
        pinned = facts["environment"].get("GLOO_SOCKET_IFNAME")
        addresses = facts["resolves_to"]
        if len(survey.nodes) > 1 and is_loopback(node.ip):
            todo = "start Ray there with --node-ip-address=IP, an address that the others reach"
            found.append(Finding("host name", "fail", f"Ray knows this node as {node.ip}", node.name, todo))
        if addresses and not all(is_loopback(ip) for ip in addresses):
            continue
        words = f"{facts['host']!r} " + (f"resolves to {', '.join(addresses)} only" if addresses else "does not resolve")
        todo = f"put `{node.ip} {facts['host']}` into /etc/hosts there, or set GLOO_SOCKET_IFNAME where Ray is started"
        bad = len(survey.nodes) > 1 and not pinned
        words += f", and GLOO_SOCKET_IFNAME is {pinned}" if pinned else ""
        found.append(Finding("host name", "fail" if bad else "ok", words, node.name, todo if bad else ""))
    return found or [Finding("host name", "ok", "each leads to an address of the network")]


def interface_of(ip: str | None, interfaces: dict[str, list[str]]) -> str | None:
    """The interface that has this address."""
    return next((name for name, ips in interfaces.items() if ip in ips), None)


def gloo_takes(node: Seen) -> tuple[str, str]:
    """The interface that gloo will listen on, and why, by its rule: the variable, the host name's address, or loopback."""
    facts = node.facts or {}
    pinned = facts["environment"].get("GLOO_SOCKET_IFNAME")
    if pinned:
        return pinned, f"GLOO_SOCKET_IFNAME={pinned}"
    for ip in facts["resolves_to"]:
        name = interface_of(ip, facts["interfaces"])
        if name is not None:
            return name, f"{facts['host']!r} resolves to {ip}"
    there = ", ".join(facts["resolves_to"]) or "nothing"
    return "lo", f"{facts['host']!r} resolves to {there}, no address of this node"


def nccl_takes(node: Seen) -> tuple[list[str], str]:
    """The interfaces that NCCL may use, and why: its variable (`^` excludes, `=` exact, else prefixes), or all real ones."""
    facts = node.facts or {}
    names = [name for name in facts["interfaces"] if name != "lo"]
    pinned = facts["environment"].get("NCCL_SOCKET_IFNAME")
    if not pinned:
        return [n for n in names if not n.startswith("docker")] or names, "no NCCL_SOCKET_IFNAME"
    exclude, rest = pinned.startswith("^"), pinned.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    wanted = rest.split(",")
    match = {n for n in names if any(n == w if exact else n.startswith(w) for w in wanted)}
    return [n for n in names if (n in match) != exclude], f"NCCL_SOCKET_IFNAME={pinned}"


def check_interface(survey: Survey) -> list[Finding]:
    """Gloo and NCCL listen on the interface by which the other nodes are reached."""
    if len(survey.nodes) < 2:
        return [Finding("interface", "ok", "one node: loopback will do")]
    if len(survey.told) < 2:
        return [Finding("interface", "skip", "only one node answers")]
    found: list[Finding] = []
    good: dict[str, list[str]] = defaultdict(list)
    with_gpus = any(node.resources.get("GPU") for node in survey.nodes)
    for node in survey.told:
        interfaces = (node.facts or {})["interfaces"]
        lost = sorted(peer for peer, ip in node.sources.items() if ip is None)
        if lost:
            todo = "give this node a route to them (`ip route`), or a network that both are in"
            found.append(Finding("interface", "fail", f"no route to {', '.join(lost)}", node.name, todo))
        needed = sorted({name for ip in node.sources.values() if (name := interface_of(ip, interfaces)) is not None})
        if not needed:
            continue
        takes, why = gloo_takes(node)
        if takes not in needed:
            found.append(_wrong("gloo", takes, why, node, needed))
        if with_gpus:
            many, why = nccl_takes(node)
            if not set(many) & set(needed):
                found.append(_wrong("NCCL", ", ".join(many) or "none", why, node, needed))
        good[needed[0]].append(node.name)
    if found:
        return found
    words = "; ".join(f"{name} on {len(names)} nodes" for name, names in good.items())
    only = next(iter(good), None)
    pin = f" (to pin it: GLOO_SOCKET_IFNAME={only} NCCL_SOCKET_IFNAME={only})" if len(good) == 1 else ""
    return [Finding("interface", "ok", f"{words}{pin}")]


def _wrong(library: str, takes: str, why: str, node: Seen, needed: list[str]) -> Finding:
    variable = f"{library.upper()}_SOCKET_IFNAME"
    words = f"{library} takes {takes} ({why}), and the other nodes are reached by {', '.join(needed)}"
    todo = f"set {variable}={needed[0]} where Ray is started on this node, and start it again"
    return Finding("interface", "fail", words, node.name, todo)


def check_ports(survey: Survey) -> list[Finding]:
    """Every node reaches every other one at Ray's ports and in the range where process groups and NCCL listen."""
    if len(survey.nodes) < 2:
        return [Finding("ports", "ok", "one node: nothing is between")]
    if len(survey.told) < 2:
        return [Finding("ports", "skip", "only one node answers")]
    names = {node.node_id: node.name for node in survey.nodes}
    by_pair: dict[tuple[str, str, str], list[dict[str, object]]] = defaultdict(list)
    for link in survey.links:
        by_pair[names[link["source"]], names[link["node"]], link["what"]].append(link)
    found: list[Finding] = []
    low, high = ephemeral_range()
    for (source, target, what), links in by_pair.items():
        bad = [link for link in links if link["error"] is not None]
        if not bad:
            continue
        ports = ", ".join(str(link["port"]) for link in bad)
        errors = ", ".join(sorted({str(link["error"]) for link in bad}))
        span = f"TCP {low}–{high}" if what == "process group" else f"TCP {ports}"
        todo = f"allow {span} from {source} to {target} (firewall, security group: all TCP between the nodes is the usual rule)"
        words = f"{what}: {len(bad)} of {len(links)} ports cannot be reached ({ports}: {errors})"
        found.append(Finding("ports", "fail", words, f"{source} → {target}", todo))
    if found:
        return found
    pairs = {(link["source"], link["node"]) for link in survey.links}
    return [Finding("ports", "ok", f"{len(survey.links)} ports reached, {len(pairs)} ways between {len(survey.nodes)} nodes")]


def check_all_reduce(survey: Survey) -> list[Finding]:
    """A sum over the nodes is right, and not slow."""
    return [finding for reduced in survey.reduced for finding in _reduced(reduced)]


def _reduced(reduced: Reduced) -> list[Finding]:
    check = f"all-reduce {reduced.backend}"
    if reduced.skipped is not None:
        return [Finding(check, "skip", reduced.skipped)]
    broken = [(where, rank) for where, rank in zip(reduced.where, reduced.ranks, strict=True) if not rank["right"]]
    if broken:
        words = broken[0][1]["error"] or "a wrong sum"
        where = ", ".join(name for name, _ in broken) if len(broken) < len(reduced.ranks) else "all"
        todo = (
            "mend interface and ports first, if they are not ok; else look for the first rank that fails with NCCL_DEBUG=INFO"
        )
        return [Finding(check, "fail", f"{len(broken)} of {len(reduced.ranks)} ranks failed: {words}", where, todo)]
    speed = min(rank["bytes_per_s"] for rank in reduced.ranks)
    words = f"right on {len(reduced.ranks)} ranks, {speed / 1e9:.2g} GB/s"
    if speed < SLOW_BYTES_PER_S:
        todo = "see whether the interface is the fast one, and whether something else fills the network"
        return [Finding(check, "warn", words, todo=todo)]
    return [Finding(check, "ok", words)]
