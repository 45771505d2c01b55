"""Models for the tests of `raydist tune`."""

from __future__ import annotations

import torch

from tests.support import Lin


class Full(Lin):
    """LIN in a memory that holds `most` rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"{len(x)} rows, and {self.most} fit")
        out: torch.Tensor = super().forward(x)
        return out
