"""Checks of the nodes one by one and of their likeness: each takes the survey and gives its findings."""

from __future__ import annotations

from collections import defaultdict

from raydist.doctor.report import Finding, Seen, Status, Survey
from raydist.plain_table import size

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
FEW_FILES, TOO_FEW_FILES = 8192, 1024
HOT_C = 85


def check_nodes(survey: Survey) -> list[Finding]:
    """Every node that the cluster lists answers, and there are as many as were asked for."""
    found = [
        Finding(
            "nodes",
            "fail",
            node.problem or "no answer",
            node.name,
            "look at its raylet's log (/tmp/ray/session_latest/logs), and see whether the head node reaches it; join it again",
        )
        for node in survey.nodes
        if node.facts is None
    ]
    found += [
        Finding("nodes", "fail", "no such node in the cluster", name, "start Ray there, or correct --nodes")
        for name in survey.missing
    ]
    found += [
        Finding("nodes", "warn", "left the cluster", name, "nothing, if that was meant; else start Ray there again")
        for name in survey.lost
    ]
    if survey.wanted is not None and len(survey.nodes) < survey.wanted:
        words = f"{len(survey.nodes)} nodes, and --nodes asks for {survey.wanted}"
        found.append(Finding("nodes", "fail", words, todo="start Ray on the others with `ray start --address=…`"))
    if any(finding.status == "fail" for finding in found):
        return found
    cpus = sum(node.resources.get("CPU", 0.0) for node in survey.nodes)
    gpus = sum(node.resources.get("GPU", 0.0) for node in survey.nodes)
    return [Finding("nodes", "ok", f"{len(survey.nodes)} answer: {cpus:g} CPUs, {gpus:g} GPUs"), *found]


def check_versions(survey: Survey) -> list[Finding]:
    """Python, torch, Ray, raydist, CUDA, NCCL and the driver are the same everywhere."""
    found: list[Finding] = []
    everyone = [("here", survey.driver), *((node.name, (node.facts or {})["versions"]) for node in survey.told)]
    for what in ("python", "ray", "torch", "raydist", "cuda", "nccl", "driver"):
        places: dict[str | None, list[str]] = defaultdict(list)
        for name, versions in everyone:
            if name != "here" or what in ("python", "ray", "torch", "raydist"):  # this machine need not have GPUs
                places[versions.get(what)].append(name)
        if len(places) < 2:
            continue
        words = "; ".join(f"{version or 'none'} ({_some(names)})" for version, names in places.items())
        absent = places.get(None)
        todo = f"install one version of {what} on all nodes" + (f" (none on {_some(absent)})" if absent else "")
        mild = what == "driver" or (what == "python" and len({_minor(version) for version in places}) == 1)
        found.append(Finding("versions", "warn" if mild else "fail", f"{what}: {words}", todo=todo))
    if found:
        return found
    shown = [f"{what} {version}" for what, version in survey.driver.items() if version and what != "driver"]
    return [Finding("versions", "ok", ", ".join(shown))]


def _minor(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_gpus(survey: Survey) -> list[Finding]:
    """Ray offers the GPUs that the driver sees, and each of them computes."""
    found: list[Finding] = []
    total = 0
    for node in survey.told:
        gpus = (node.facts or {})["gpus"]
        seen, offered = gpus["seen"], node.resources.get("GPU", 0.0)
        total += len(seen)
        if offered != len(seen):
            words = f"Ray offers {offered:g} and the driver sees {len(seen)}"
            todo = "start Ray again on this node, without --num-gpus or with the number that is there"
            found.append(Finding("gpus", "fail" if offered > len(seen) else "warn", words, node.name, todo))
        for words in gpus["broken"]:
            todo = "look at `nvidia-smi` and `dmesg` there; reset or drain the node"
            found.append(Finding("gpus", "fail", words, node.name, todo))
        found += _worn(node, seen)
    if found:
        return found
    return [Finding("gpus", "ok", f"{total} GPUs, each computes" if total else "none")]


def _worn(node: Seen, seen: list[dict[str, str]]) -> list[Finding]:
    """GPUs with memory errors, too hot, or mostly taken."""
    found: list[Finding] = []
    for number, gpu in enumerate(seen):
        errors, heat = _number(gpu.get("ecc.errors.uncorrected.volatile.total")), _number(gpu.get("temperature.gpu"))
        used, total = _number(gpu.get("memory.used")), _number(gpu.get("memory.total"))
        if errors:
            found.append(Finding("gpus", "fail", f"GPU {number}: {errors:g} uncorrected memory errors", node.name, "reset it"))
        if heat and heat >= HOT_C:
            found.append(Finding("gpus", "warn", f"GPU {number}: {heat:g} °C", node.name, "look at its cooling"))
        if used and total and used > 0.5 * total:
            words = f"GPU {number}: {used:g} of {total:g} MiB are taken"
            found.append(Finding("gpus", "warn", words, node.name, "see `nvidia-smi` for whose processes these are"))
    return found


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def check_clock(survey: Survey) -> list[Finding]:
    """Clocks agree with the driver's, beyond what the way there and back leaves open."""
    found: list[Finding] = []
    worst = 0.0
    for node in survey.told:
        if node.offset is None:
            continue
        offset, error = node.offset
        sure = max(0.0, abs(offset) - error)
        worst = max(worst, abs(offset))
        if sure < CLOCK_WARN_S:
            continue
        status: Status = "fail" if sure >= CLOCK_FAIL_S else "warn"
        words = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
        todo = "set the clock by NTP (`timedatectl set-ntp true`, chrony); object stores refuse requests of a wrong clock"
        found.append(Finding("clock", status, words, node.name, todo))
    return found or [Finding("clock", "ok", f"at most {1000 * worst:.0f} ms apart")]


def check_shm(survey: Survey) -> list[Finding]:
    """/dev/shm holds Ray's object store."""
    found: list[Finding] = []
    least: int | None = None
    for node in survey.told:
        shm = (node.facts or {})["shm"]
        if shm is None:
            found.append(Finding("/dev/shm", "fail", "not there", node.name, "mount a tmpfs at /dev/shm"))
            continue
        store = node.resources.get("object_store_memory", 0.0)
        least = shm["free"] if least is None else min(least, shm["free"])
        if shm["total"] < store:
            words = f"{size(shm['total'])}, and Ray's object store may take {size(store)}"
            todo = f"give the container --shm-size={int(store / 2**30 * 1.3) + 1}g, or Ray a smaller --object-store-memory"
            found.append(Finding("/dev/shm", "fail", words, node.name, todo))
        elif shm["free"] < 256 * 2**20:
            todo = "remove what is left there of processes that were killed"
            found.append(Finding("/dev/shm", "warn", f"only {size(shm['free'])} free", node.name, todo))
    return found or [Finding("/dev/shm", "ok", f"at least {size(least or 0)} free")]


def check_files(survey: Survey) -> list[Finding]:
    """A process may open enough files."""
    found: list[Finding] = []
    for node in survey.told:
        limit = (node.facts or {})["files"]
        if 0 <= limit < FEW_FILES:
            status: Status = "fail" if limit < TOO_FEW_FILES else "warn"
            todo = "raise it where Ray is started (`ulimit -n 65536`)"
            found.append(Finding("open files", status, f"{limit} a process", node.name, todo))
    limits = [(node.facts or {})["files"] for node in survey.told]
    return found or [Finding("open files", "ok", f"at least {min(limits, default=0)} a process")]
