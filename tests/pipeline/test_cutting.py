"""The measured cut: what it tells, and what it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from raydist.config import Precision as Setting
from raydist.config_pipeline import PipelineStrategy
from raydist.errors import ConfigError
from raydist.pipeline.cutting import Cutting, make_cut
from raydist.pipeline.known import VARIABLE, fingerprint
from raydist.pipeline.layers import layers_of
from raydist.pipeline.measure import Cost
from raydist.precision import Precision

PRECISION = Precision(Setting(), torch.device("cpu"))
INPUTS = (torch.ones(4, 6),)


def model(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 6))


def test_the_table_has_each_stage_and_the_layer_that_takes_longest() -> None:
    costs = [Cost("a", 1.0, 2**20, 3 * 2**20, 0), Cost("b", 2.0, 0, 0, 2**20), Cost("c", 6.0, 0, 0, 0), Cost("d", 1.0, 0, 0, 0)]
    strategy = PipelineStrategy(stages=2, schedule="gpipe", micro_batches=1)
    made = Cutting(strategy, [(0, 2), (2, 4)], costs)
    lines = made.lines()
    assert [line.split() for line in lines[2:4]] == [
        ["0", "a", "…", "b", "(2)", "3.00", "5", "MiB", "30%"],
        ["1", "c", "…", "d", "(2)", "7.00", "0", "B", "70%"],
    ]
    assert lines[4] == "slowest layer: c, 6.00 ms, 60% of all; alone more than a fair share of 50%, so no cut is even"
    # one micro-batch: one stage at a time works
    assert made.bubble == pytest.approx(0.5) and lines[5] == "expected bubble: 50%"


def test_measuring_leaves_weights_gradients_and_statistics_alone() -> None:
    cut = model()
    before = {name: tensor.clone() for name, tensor in cut.state_dict().items()}
    made = make_cut(PipelineStrategy(stages=2), layers_of(cut), INPUTS, PRECISION)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cut.state_dict().items())
    assert all(p.grad is None for p in cut.parameters())
    weights = [cost.weights for cost in made.costs]
    assert weights == [4 * (36 + 6), 4 * 12, 4 * (36 + 6)] and [cost.trained for cost in made.costs] == [3 * w for w in weights]
    assert [cost.activations for cost in made.costs] == [4 * 24] * 3


def test_costs_are_remembered_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    strategy = PipelineStrategy(stages=2)
    first, again = (make_cut(strategy, layers_of(model()), INPUTS, PRECISION) for _ in range(2))
    assert not first.remembered and again.remembered and first.costs == again.costs
    assert again.lines()[-1].endswith("; times as measured before")
    assert not make_cut(strategy, layers_of(model(5)), INPUTS, PRECISION).remembered
    assert not make_cut(strategy, layers_of(model()), (torch.ones(5, 6),), PRECISION).remembered
    (tmp_path / "layers" / f"{fingerprint(layers_of(model()), INPUTS, PRECISION)}.json").write_text("[{")
    assert not make_cut(strategy, layers_of(model()), INPUTS, PRECISION).remembered  # a damaged file is measured anew


def test_a_cut_as_asked_is_checked_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="adds up to 4 layers and the model has 3"):
        make_cut(PipelineStrategy(stages=2, cut=[2, 2]), layers_of(model()), (torch.ones(4, 99),), PRECISION)


def test_a_memory_cap_that_no_cut_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_gb: no cut"):
        make_cut(PipelineStrategy(stages=2, memory_gb=1e-9), layers_of(model()), INPUTS, PRECISION)
