"""The pipeline strategy's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from raydist.config_types import Bool, Count, Part, Positive, Text, kind_of

Cut = Annotated[
    Annotated[Literal["auto"], Tag("value")] | Annotated[list[Count] | list[Text], Field(min_length=1), Tag("list")],
    Discriminator(kind_of),
]


class PipelineStrategy(Part):
    """The model cut into `stages` x `chunks` runs of layers, one worker a stage and replica: stages x replicas workers.

    `cut`: auto (measured), or how many layers each run has, or the names of the first layer of each run but the first.
    `memory_gb`: the most that one run's weights, gradients and optimizer state may take (GiB).
    """

    name_alone = True
    name: Literal["pipeline"] = "pipeline"
    stages: Count
    replicas: Count = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    micro_batches: Count | None = None
    chunks: Count | None = None
    cut: Cut = "auto"
    memory_gb: Positive | None = None
    checkpoint_activations: Bool = False

    @property
    def workers(self) -> int:
        """Workers that the job takes."""
        return self.stages * self.replicas

    @property
    def runs(self) -> int:
        """Runs of layers that the model is cut into, over all stages."""
        return self.stages * self.chunks_each

    @property
    def chunks_each(self) -> int:
        """Runs of layers that each stage holds."""
        if self.schedule in ("interleaved", "zbv"):
            return self.chunks or 2
        return 1

    @property
    def micro(self) -> int:
        """Micro-batches of one pass: twice the stages, if the job file does not say."""
        return self.micro_batches or 2 * self.stages

    def rank_of(self, run: int) -> int:
        """The stage that holds run `run`: in turn, and for zbv forth and back."""
        if self.schedule == "zbv" and run >= self.stages:
            return self.runs - 1 - run
        return run % self.stages

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.chunks is not None and self.schedule != "interleaved" and self.chunks != self.chunks_each:
            yield "chunks", f"{self.schedule} has {self.chunks_each} for each stage; only interleaved lets you choose"
        if self.schedule == "interleaved" and self.chunks == 1:
            yield "chunks", "interleaved needs at least 2 for each stage; with 1 it is 1f1b"
        if self.schedule != "gpipe" and self.micro < self.stages:
            yield "micro_batches", f"{self.schedule} needs at least as many as stages ({self.stages}); gpipe does not"
        elif self.schedule in ("interleaved", "zero_bubble") and self.micro % max(1, self.micro // self.stages):
            yield "micro_batches", f"{self.schedule} needs a multiple of stages ({self.stages})"
        if isinstance(self.cut, list) and isinstance(self.cut[0], int) and len(self.cut) != self.runs:
            yield "cut", f"needs {self.runs} numbers of layers, one for each run (stages x chunks)"
        if isinstance(self.cut, list) and isinstance(self.cut[0], str) and len(self.cut) != self.runs - 1:
            yield "cut", f"needs {self.runs - 1} names: the first layer of each run but the first"
        if self.checkpoint_activations and self.schedule in ("zero_bubble", "zbv"):
            yield "checkpoint_activations", f"not with {self.schedule}, which splits each backward in two; use 1f1b"
