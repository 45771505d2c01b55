"""Profiler traces of some steps (`profile:` of the job file): one Chrome trace a rank, for Perfetto or chrome://tracing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raydist import storage

if TYPE_CHECKING:
    from raydist.config_logging import ProfileConfig
    from raydist.world import World

FOLDER = "profile"


class Profiler:
    """Records the steps that `settings` names on this rank; costs nothing in the others.

    `tell(kind, **fields)` notes where the trace is. The trace goes to `<run>/profile/rank-0-steps-10-20.json.gz`.
    """

    def __init__(self, settings: ProfileConfig, root: str, world: World, tell: Callable[..., None]) -> None:
        self.settings, self.world, self.tell = settings, world, tell
        self.first, self.last = settings.steps
        self.folder = storage.join(root, FOLDER)
        self._profile: Any = None
        self._range: Any = None
        self._from = 0

    def before(self, step: int) -> None:
        """`step` is about to begin."""
        if self._profile is None and self.first <= step <= self.last:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(
                activities=activities,
                record_shapes=self.settings.shapes,
                profile_memory=self.settings.memory,
                with_stack=self.settings.stacks,
                acc_events=True,
            )
            self._profile.start()
            self._from = step
        if self._profile is not None:
            self._range = torch.profiler.record_function(f"step {step}")
            self._range.__enter__()

    def after(self, step: int) -> None:
        """`step` is done."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._profile is not None and step >= self.last:
            self._write(step)

    def close(self, step: int) -> None:
        """Write what there is when the run ends inside the window."""
        if self._profile is not None:
            self.after(step)
        if self._profile is not None:
            self._write(step)

    def _write(self, step: int) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"rank-{self.world.rank}-steps-{self._from}-{step}.json.gz"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            profile.export_chrome_trace(str(path))
            storage.write_bytes(storage.join(self.folder, name), path.read_bytes())
        self.tell("profile", reason=f"{storage.join(self.folder, name)}: open it in https://ui.perfetto.dev")
