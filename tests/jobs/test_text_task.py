from __future__ import annotations

import pytest
import torch

from raydist.config import load_config
from raydist.task import build_task
from tests.jobs.test_data import JOBS


def test_text_loss_is_the_mean_over_characters_and_its_weight_their_number() -> None:
    task = build_task(load_config(JOBS / "text.yaml").task)
    torch.manual_seed(0)
    model = task.build_model().eval()
    ids, next_ids = torch.randint(256, (2, 3, 32))
    chances = model(ids).softmax(dim=-1).gather(2, next_ids.unsqueeze(2)).squeeze(2)
    assert task.loss(model, (ids, next_ids)).item() == pytest.approx(-chances.log().mean().item(), rel=1e-5)
    assert task.weight((ids, next_ids)) == 3 * 32  # type: ignore[attr-defined]
