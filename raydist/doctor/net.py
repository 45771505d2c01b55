"""Reaching other nodes, from a node. Runs there, sent by value, as `probe` is."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LISTENERS = 6
"""Ports of the ephemeral range that each node opens for the test. Process groups and NCCL listen in this range."""
CONNECT_S = 3.0


class Listeners:
    """Open ports spread over the ephemeral range; whoever connects is greeted with `greeting`."""

    def __init__(self, greeting: str, count: int = LISTENERS) -> None:
        self.greeting = greeting.encode()
        self.sockets = [_listen(at / count) for at in range(count)]
        self.ports = [listener.getsockname()[1] for listener in self.sockets]
        for listener in self.sockets:
            threading.Thread(target=self._greet, args=(listener,), daemon=True).start()

    def _greet(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:  # closed
                return
            with peer:
                try:
                    peer.sendall(self.greeting)
                except OSError:
                    continue

    def close(self) -> None:
        for listener in self.sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the system gives out."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except OSError:
        return 32768, 60999


def _listen(place: float) -> socket.socket:
    """A listener at the first free port from `place` (0 to 1) of the ephemeral range on, for IPv4 and IPv6."""
    low, high = ephemeral_range()
    start = low + int((high - low) * place)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in (*range(start, min(start + 200, high)), 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("", port))
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        return listener
    raise OSError("no free port")


def reach(targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Try each target `{node, ip, port, what, greeting}`; the same with `error` (None: reached), all at the same time."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        return list(pool.map(_try, targets))


def _try(target: dict[str, Any]) -> dict[str, Any]:
    error = None
    try:
        with socket.create_connection((target["ip"], target["port"]), timeout=CONNECT_S) as peer:
            if target["greeting"] is not None:
                wanted = target["greeting"].encode()
                heard = peer.recv(len(wanted), socket.MSG_WAITALL)
                if heard != wanted:
                    error = "another machine answers at this address"
    except TimeoutError:
        error = "timed out"
    except OSError as problem:
        error = problem.strerror or str(problem)
    return {**target, "error": error}


def source_of(ip: str) -> str | None:
    """The own address from which packets to `ip` leave; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as peer:
        try:
            peer.connect((ip, 9))
        except OSError:
            return None
        return str(peer.getsockname()[0])
