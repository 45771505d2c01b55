"""Small models that the example jobs, the tests and the benchmarks train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from raydist.pipeline.layers import Layer


class MLP(nn.Sequential):
    """Linear layers with GELU between them: `(rows, ...)` flattened to `(rows, in_features)` -> logits `(rows, out_features)`.

    `hidden` gives the widths of the hidden layers (an empty list makes one linear layer); `dropout` follows each GELU.
    GELU rather than ReLU because it has no kink: the rounding of a sum over other worker counts stays rounding, where with ReLU
    it can flip a unit and Adam turns that into a visible step.
    """

    def __init__(self, in_features: int, hidden: Sequence[int], out_features: int, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        width = in_features
        for size in hidden:
            layers += [nn.Linear(width, size), nn.GELU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = size
        super().__init__(*layers, nn.Linear(width, out_features))


class SmallCNN(nn.Module):
    """Three convolutions with BatchNorm for grey 8×8 images: 64 values a row, as `(N, 64)`, `(N, 8, 8)` or `(N, 1, 8, 8)`.

    Gives logits `(N, classes)`. `width` is the number of channels of the first convolution; the others have twice as many.
    """

    def __init__(self, classes: int = 10, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, width),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """`images`: 64 values a row -> logits `(N, classes)`."""
        logits: Tensor = self.head(self.dropout(self.features(images.reshape(-1, 1, 8, 8))))
        return logits


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class CharTransformer(nn.Module):
    """A causal (decoder-only) transformer over characters: ids `(N, length)` int64 -> logits `(N, length, vocab_size)`.

    Pre-norm blocks and learned positions as in GPT-2 (Radford et al., 2019). `context` is the longest `length`; with
    `tie_weights` the output layer is the embedding matrix (Press and Wolf, 2017).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        heads: int,
        layers: int,
        context: int,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"CharTransformer: dim {dim} is not a multiple of heads {heads}")
        self.context = context
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Unit variance out of every layer; what writes to the residual stream starts smaller, so depth does not add up.
                depth = 2 * layers if name.endswith("out.weight") else 1
                nn.init.normal_(parameter, std=(parameter.shape[1] * depth) ** -0.5)
        if tie_weights:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """`ids`: `(N, length)` int64, `length <= context` -> logits `(N, length, vocab_size)`; position t sees ids[:t + 1]."""
        hidden = self._embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self._predict(hidden)

    def pipeline_layers(self) -> list[Layer]:
        """The embedding, each block, and the output layer, for `strategy: pipeline`."""
        blocks = [Layer(f"blocks.{number}", block, [block]) for number, block in enumerate(self.blocks)]
        first = Layer("embed", self._embed, [self.token, self.position, self.dropout])
        return [first, *blocks, Layer("predict", self._predict, [self.norm, self.head])]

    def _embed(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(f"CharTransformer: {length} characters in a row, the model was built for context {self.context}")
        hidden: Tensor = self.dropout(self.token(ids) + self.position(torch.arange(length, device=ids.device)))
        return hidden

    def _predict(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a 4× wide MLP, each on a normalised copy of the residual stream `(N, length, dim)`."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(N, length, dim)` -> `(N, length, dim)`."""
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        wide = functional.gelu(self.mlp_in(self.mlp_norm(hidden)))
        output: Tensor = hidden + self.dropout(self.mlp_out(wide))
        return output

    def _attend(self, hidden: Tensor) -> Tensor:
        rows, length, dim = hidden.shape
        split = self.attention_in(hidden).view(rows, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (rows, heads, length, dim / heads)
        drop = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        output: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, dim))
        return output
