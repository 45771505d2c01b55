"""A Hugging Face transformer made from a config, nothing downloaded, on padded rows of tokens weighted by tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

PAD = 0  # as jobs/data/tokens.py pads


class GptTask:
    """GPT-2 (Radford et al., 2019) at any size. A batch is ids int64 `(rows, context + 1)`."""

    def __init__(self, vocabulary: int, context: int, **sizes: Any) -> None:
        self.config = GPT2Config(
            vocab_size=vocabulary, n_positions=context, bos_token_id=PAD, eos_token_id=PAD, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes,
        )  # fmt: skip

    def build_model(self) -> nn.Module:
        return GPT2LMHeadModel(self.config)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the next tokens, padding aside, in nats a token."""
        logits = model(input_ids=batch[:, :-1], attention_mask=(batch[:, :-1] != PAD).long()).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)

    def weight(self, batch: torch.Tensor) -> float:
        """Tokens that are predicted: rows of a batch differ in them, so the mean must count them."""
        return float((batch[:, 1:] != PAD).sum())
