"""Python's documentation topics as token ids: a byte-pair encoding of the training topics, one padded row a paragraph."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch.utils.data import Dataset

PAD = 0
EVERY_NTH_HELD_OUT = 10
SPLITS = ("train", "eval")


class TopicTokens(Dataset[torch.Tensor]):
    """Rows `(context + 1,)` int64: the first tokens of a paragraph, then PAD. Every tenth topic belongs to `split="eval"`."""

    def __init__(self, split: str, context: int, vocabulary: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"TopicTokens: split is {split!r}; allowed: {', '.join(SPLITS)}")
        encoded = tokenizer(vocabulary).encode_batch(paragraphs(split))
        self.rows = torch.full((len(encoded), context + 1), PAD)
        for row, one in zip(self.rows, encoded, strict=True):
            ids = one.ids[: context + 1]
            row[: len(ids)] = torch.tensor(ids)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.rows[row]


def paragraphs(split: str) -> list[str]:
    """The paragraphs of one split with at least 20 characters, in order."""
    names = [name for number, name in enumerate(sorted(topics)) if (number % EVERY_NTH_HELD_OUT == 0) == (split == "eval")]
    return [text for name in names for text in topics[name].split("\n\n") if len(text) >= 20]


@lru_cache(maxsize=1)
def tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` tokens (Sennrich et al., 2016), learned from the training paragraphs alone."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(paragraphs("train"), trainer)
    return made
