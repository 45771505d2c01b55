"""Real English text that comes with Python: the documentation topics behind `help()`, as a torch Dataset of characters."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import torch
from torch.utils.data import Dataset

VOCABULARY = 256
EVERY_NTH_HELD_OUT = 10
SPLITS = ("train", "eval")


class TopicText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` characters (UTF-8 bytes, 0..255), one after the other, none twice.

    A row is `(ids, next_ids)`, both int64 of shape `(context,)`; `next_ids` is `ids` moved on by one character. Every tenth
    topic, in alphabetical order, belongs to `split="eval"`, the others to `"train"`.
    """

    def __init__(self, split: str, context: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"TopicText: split is {split!r}; allowed: {', '.join(SPLITS)}")
        if context < 1:
            raise ValueError(f"TopicText: context is {context}; it must be at least 1 character")
        text = "\n\n".join(topics[name] for name in topic_names(split))
        self.context = context
        self.characters = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64))

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.context

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"TopicText: row {row} is outside 0..{len(self) - 1}")
        start = row * self.context
        window = self.characters[start : start + self.context + 1]
        return window[:-1], window[1:]


def topic_names(split: str) -> list[str]:
    """The topics of one split, in alphabetical order."""
    return [name for number, name in enumerate(sorted(topics)) if (number % EVERY_NTH_HELD_OUT == 0) == (split == "eval")]
