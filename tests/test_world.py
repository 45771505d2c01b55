"""Who this process is, and what ranks tell each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raydist.errors import ConfigError, TrainError
from raydist.world import World, check_in_sync, checksum, from_env
from tests.support import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# -- the environment --------------------------------------------------------------------------------------------------


def test_without_torchruns_variables_it_is_a_world_of_one(env: pytest.MonkeyPatch) -> None:
    world = from_env()
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert world.is_main and world.control is None
    assert world.sum([1.5, 2]) == [1.5, 2.0] and world.agree([3, 0]).wait() == [3, 0]
    assert world.gather("a") == ["a"] and world.broadcast("b") == "b"
    env.setenv("RANK", "3")  # some clusters set it for every process: alone it means nothing
    assert from_env().world_size == 1
    env.setenv("RANK", "0")
    env.setenv("WORLD_SIZE", "1")
    assert from_env() == world
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2 does not fit WORLD_SIZE=2: start the workers with torchrun or `raydist train`",
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            "the environment has RANK='one', which is no whole number: unset it, or start with",
        ),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "the environment has WORLD_SIZE='-1', which is no whole number"),
        (
            {"WORLD_SIZE": "2"},
            "the environment has WORLD_SIZE=2 and no RANK, MASTER_ADDR, MASTER_PORT: unset WORLD_SIZE, or start",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "WORLD_SIZE=2 and no MASTER_PORT"),
    ],
)
def test_a_torn_environment_is_named(env: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    for name, value in variables.items():
        env.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        from_env()
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_named(env: pytest.MonkeyPatch) -> None:
    env.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"scaling.backend: nccl needs GPUs and this worker sees none; use gloo or auto"):
        from_env("nccl")
    assert from_env("gloo").device == torch.device("cpu")
    env.setattr(torch.cuda, "is_available", lambda: True)
    env.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        env.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"local rank 1 has no GPU of its own: this machine shows 1. Start at most 1 workers here"
    ):
        from_env()


# -- between ranks ----------------------------------------------------------------------------------------------------


def talk() -> dict[str, Any]:
    world = from_env()
    try:
        found: dict[str, Any] = {"who": (world.rank, world.world_size, world.is_main, world.backend, str(world.device))}
        found["sum"] = world.sum([1e9 + world.rank, 0.1 * (world.rank + 1)])
        agreement = world.agree([world.rank, 1 - world.rank, 0])
        found["other traffic"] = world.gather({"rank": world.rank})
        found["agree"] = agreement.wait()
        assert agreement.wait() == found["agree"]
        found["broadcast"] = world.broadcast(f"from {world.rank}")
        tensor = torch.full((3,), float(world.rank + 1))
        world.broadcast_tensors([tensor])
        found["tensor"] = tensor.tolist()
        found["same"] = refusal(world, {"w": torch.ones(2), "empty": torch.ones(0)})
        found["value"] = refusal(world, {"w": torch.ones(2), "v": torch.tensor([1.0, 2.0 + world.rank])})
        found["sign"] = refusal(world, {"w": torch.tensor(0.0 if world.rank else -0.0)})
        found["swapped"] = refusal(world, {"w": torch.tensor([1.0, 2.0] if world.rank else [2.0, 1.0])})
        found["nan"] = refusal(world, {"w": torch.tensor(math.nan)})
        found["shape"] = refusal(world, {"w": torch.ones(2 + world.rank)})
        found["dtype"] = refusal(world, {"w": torch.ones(2, dtype=torch.float64 if world.rank else torch.float32)})
        found["name"] = refusal(world, {"w": torch.ones(2), **({"extra.bias": torch.ones(1)} if world.rank else {})})
        return found
    finally:
        world.close()
        assert not dist.is_initialized()


def refusal(world: World, named: dict[str, torch.Tensor]) -> str | None:
    try:
        check_in_sync(world, named, "checkpoint at step 4")
    except TrainError as error:
        return str(error)
    return None


def test_ranks_agree_on_sums_maxima_and_values_and_find_what_differs() -> None:
    results = run_ranks(2, talk)
    for rank, found in enumerate(results):
        assert found["who"] == (rank, 2, rank == 0, "gloo", "cpu")
        assert found["sum"] == [2e9 + 1, pytest.approx(0.3, abs=1e-15)]  # float64: a float32 would lose the 1
        assert found["agree"] == [1, 1, 0]
        assert found["other traffic"] == [{"rank": 0}, {"rank": 1}]
        assert found["broadcast"] == "from 0" and found["tensor"] == [1.0, 1.0, 1.0]
        assert found["same"] is None and found["nan"] is None
        drifted = "checkpoint at step 4: parameter 'v' has other values on rank 1 than on rank 0: the ranks have drifted apart"
        assert found["value"].startswith(drifted)
        assert "parameter 'w' has other values" in found["sign"]
        assert found["shape"] == (
            "checkpoint at step 4: parameter 'w' is torch.float32[3] on rank 1 and torch.float32[2] on rank 0. "
            "Build the same model on every rank"
        )
        assert "torch.float64[2] on rank 1 and torch.float32[2] on rank 0" in found["dtype"]
        assert "the model on rank 1 has other parameters than on rank 0 (first: 'extra.bias')" in found["name"]


def test_one_rank_is_always_in_sync() -> None:
    check_in_sync(World(), {"w": torch.ones(1)}, "now")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_a_checksum_tells_tensors_apart_by_a_single_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.t().contiguous().t())
    assert checksum(torch.cat([tensor[0, :1], tensor.flatten()])[1:]) == checksum(tensor)  # a view that begins inside a word
    for index in range(1, 12):
        other = tensor.clone()
        other.view(-1)[index] = 0
        if not torch.equal(other, tensor):
            assert checksum(other) != checksum(tensor)
    assert checksum(torch.ones(0, dtype=dtype)) == (0, 0)
