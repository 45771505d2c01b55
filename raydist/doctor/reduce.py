"""An all-reduce between the nodes. Runs there, sent by value, as `probe` is."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta
from typing import Any

FLOATS = 2**20
ROUNDS = 3


def free_port() -> int:
    """A port that is free now, for rank 0's store."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def all_reduce(rank: int, world_size: int, address: str, port: int, backend: str, timeout_s: float) -> dict[str, Any]:
    """Sum `FLOATS` floats over all ranks; whether it was right, and bytes a second on each link (the ring's 2(W-1)/W).

    Every rank must call it; a rank that does not come makes it fail after `timeout_s`.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    host = f"[{address}]" if ":" in address else address
    group = None
    try:
        dist.init_process_group(backend, f"tcp://{host}:{port}", timedelta(seconds=timeout_s), rank=rank, world_size=world_size)
        group = dist.group.WORLD
        right = True
        seconds = []
        for _ in range(ROUNDS):
            values = torch.full((FLOATS,), float(rank + 1), device=device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            right = right and bool((values == world_size * (world_size + 1) / 2).all())
            seconds.append(time.perf_counter() - start)
        moved = 4 * FLOATS * 2 * (world_size - 1) / world_size
        return {"right": right, "bytes_per_s": moved / min(seconds), "error": None}
    except Exception as error:
        return {"right": False, "bytes_per_s": 0.0, "error": _words(error)}
    finally:
        if group is not None:
            dist.destroy_process_group()


def _words(error: Exception) -> str:
    """The first line, without the place in gloo's source and the numbers that it compared."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[enforce fail at [^\]]*\] (\S+ \S+ \S+\. \S+ vs \S+\. )?", "", first)
