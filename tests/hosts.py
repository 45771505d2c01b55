"""Hosts of their own on one machine: network, host name, processes and /tmp/ray are each host's, files are shared.

Each host is a set of Linux namespaces, joined by a veth pair to a bridge in one more of them, the switch. The machine's own
network is not touched, and when the first process of a host ends, the kernel ends all others in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"


def why_not() -> str | None:
    """Why hosts cannot be made here; None when they can."""
    absent = [program for program in ("ip", "nft", "unshare", "nsenter") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: iproute2, nftables, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
        timeout=20,
    )
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()[-200:]}"


_TRIAL = (
    "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && nft 'add table inet t' && mount -t tmpfs none /tmp"
)


class Host:
    """One host. `run` and `popen` start commands in it; `end` ends everything in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        private = folder / name
        private.mkdir()
        Path("/tmp/ray").mkdir(exist_ok=True)
        script = f"hostname {name}; mount --bind {private} /tmp/ray; ip link set lo up; echo up; exec sleep infinity"
        self.process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"
        parent = self.process.pid
        self.pid = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
        self._enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", "--"]

    def run(
        self, *command: str, timeout: float = 60.0, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its output is in the error when it fails."""
        done = subprocess.run(
            [*self._enter, *command], capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment}
        )
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stdout}\n{done.stderr}"
        return done

    def popen(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command; its output goes to one pipe."""
        return subprocess.Popen(
            [*self._enter, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )

    def block(self, source: str, ports: str) -> None:
        """Let `source` (an IP) begin no connection to these TCP ports of this host, such as `50000-60999`."""
        rules = (
            "add table inet raydist; add chain inet raydist input { type filter hook input priority 0; }; "
            f"add rule inet raydist input ip saddr {source} tcp dport {ports} tcp flags & (fin|syn|rst|ack) == syn drop"
        )
        self.run("nft", rules)

    def unblock(self) -> None:
        self.run("nft", "delete table inet raydist")

    def end(self) -> None:
        """Kill the first process, and with it all others; returns when they are gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Hosts:
    """A switch and hosts `names`, at 10.77.0.1, .2, …; each has `eth0` on the switch, and `eth1` that leads nowhere."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.switch = Host("switch", folder)
        self.hosts: dict[str, Host] = {}
        try:
            self.switch.run("sh", "-c", "ip link add br0 type bridge && ip link set br0 up")
            for number, name in enumerate(names, start=1):
                self._plug_in(name, number, folder)
        except BaseException:
            self.end()
            raise

    def _plug_in(self, name: str, number: int, folder: Path) -> None:
        host = self.hosts[name] = Host(name, folder)
        # the switch's network alone: its namespace of processes does not know the host's
        network = ["nsenter", "-t", str(self.switch.pid), "-n", "--"]
        link = ["ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        subprocess.run([*network, *link], check=True, capture_output=True, timeout=10)
        self.switch.run("sh", "-c", f"ip link set to-{name} master br0 && ip link set to-{name} up")
        away = f"10.9.{number}.1/24"  # no other host is in it; below the others, for gloo lets the lower address listen
        host.run(
            "sh",
            "-c",
            f"ip addr add {self.ip(number)}/24 dev eth0 && ip link set eth0 up && ip link add eth1 type veth peer name far1"
            f" && ip link set far1 up && ip addr add {away} dev eth1 && ip link set eth1 up",
        )

    @staticmethod
    def ip(number: int) -> str:
        return f"{NETWORK}.{number}"

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, name: str) -> None:
        """Pull the host's cable."""
        self.switch.run("ip", "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        self.switch.run("ip", "link", "set", f"to-{name}", "up")

    def end(self) -> None:
        for host in [*self.hosts.values(), self.switch]:
            host.end()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()
