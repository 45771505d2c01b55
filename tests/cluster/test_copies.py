"""Copies of the state in the memory of nodes: the newest good one comes back whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raydist.runners.copies import Copies, Holders
from raydist.state import TrainState

pytestmark = pytest.mark.cluster


@pytest.fixture
def holders(ray_cluster: Any) -> Iterator[Holders]:
    found = Holders()
    yield found
    found.close()


def state(value: float) -> TrainState:
    model = {"a": torch.full((3,), value), "b": torch.tensor([[1.0]], dtype=torch.bfloat16)}
    model["tied"] = model["a"]
    return TrainState(model, optimizer={"state": {0: {"step": torch.tensor(3)}}, "param_groups": []}, counters={"step": 7})


def test_the_newest_copy_comes_back_equal_and_apart_from_the_live_state(holders: Holders) -> None:
    copies, live = holders.copies(set()), state(1.0)
    copies.put(6, live)
    live.model["a"].zero_()
    copies.put(7, state(2.0))
    found = Copies(copies.holders).newest(5)
    assert found is not None and found[0] == 7
    expected = state(2.0)
    for name, tensor in expected.model.items():
        assert torch.equal(found[1].model[name], tensor) and found[1].model[name].dtype == tensor.dtype
    assert found[1].model["tied"] is found[1].model["a"]
    assert found[1].counters == {"step": 7} and int(found[1].optimizer["state"][0]["step"]) == 3
    found[1].model["a"].add_(1.0)  # what comes back is the caller's own
    assert copies.newest(7) is None


def test_a_copy_taken_before_a_change_holds_what_was_there(holders: Holders) -> None:
    copies, live = holders.copies(set()), state(1.0)
    copies.put(6, live)
    live.model["a"].zero_()
    found = copies.newest(-1)
    assert found is not None and found[1].model["a"].tolist() == [1.0, 1.0, 1.0]


def test_weights_that_are_not_finite_are_not_kept(holders: Holders) -> None:
    copies = holders.copies(set())
    copies.put(6, state(1.0))
    copies.put(7, state(float("nan")))
    found = copies.newest(-1)
    assert found is not None and found[0] == 6


def test_a_holder_that_is_gone_is_no_error(holders: Holders) -> None:
    import ray

    copies = holders.copies(set())
    copies.put(6, state(1.0))
    (actor,) = copies.holders.values()
    ray.kill(actor)
    assert copies.newest(-1) is None
    copies.put(7, state(1.0))
    copies.put(8, state(1.0))
    assert copies.holders == {}


def test_nothing_is_held_on_nodes_that_leave(holders: Holders) -> None:
    import ray

    node = ray.get_runtime_context().get_node_id()
    assert set(holders.copies(set()).holders) == {node}
    assert holders.copies(set()).holders == holders.copies(set()).holders
    other = Holders()
    assert other.copies({node}).holders == {}
