"""Copies of the training state in the memory of the cluster's nodes: a restart can go on from a step that was never saved.

The driver owns one small actor a node. Rank 0 hands its state to the one on its own node and to one on another, where there
is one, so that the loss of any single machine leaves a copy. Copies end with the driver; checkpoints are what lasts.
"""

from __future__ import annotations

from typing import Any

from raydist.state import Packed, TrainState, finite, pack, unpack

_ANSWER_S = 20.0
"""How long a restart waits for an actor to tell what it holds."""


class Holder:
    """Keeps the newest state that it was given, in its node's memory."""

    def __init__(self) -> None:
        self._step = -1
        self._packed: Packed | None = None

    def put(self, step: int, packed: Packed) -> None:
        """Replace what is held, unless weights are not finite: nothing may go on from those."""
        if finite(packed, packed.document["buffers"]):
            self._step, self._packed = step, packed

    def step(self) -> int:
        """The step of the state held; -1 when there is none."""
        return self._step

    def get(self) -> Packed:
        """The state held."""
        assert self._packed is not None
        return self._packed


class Copies:
    """What a worker sees of the holders: node id -> actor. It travels to the workers with each attempt."""

    def __init__(self, holders: dict[str, Any]) -> None:
        self.holders = holders
        self._under_way: dict[str, Any] = {}

    def put(self, step: int, state: TrainState) -> None:
        """Hand over `state`; returns when it may change. Waits for the copy before it, so that one is under way at most."""
        import ray

        self._wait()
        own = ray.get_runtime_context().get_node_id()
        others = [node for node in self.holders if node != own]
        nodes = [node for node in (own, *others[:1]) if node in self.holders]
        if nodes:
            packed = ray.put(pack(state))  # serialized before the call returns
            self._under_way = {node: self.holders[node].put.remote(step, packed) for node in nodes}

    def _wait(self) -> None:
        import ray

        for node, done in self._under_way.items():
            try:
                ray.get(done)
            except ray.exceptions.RayActorError:  # that node is gone: the next copy goes elsewhere
                self.holders.pop(node, None)
        self._under_way = {}

    def newest(self, above: int) -> tuple[int, TrainState] | None:
        """Step and state of the newest copy, if it is of a step above `above`."""
        steps = {node: found for node, found in self._steps().items() if found > above}
        for node in sorted(steps, key=lambda name: -steps[name]):
            packed = _answer(self.holders[node].get.remote())
            if packed is not None:
                return steps[node], unpack(packed.tensors, packed.other, packed.document)
        return None

    def _steps(self) -> dict[str, int]:
        asked = {node: holder.step.remote() for node, holder in self.holders.items()}
        return {node: -1 if (found := _answer(step)) is None else found for node, step in asked.items()}


def _answer(asked: Any) -> Any:
    """What an actor answers; None when its node is gone or does not answer."""
    import ray

    try:
        return ray.get(asked, timeout=_ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


class Holders:
    """The driver's side: a holder on each node that is there and stays."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def copies(self, leaving: set[str]) -> Copies:
        """Holders on all nodes but those `leaving`, started where there was none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._actors = {node: actor for node, actor in self._actors.items() if node in alive}
        holder: Any = ray.remote(num_cpus=0)(Holder)
        for node in sorted(alive - leaving - set(self._actors)):
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors[node] = holder.options(scheduling_strategy=there).remote()
        return Copies(dict(self._actors))

    def close(self) -> None:
        """End the holders."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
