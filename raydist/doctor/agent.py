"""The actor that looks at its node. Sent by value, with the modules it uses."""

from __future__ import annotations

from typing import Any

from raydist.doctor.net import Listeners, reach, source_of
from raydist.doctor.probe import clock, facts, remove, storage, unreadable
from raydist.doctor.reduce import all_reduce, free_port


class Agent:
    """One process on a node; it holds the node's test ports open until it ends."""

    def __init__(self, greeting: str) -> None:
        self.listeners = Listeners(greeting)

    def facts(self) -> dict[str, Any]:
        return {**facts(), "ports": self.listeners.ports}

    def clock(self) -> float:
        return clock()

    def reach(self, targets: list[dict[str, Any]], peers: list[str]) -> tuple[list[dict[str, Any]], dict[str, str | None]]:
        return reach(targets), {ip: source_of(ip) for ip in peers}

    def storage(self, folder: str, token: str, name: str) -> dict[str, Any]:
        return storage(folder, token, name)

    def remove(self, folder: str, name: str) -> None:
        remove(folder, name)

    def unreadable(self, paths: list[str]) -> dict[str, str]:
        return unreadable(paths)

    def free_port(self) -> int:
        return free_port()

    def all_reduce(self, *args: Any) -> dict[str, Any]:
        return all_reduce(*args)
