"""Who this process is among the workers, and the few things workers say to each other outside the gradients.

The only place that reads RANK, WORLD_SIZE and their like. Ray Train and torchrun set the same variables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from raydist.errors import ConfigError, TrainError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """One worker's place: `rank` of `world_size`, its device, and the process groups it talks through.

    `control` is a gloo group of all ranks for small CPU tensors and objects (None for a single worker), apart from
    the group that reduces gradients, so that the two never queue behind each other.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str = "gloo"
    control: dist.ProcessGroup | None = None
    owns_group: bool = False
    grid: Any = None
    """Of a pipeline: this rank's stage and replica (`raydist.pipeline.grid.Grid`)."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # -- what ranks agree on: every rank must call these, in the same order -----------------------------------------

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64. Every rank must call it with equally many values."""
        if self.control is None:
            return [float(v) for v in values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return [float(v) for v in tensor.tolist()]

    def agree(self, flags: Sequence[int]) -> Agreement:
        """Start the element-wise maximum of `flags` over all ranks; `.wait()` gives it. Every rank must call both."""
        tensor = torch.tensor(flags, dtype=torch.int64)
        if self.control is None:
            return Agreement(tensor, None)
        return Agreement(tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), in rank order, on every rank. Every rank must call it."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` (picklable) on every rank. Every rank must call it."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.control, group_src=0)
        return box[0]

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors` (on `device`) with rank 0's, in place. Every rank must call it."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the process group, if this object started it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


@dataclass
class Agreement:
    """A maximum over ranks that is under way."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return [int(v) for v in self.tensor.tolist()]


def from_env(backend: str = "auto", device: torch.device | None = None, timeout_s: float = 1800.0) -> World:
    """This process's `World`, from the variables torchrun and Ray Train set; a world of one when there are none.

    Starts the default process group when it is not up yet. Raises ConfigError on a torn environment or a device that
    is not there. Every rank must call it.
    """
    env = {name: os.environ.get(name) for name in _VARIABLES}
    if env["WORLD_SIZE"] is None:
        env = {}
    rank = _read(env, "RANK", 0)
    world_size = _read(env, "WORLD_SIZE", 1)
    local_rank = _read(env, "LOCAL_RANK", rank)
    local_world_size = _read(env, "LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} does not fit WORLD_SIZE={world_size}: start the workers with torchrun or `raydist train`"
        )
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and absent and not dist.is_initialized():
        raise ConfigError(
            f"the environment has WORLD_SIZE={world_size} and no {', '.join(absent)}: unset WORLD_SIZE, or start with torchrun"
        )
    device = device or _pick_device(local_rank, backend)
    backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns = False
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        owns = True
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world_size > 1 else None
    return World(rank, world_size, local_rank, local_world_size, device, backend, control, owns)


def _read(env: dict[str, str | None], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigError(f"the environment has {name}={text!r}, which is no whole number: unset it, or start with torchrun")
    return int(text)


def _pick_device(local_rank: int, backend: str) -> torch.device:
    if not torch.cuda.is_available():
        if backend == "nccl":
            raise ConfigError("scaling.backend: nccl needs GPUs and this worker sees none; use gloo or auto")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if backend == "gloo" and local_rank >= count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine shows {count}. Start at most {count} workers here, "
            "or set scaling.backend: gloo"
        )
    return torch.device("cuda", local_rank)


_BROKEN_LINK = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport", "NCCL communicator", "ncclRemoteError")


def is_broken_link(words: str) -> bool:
    """Whether an error only says that another rank went away, as gloo and NCCL put it."""
    return any(part in words for part in _BROKEN_LINK)


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers that equal tensors share: the XOR of all bits (`torch.hash_tensor`) and the sum of the raw words.

    Computed on the tensor's device; unequal tensors collide only by an accident that both sums miss.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # a wider view must begin at a multiple of its width
        raw = raw.clone()
    whole = raw.numel() // 8 * 8  # words of 8 bytes: summing narrower ones takes twenty times as long on a CPU
    xor, total = 0, 0
    for part in (raw[:whole].view(torch.int64), raw[whole:]):
        if part.numel():
            xor ^= int(torch.hash_tensor(part).item())
            total += int(part.sum(dtype=torch.int64).item())
    return xor, total


def check_in_sync(world: World, named: dict[str, torch.Tensor], when: str) -> None:
    """Raise TrainError naming the first tensor that is not bit-equal on all ranks. Every rank must call it.

    Also finds models that differ in names, shapes or dtypes between ranks.
    """
    if world.world_size == 1:
        return
    mine = {name: (tuple(t.shape), str(t.dtype), *checksum(t)) for name, t in named.items()}
    digest = blake2b(repr(mine).encode(), digest_size=16).digest()
    if len(set(world.gather(digest))) == 1:  # 16 bytes a rank: all the names and sums travel only when something is wrong
        return
    everyone: list[dict[str, Any]] = world.gather(mine)
    reference = everyone[0]
    for rank, other in enumerate(everyone[1:], start=1):
        missing = [n for n in reference if n not in other] + [n for n in other if n not in reference]
        if missing:
            raise TrainError(
                f"{when}: the model on rank {rank} has other parameters than on rank 0 (first: {missing[0]!r}). "
                "Build the same model on every rank: let nothing in it depend on the rank, the host or unseeded randomness"
            )
        for name, found in other.items():
            if found[:2] != reference[name][:2]:
                raise TrainError(
                    f"{when}: parameter {name!r} is {found[1]}{list(found[0])} on rank {rank} and "
                    f"{reference[name][1]}{list(reference[name][0])} on rank 0. Build the same model on every rank"
                )
            if found != reference[name]:
                raise TrainError(
                    f"{when}: parameter {name!r} has other values on rank {rank} than on rank 0: the ranks have drifted apart. "
                    "Look for code that changes weights outside the optimizer step, or on some ranks only"
                )
