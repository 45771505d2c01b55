"""Checkpoints in the background: the training thread copies the state to host memory and goes on; a thread does the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from raydist import storage
from raydist.checkpoint import BestRule, tidy
from raydist.commit import commit
from raydist.errors import CheckpointError
from raydist.state import Packed, TrainState, pack
from raydist.writing import drop_spare


class Saver:
    """Saves states to the store `uri`, keeping the newest `keep` and the best; one process of a run has one.

    `on_event(kind, **fields)` is called from the background thread, with `step` in the fields and kind one of
    `checkpoint` (saved: seconds, finite, best), `checkpoint_failed` (reason) and `checkpoint_prune_failed` (reason). A save
    that fails raises nothing: training goes on, earlier checkpoints stay, and `failure` holds the reason until a save succeeds.
    """

    def __init__(
        self,
        uri: str,
        keep: int = 2,
        best: BestRule | None = None,
        asynchronous: bool = True,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self.uri = uri
        self.keep = keep
        self.best = best
        self.asynchronous = asynchronous
        self.last_saved: int | None = None
        """Step of the last checkpoint that this saver committed."""
        self.failure: str | None = None
        """Why the last save failed; None when it did not."""
        self._on_event = _ignore if on_event is None else on_event
        self._thread: threading.Thread | None = None
        self._staging = Staging()

    def save(
        self,
        state: TrainState,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        protect: AbstractSet[int] = frozenset(),
    ) -> None:
        """Start to save `state` as `step`; waits for the save before it. When it returns the state may change.

        Raises CheckpointError at once for a state that no checkpoint can hold.
        """
        self.wait()
        if not self.asynchronous:
            self._write(pack(state), step, metrics or {}, protect)
            return
        packed = self._staging.pack(state)
        self._thread = threading.Thread(
            target=self._write, args=(packed, step, dict(metrics or {}), set(protect)), name="raydist-saver"
        )
        self._thread.start()

    def _write(self, packed: Packed, step: int, metrics: Mapping[str, Any], protect: AbstractSet[int]) -> None:
        start = time.perf_counter()
        try:
            manifest = commit(self.uri, packed, step, metrics)
        except CheckpointError as error:
            self.failure = str(error)
            self._on_event("checkpoint_failed", step=step, reason=str(error))
            return
        self.last_saved, self.failure = step, None
        best = False
        try:
            best = tidy(self.uri, step, keep=self.keep, best=self.best, protect=protect, recycle=True)
        except Exception as error:  # the checkpoint is safe; what failed is clearing up, for whatever reason the store has
            self._on_event("checkpoint_prune_failed", step=step, reason=f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        self._on_event("checkpoint", step=step, seconds=round(seconds, 3), finite=manifest["finite"], best=best)

    def wait(self) -> None:
        """Return when no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, and give back the staging memory and the files kept for another save."""
        self.wait()
        self._staging = Staging()
        if storage.is_local(self.uri):
            drop_spare(storage.local_path(self.uri))


def _ignore(kind: str, **fields: Any) -> None:
    """For a saver whose events nobody wants."""


class Staging:
    """Host buffers that a state is copied into, kept from save to save: one copy of the bytes and no allocation."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def pack(self, state: TrainState) -> Packed:
        """`raydist.state.pack`, independent of the live state. The next call overwrites what this one returned."""
        self._used, self._devices = {}, set()
        packed = pack(state, self._copy)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = self._used
        return packed

    def _copy(self, where: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(where)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        self._used[where] = buffer
        return buffer.copy_(tensor, non_blocking=True)
