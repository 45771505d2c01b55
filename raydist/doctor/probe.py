"""What one node tells of itself. Runs there, sent by value: it imports nothing of raydist, which may be absent there."""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

OFFSET = "RAYDIST_FAKE_CLOCK_OFFSET_S"
"""Seconds that a node's clock pretends to be ahead: for tests, since one machine has one clock."""
TOLD = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_IB_DISABLE", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES")


def facts() -> dict[str, Any]:
    """Plain data about this node, gathered without changing anything."""
    return {
        "host": socket.gethostname(),
        "resolves_to": addresses_of(socket.gethostname()),
        "versions": versions(),
        "gpus": gpus(),
        "interfaces": interfaces(),
        "environment": {name: os.environ[name] for name in TOLD if os.environ.get(name)},
        "shm": space("/dev/shm"),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cpus": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    """Python, libraries, CUDA, NCCL and the GPU driver; None is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ray", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["raydist"] = _imported_version("raydist")  # may lie on the path without being installed
    found["cuda"], found["nccl"], found["driver"] = _cuda()
    return found


def _imported_version(name: str) -> str | None:
    """Of the package that a worker here would import."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except ImportError:
        return None


def _cuda() -> tuple[str | None, str | None, str | None]:
    try:
        import torch
    except ImportError:
        return None, None, None
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else None
    )
    lines = _nvidia("driver_version")
    return torch.version.cuda, nccl, lines[0][0] if lines else None


def _nvidia(*fields: str) -> list[list[str]]:
    """`nvidia-smi`'s fields, a line for each GPU; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()] if done.returncode == 0 else []


def gpus() -> dict[str, Any]:
    """What the driver sees, and whether each GPU computes: in a process of its own, since Ray hides GPUs from tasks."""
    fields = ("name", "memory.total", "memory.used", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")
    seen = [dict(zip(fields, line, strict=False)) for line in _nvidia(*fields)]
    return {"seen": seen, "broken": _broken_gpus(len(seen)) if seen else []}


def _broken_gpus(count: int) -> list[str]:
    code = (
        "import sys, torch\n"
        "print('count', torch.cuda.device_count(), flush=True)\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    a = torch.ones(512, 512, device=f'cuda:{i}')\n"
        "    good = bool(((a @ a) == 512).all())\n"
        "    print('gpu', i, 'good' if good else 'computes wrongly', flush=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env=environment)
    except subprocess.TimeoutExpired:
        return ["a 512 × 512 product took more than 20 s"]
    lines = done.stdout.splitlines()
    bad = [line for line in lines if line.startswith("gpu") and not line.endswith("good")]
    if done.returncode:
        bad.append((done.stderr.strip().splitlines() or ["torch.cuda failed"])[-1])
    elif f"count {count}" not in lines:
        bad.append(f"the driver shows {count} and torch {lines[0].removeprefix('count ') if lines else 'none'}")
    return bad


def addresses_of(name: str) -> list[str]:
    """What a host name resolves to; empty when it does not."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def interfaces() -> dict[str, list[str]]:
    """Name -> its IP addresses, of those that are up."""
    import psutil  # comes with ray

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [e.address.partition("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        if name in up and ips:
            found[name] = ips
    return found


def space(path: str) -> dict[str, int] | None:
    """Bytes of the file system at `path`."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return {"total": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize}


def clock() -> float:
    """This node's time, seconds since the epoch."""
    return time.time() + float(os.environ.get(OFFSET) or 0)


def storage(folder: str, token: str, name: str) -> dict[str, Any]:
    """Read `token.txt` in `folder` (what the driver wrote), write `name` beside it, and say how much room there is."""
    found: dict[str, Any] = {"reads": False, "writes": False, "free": None, "error": None}
    try:
        if "://" in folder and not folder.startswith("file://"):
            import fsspec

            fs, path = fsspec.core.url_to_fs(folder)
            found["reads"] = fs.cat_file(f"{path}/token.txt").decode() == token
            fs.pipe_file(f"{path}/{name}", token.encode())
        else:
            path = folder.removeprefix("file://")
            if os.path.isfile(f"{path}/token.txt"):
                with open(f"{path}/token.txt") as file:
                    found["reads"] = file.read() == token
            os.makedirs(path, exist_ok=True)
            with open(f"{path}/{name}", "w") as file:
                file.write(token)
            found["free"] = (space(path) or {}).get("free")
        found["writes"] = True
    except FileNotFoundError:
        found["reads"] = False
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def remove(folder: str, name: str) -> None:
    """Take this node's own file, and a folder that is empty then, away again (storage that turned out not to be shared)."""
    path = folder.removeprefix("file://")
    if "://" not in path:
        for end, what in ((os.unlink, f"{path}/{name}"), (os.rmdir, path)):
            try:
                end(what)
            except OSError:
                return


def unreadable(paths: list[str]) -> dict[str, str]:
    """Path -> why this node cannot read it. Globs must match something; of a folder one file is opened."""
    return {path: why for path in paths if (why := _why_unreadable(path)) is not None}


def _why_unreadable(path: str) -> str | None:
    try:
        if "://" in path and not path.startswith("file://"):
            import fsspec

            fs, remote = fsspec.core.url_to_fs(path)
            there = bool(fs.glob(remote)) if glob.has_magic(path) else fs.exists(remote)
            return None if there else "not there"
        matches = sorted(glob.glob(path.removeprefix("file://"))) if glob.has_magic(path) else [path.removeprefix("file://")]
        if not matches or not os.path.exists(matches[0]):
            return "not there"
        first = matches[0]
        if os.path.isdir(first):
            files = (os.path.join(at, name) for at, _, names in os.walk(first) for name in names)
            inside = next(files, None)
            if inside is None:
                return "an empty folder"
            first = inside
        with open(first, "rb") as file:
            file.read(1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
