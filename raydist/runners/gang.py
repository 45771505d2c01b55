"""The ranks of `raydist run` on a cluster: a placement group with one bundle a worker, one actor in each, numbered by node."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raydist.errors import ConfigError, TrainError
from raydist.runners.rank import End, News, Order, Place, Rank

_POLL_S = 5.0
_LOOK_S = 0.2
_BUSY_S = 10.0
_THREADS = 3
"""Of an actor: `poll` takes one while it waits."""


@dataclass(frozen=True)
class Seat:
    """A rank's numbers, as torchrun counts: `local` on its node, `group` is the node's."""

    rank: int
    local: int
    local_size: int
    group: int
    groups: int
    place: Place
    devices: tuple[str, ...]
    """GPUs of all ranks on the node, in order of local rank."""


def seats(places: Sequence[Place], first: str | None) -> list[tuple[int, Seat]]:
    """(index into `places`, its seat) in order of rank: node by node, `first` before the other nodes."""
    nodes = list(dict.fromkeys(place.node for place in places))
    nodes.sort(key=lambda node: node != first)
    found: list[tuple[int, Seat]] = []
    for group, node in enumerate(nodes):
        here = [index for index, place in enumerate(places) if place.node == node]
        here.sort(key=lambda index: [_number(gpu) for gpu in places[index].gpus])
        devices = tuple(gpu for index in here for gpu in places[index].gpus)
        for local, index in enumerate(here):
            found.append((index, Seat(len(found), local, len(here), group, len(nodes), places[index], devices)))
    return found


def rank_variables(seat: Seat, workers: int, master: tuple[str, int]) -> dict[str, str]:
    """What torch.distributed reads of the environment, at least."""
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(seat.local),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def _number(gpu: str) -> tuple[int, str]:
    return (int(gpu) if gpu.isdigit() else math.inf, gpu)  # type: ignore[return-value]


def check_fits(workers: int, need: dict[str, float]) -> None:
    """ConfigError with the numbers when the cluster's nodes cannot hold `workers` workers that need `need` each."""
    import ray

    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    wanted = {name: amount for name, amount in need.items() if amount}
    fits = sum(
        min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items()), default=workers) for node in nodes
    )
    if fits >= workers:
        return
    asked = ", ".join(f"{amount * workers:g} {name}" for name, amount in wanted.items())
    there = ", ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name}" for name in wanted)
    raise ConfigError(
        f"--workers {workers} needs {asked}, and the cluster has {there} on {len(nodes)} "
        f"node{'s' * (len(nodes) != 1)}, room for {fits}. Lower --workers, --cpus-per-worker or --gpus-per-worker, or add nodes"
    )


class Gang:
    """Actors for all ranks. They and the placement group are gone after `close`, and when this process ends in any way."""

    def __init__(self, workers: int, need: dict[str, float], say: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {name: amount for name, amount in need.items() if amount} or {"CPU": 0.001}
        self._group = placement_group([bundle] * workers, strategy="PACK")
        self.actors: list[Any] = []
        self.seats: list[Seat] = []
        try:
            self._wait(say, stopped, f"{workers} workers ({', '.join(f'{a:g} {n}' for n, a in bundle.items())} each)")
            actor: Any = ray.remote(Rank)
            made = [
                actor.options(
                    num_cpus=bundle.get("CPU", 0.0),
                    num_gpus=bundle.get("GPU", 0.0),
                    max_concurrency=_THREADS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                ).remote()
                for index in range(workers)
            ]
            self.actors = made
            places = self._get([one.place.remote() for one in made], stopped)
            here = ray.get_runtime_context().get_node_id()
            order = seats(places, here)
            self.actors = [made[index] for index, _ in order]
            self.seats = [seat for _, seat in order]
        except BaseException:
            self.close()
            raise

    def _wait(self, say: Callable[[str], None], stopped: Callable[[], bool], what: str) -> None:
        began, told = time.monotonic(), False
        while not self._group.wait(_LOOK_S):
            if stopped():
                raise KeyboardInterrupt
            if not told and time.monotonic() - began > _BUSY_S:
                say(f"waiting for {what}: the cluster has them, and others use them now (Ctrl-C gives up)")
                told = True

    def _get(self, references: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        import ray

        left = references
        while left:
            left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)[1]
            if stopped():
                raise KeyboardInterrupt
        return list(ray.get(references))

    def free_port(self) -> int:
        """A port on rank 0's node."""
        import ray

        return int(ray.get(self.actors[0].free_port.remote()))

    def start(self, orders: Sequence[Order]) -> None:
        """Start all ranks' scripts."""
        import ray
        from ray.exceptions import RayActorError

        try:
            ray.get([actor.start.remote(order) for actor, order in zip(self.actors, orders, strict=True)])
        except RayActorError as error:
            raise TrainError("a worker's process ended before its script began (killed, or its node is gone)") from error
        self._polls = {actor.poll.remote(_POLL_S): rank for rank, actor in enumerate(self.actors)}

    def news(self) -> dict[int, News]:
        """What is new of any ranks, after at most a moment. A rank whose process is gone has ended with code 1."""
        import ray
        from ray.exceptions import RayActorError

        found: dict[int, News] = {}
        ready = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)[0] if self._polls else []
        if not ready and self._polls:
            ready = ray.wait(list(self._polls), num_returns=1, timeout=_LOOK_S)[0]
        for reference in ready:
            rank = self._polls.pop(reference)
            try:
                found[rank] = ray.get(reference)
            except RayActorError:
                words = "its process ended without a word (killed, out of memory, or its node is gone)"
                found[rank] = News([], End(1, time.time(), words=words))
            if found[rank].end is None:
                self._polls[self.actors[rank].poll.remote(_POLL_S)] = rank
        return found

    def running(self) -> list[int]:
        """Ranks that have not ended yet."""
        return sorted(self._polls.values())

    def signal(self, number: int) -> None:
        """Send a signal to all scripts that run."""
        for rank in self.running():
            self.actors[rank].signal.remote(number)

    def kill(self) -> None:
        """Kill all scripts that run, and what they started."""
        for rank in self.running():
            self.actors[rank].kill.remote()

    def close(self) -> None:
        """Remove the actors and the placement group."""
        import ray
        from ray.util import remove_placement_group

        for actor in self.actors:
            with suppress(Exception):
                ray.kill(actor)
        self.actors = []
        remove_placement_group(self._group)
