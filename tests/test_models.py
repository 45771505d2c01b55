from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raydist.models import MLP, CharTransformer, SmallCNN


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_mlp_has_the_layers_asked_for() -> None:
    model = MLP(64, [128, 32], 10)
    assert parameters(model) == (64 + 1) * 128 + (128 + 1) * 32 + (32 + 1) * 10
    assert model(torch.randn(3, 8, 8)).shape == (3, 10)


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(4, [], 2).eval()
    a, b = torch.randn(2, 5, 4)
    zero = model(torch.zeros(5, 4))
    torch.testing.assert_close(model(a + b) - zero, model(a) - zero + model(b) - zero)


def test_mlp_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, rows = MLP(4, [256], 2, dropout=0.5), torch.randn(3, 4)
    assert not torch.equal(model(rows), model(rows))
    model.eval()
    assert torch.equal(model(rows), model(rows))
    assert not any(isinstance(part, nn.Dropout) for part in MLP(4, [8], 2).modules())


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 8, 8)])
def test_small_cnn_takes_images_in_any_shape(shape: tuple[int, ...]) -> None:
    model, images = SmallCNN(classes=7, width=4).eval(), torch.randn(5, 64)
    logits = model(images.reshape(5, *shape))
    assert logits.shape == (5, 7)
    assert torch.equal(logits, model(images))


def test_small_cnn_normalises_with_the_batch_in_training_and_with_running_statistics_after() -> None:
    torch.manual_seed(0)
    model, images = SmallCNN(width=4), torch.randn(6, 64)
    assert sum(isinstance(part, nn.BatchNorm2d) for part in model.modules()) == 3
    assert not torch.allclose(model(images)[:2], model(images[:2]))
    model.eval()
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


def small_transformer(**changes: object) -> CharTransformer:
    torch.manual_seed(0)
    options = {"vocab_size": 11, "dim": 16, "heads": 4, "layers": 2, "context": 9} | changes
    return CharTransformer(**options)  # type: ignore[arg-type]


def test_transformer_is_causal() -> None:
    model = small_transformer().eval()
    ids = torch.randint(11, (2, 9))
    changed = ids.clone()
    changed[:, 5] = (ids[:, 5] + 1) % 11
    before, after = model(ids), model(changed)
    assert before.shape == (2, 9, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=-1).gt(1e-4).all()


def test_transformer_reads_a_prefix_like_the_whole() -> None:
    model = small_transformer().eval()
    ids = torch.randint(11, (2, 9))
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]))


def test_transformer_ties_the_output_to_the_embedding() -> None:
    tied, free = small_transformer(), small_transformer(tie_weights=False)
    assert tied.head.weight is tied.token.weight
    assert parameters(free) - parameters(tied) == 11 * 16


def test_a_fresh_transformer_guesses_no_worse_than_a_normal_spread_of_logits() -> None:
    # logits of variance 1 cost about log(vocabulary) + 1/2 nats
    model = small_transformer(vocab_size=256, dim=96, tie_weights=False).eval()
    ids = torch.randint(256, (64, 9))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(256, (64 * 9,)))
    assert loss.item() == pytest.approx(math.log(256) + 0.5, abs=0.3)


def test_transformer_learns_to_repeat() -> None:
    model = small_transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(10).repeat(4, 1) % 3
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_transformer_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="dim 16 is not a multiple of heads 3"):
        small_transformer(heads=3)
    with pytest.raises(ValueError, match="10 characters in a row, the model was built for context 9"):
        small_transformer()(torch.zeros(1, 10, dtype=torch.int64))
