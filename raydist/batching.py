"""The batch law in integers: who trains which rows of a global batch, and with what weight.

Nothing here knows of torch, files or processes. A global batch is the rows `[0, global_rows)` of one optimizer step, in
plan order. Rank `r` of `world_size` trains one contiguous share of it, and cuts that share into micro-batches. Every rank
runs the same number of micro-batches, so collectives inside the model (SyncBatchNorm) match; where a rank has no row left it
runs one borrowed row with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass


def share(global_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The half-open range of rows `[start, stop)` of a global batch that `rank` trains.

    Sizes differ by at most one row and the first ranks have the larger ones, as in `torch.tensor_split`.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside 0..{world_size - 1}")
    if global_rows < 0:
        raise ValueError(f"a global batch cannot have {global_rows} rows")
    base, extra = divmod(global_rows, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def padded_share(global_rows: int, world_size: int) -> int:
    """Rows of the largest share: what every rank holds once the smaller shares are padded with borrowed rows (at least 1)."""
    return max(1, -(-global_rows // world_size))


def steps_in(rows: int, global_size: int, drop_last: bool = False) -> int:
    """Optimizer steps in an epoch of `rows` rows."""
    return rows // global_size if drop_last else -(-rows // global_size)


def rows_in_step(rows: int, global_size: int, index: int) -> int:
    """Rows of global batch `index` of an epoch of `rows` rows: `global_size`, and less in a short tail."""
    return max(0, min(global_size, rows - index * global_size))


@dataclass(frozen=True)
class MicroBatch:
    """Rows `[start, stop)` of a rank's share. `rows` of them count; a borrowed row has `rows == 0`."""

    start: int
    stop: int
    rows: int


def micro_batches(global_rows: int, rank: int, world_size: int, micro_size: int) -> list[MicroBatch]:
    """How `rank` cuts its share: `micro_size` rows at a time, the last one short, equally many on every rank.

    Ranges are relative to the share. A rank that runs out of rows repeats row 0 of what it holds with weight 0.
    """
    if micro_size < 1:
        raise ValueError(f"a micro-batch needs at least 1 row, not {micro_size}")
    start, stop = share(global_rows, rank, world_size)
    held = stop - start
    pieces = [MicroBatch(at, min(at + micro_size, held), min(micro_size, held - at)) for at in range(0, held, micro_size)]
    wanted = -(-padded_share(global_rows, world_size) // micro_size)
    return pieces + [MicroBatch(0, 1, 0)] * (wanted - len(pieces))


def loss_scale(weight: float, global_weight: float, world_size: int) -> float:
    """What a micro-batch's mean loss is multiplied by before backward.

    DDP averages gradients over ranks, so the factor is `world_size * weight / global_weight`: the sum over all
    micro-batches of all ranks is then `sum_i w_i * grad(loss_i) / sum_i w_i`, the batch law.
    """
    return world_size * weight / global_weight if global_weight else 0.0
