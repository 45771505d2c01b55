"""How models are spread: what DDP exchanges and when, where layers go, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydist.config import DdpStrategy, DpStrategy, ModelParallelStrategy
from raydist.errors import ConfigError, TrainError
from raydist.strategy import check_used, place_layers, spread
from raydist.world import World, from_env
from tests.support import run_ranks

CPU = torch.device("cpu")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


# -- one worker -------------------------------------------------------------------------------------------------------


def test_one_worker_runs_the_plain_model() -> None:
    model = net()
    found = spread(DdpStrategy(), model, World())
    assert found.forward is model and found.module is model and not found.replicated
    found.check_in_sync("now")
    with found.no_sync(last=False):
        pass
    check_used(found, False, lambda m: pytest.fail("one worker has nobody to wait for"))


@pytest.mark.parametrize("strategy", [DpStrategy(), ModelParallelStrategy()])
def test_strategies_of_one_worker_refuse_several(strategy: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"strategy: {strategy.name} runs in one worker, and scaling.workers gives 2; use ddp"
    ):
        spread(strategy, net(), World(rank=0, world_size=2))


# -- layers over devices ----------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Three parts of 10, 10 and 20 parameters, with one and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))
        self.first = nn.Linear(10, 1, bias=False)
        self.second = nn.Sequential(nn.Linear(1, 5), nn.ReLU())
        self.third = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale + self.shift
        out: torch.Tensor = self.third(input=self.second(hidden))
        return out


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_auto_cuts_the_parts_into_equal_bytes_in_order() -> None:
    placed = place_layers(ModelParallelStrategy(devices=["cpu", "meta"]), Parts(), CPU)
    assert devices_of(placed) == {
        "shift": "cpu",
        "scale": "cpu",
        "first.weight": "cpu",
        "second.0.weight": "cpu",
        "second.0.bias": "cpu",
        "third.weight": "meta",
    }
    assert set(devices_of(place_layers(ModelParallelStrategy(), Parts(), CPU)).values()) == {"cpu"}


def test_a_device_map_places_by_prefix_and_inputs_follow() -> None:
    strategy = ModelParallelStrategy(device_map={"first": "cpu", "second.0": "meta", "second": "cpu", "third": "cpu"})
    placed = place_layers(strategy, Parts(), CPU)
    assert {n for n, d in devices_of(placed).items() if d == "meta"} == {"second.0.weight", "second.0.bias"}
    # positional and keyword inputs are moved to the part that takes them
    placed = place_layers(ModelParallelStrategy(device_map={"first": "cpu", "second": "cpu", "third": "meta"}), Parts(), CPU)
    assert placed(torch.ones(2, 10)).device.type == "meta"
    single = place_layers(ModelParallelStrategy(), nn.Linear(1, 1), CPU)
    assert single(torch.ones(1, 1)).shape == (1, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"device_map": {"frist": "cpu"}},
            "strategy.device_map: the model has no part 'frist'; its top-level parts are first, second",
        ),
        (
            {"device_map": {"first": "cpu", "second": "cpu"}},
            "strategy.device_map: parameter 'third.weight' is on no device; name its",
        ),
        ({"device_map": {"first": "gpu0"}}, "strategy.device_map.first: 'gpu0' is no device of this worker"),
        ({"devices": ["cpu", "quantum"]}, "strategy.devices: 'quantum' is no device of this worker"),
    ],
)
def test_a_placement_that_cannot_be_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_layers(ModelParallelStrategy.model_validate(settings), Parts(), CPU)


# -- several workers --------------------------------------------------------------------------------------------------


def step(found: Any, micro: int) -> None:
    """One optimizer step's worth of micro-batches."""
    for number in range(micro):
        with found.no_sync(last=number == micro - 1):
            found.forward(torch.ones(3, 2) * (dist.get_rank() + number)).sum().backward()


def counted(strategy: DdpStrategy, world: World) -> list[int]:
    """Reductions of each of three steps of three micro-batches."""
    found = spread(strategy, net(), world)
    assert isinstance(found.forward, DistributedDataParallel) and found.forward.module is found.module
    calls = [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        calls[0] += 1
        work = dist.all_reduce(bucket.buffer().div_(world.world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    found.forward.register_comm_hook(None, hook)
    counts = []
    for _ in range(3):
        calls[0] = 0
        found.module.zero_grad()
        step(found, 3)
        counts.append(calls[0])
    gradients = world.gather([p.grad.tolist() for p in found.module.parameters() if p.grad is not None])
    assert gradients[0] == gradients[1]
    return counts


class Half(nn.Module):
    """Uses its second layer on rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(2, 1), nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        out: torch.Tensor = self.one(x) + (self.two(x) if dist.get_rank() == 1 else 0)
        return out


def on_ranks() -> dict[str, Any]:
    world = from_env()
    try:
        found: dict[str, Any] = {
            "default": counted(DdpStrategy(), world),
            "static": counted(DdpStrategy(static_graph=True), world),
        }
        found["sync_batchnorm"] = refusal(lambda: spread(DdpStrategy(sync_batchnorm=True), net(), world))
        found["bf16"] = refusal(lambda: spread(DdpStrategy(comm_hook="bf16_compress"), net(), world))
        found |= unused(world)
        return found
    finally:
        world.close()


def unused(world: World) -> dict[str, Any]:
    found = spread(DdpStrategy(), Half(), world)
    before = {name: tensor.clone() for name, tensor in found.module.state_dict().items()}

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum()

    def breaks(model: nn.Module) -> torch.Tensor:
        if world.rank == 1:
            raise AttributeError("no such thing")
        return loss(model)

    words = {
        "unused": refusal(lambda: check_used(found, False, loss)),
        "allowed": refusal(lambda: check_used(found, True, loss)),
        "broken": refusal(lambda: check_used(found, True, breaks)),
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.module.state_dict().items())
    assert all(p.grad is None for p in found.module.parameters())
    return words


def refusal(command: Any) -> str | None:
    try:
        command()
    except (ConfigError, TrainError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_gradients_are_reduced_once_a_step_and_what_cannot_work_is_said_on_every_rank() -> None:
    for found in run_ranks(2, on_ranks):
        assert found["default"] == [1, 1, 1]
        # a static graph is recorded in the first step, where every backward reduces; afterwards once a step
        assert found["static"] == [3, 1, 1]
        assert found["sync_batchnorm"].startswith(
            "ConfigError: strategy.sync_batchnorm: torch's SyncBatchNorm runs on GPUs only"
        )
        assert found["bf16"] == (
            "ConfigError: strategy.comm_hook: bf16_compress needs NCCL, and these workers use gloo; use fp16_compress"
        )
        assert "TrainError: rank 0: parameter 'two.weight' and 1 more gets no gradient in the first step" in found["unused"]
        assert found["allowed"] is None
        assert found["broken"] == "TrainError: rank 1: the first forward and backward failed: AttributeError: no such thing"
