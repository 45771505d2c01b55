"""Memory of a worker, against formulas and against what autograd keeps of real tensors."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import nn

from raydist.config import JobConfig, parse_config
from raydist.models import MLP, CharTransformer
from raydist.planning.memory import Memory, measure
from raydist.task import build_task
from tests.support import lin_job

WEIGHTS = 64 * 512 + 512 + 512 * 10 + 10  # of the MLP below


def config_of(hidden: list[int] | None = None, **changes: Any) -> JobConfig:
    model = {"target": "raydist.models:MLP", "args": {"in_features": 64, "hidden": hidden or [512], "out_features": 10}}
    loss = {"target": "torch.nn.functional:cross_entropy"}
    changes = {"task__model": model, "task__loss": loss, "optimizer": {"name": "adamw", "lr": 0.1}, **changes}
    return parse_config(lin_job([1.0], 64, **changes), "/base")


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 64), torch.zeros(count, dtype=torch.int64)


def of(config: JobConfig, count: int = 64, micro: int = 64, workers: int = 1) -> Memory:
    return measure(config, build_task(config.task), rows(count), micro, workers)


def test_weights_gradients_and_adam_s_two_moments() -> None:
    memory = of(config_of())
    assert (memory.parameters, memory.trainable) == (WEIGHTS, WEIGHTS)
    assert (memory.weights, memory.gradients, memory.ema, memory.reduction) == (4 * WEIGHTS, 4 * WEIGHTS, 0, 0)
    assert memory.optimizer == 2 * 4 * WEIGHTS + 4 * 4  # and a step counter (float32) for each of four parameters
    assert memory.activations is not None
    assert memory.total == 4 * 4 * WEIGHTS + 4 * 4 + memory.activations


@pytest.mark.parametrize(
    ("changes", "optimizer", "ema", "reduction"),
    [
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, 0, 0, 0),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}, 4 * WEIGHTS, 0, 0),
        ({"optimizer": {"target": "torch.optim:Adagrad", "lr": 0.1}}, 4 * WEIGHTS + 4 * 4, 0, 0),
        ({"optimizer": {"name": "sgd", "lr": 0.1}, "train__ema": {}}, 0, 4 * WEIGHTS, 0),
        ({"optimizer": {"name": "sgd", "lr": 0.1}, "strategy": {"gradient_as_bucket_view": False}}, 0, 0, 4 * WEIGHTS),
    ],
)
def test_what_else_is_held(changes: dict[str, Any], optimizer: int, ema: int, reduction: int) -> None:
    memory = of(config_of(**changes), workers=2)
    assert (memory.optimizer, memory.ema, memory.reduction, memory.problem) == (optimizer, ema, reduction, None)


def kept_by_autograd(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of what a real forward pass saves for its backward, beside the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    del loss
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_activations_are_what_autograd_keeps_and_the_largest_temporaries() -> None:
    inputs, targets = rows(64)
    kept = kept_by_autograd(MLP(64, [512], 10), inputs, targets)
    found = of(config_of()).activations
    assert found is not None
    batch = inputs.nbytes + targets.nbytes
    assert kept - batch <= found <= kept + batch + 2 * 64 * 512 * 4


def test_a_transformer_s_too() -> None:
    model = {"target": "raydist.models:CharTransformer"}
    model["args"] = args = {"vocab_size": 64, "dim": 32, "heads": 2, "layers": 3, "context": 16}  # type: ignore[assignment]
    task = {"target": "tests.planning.test_memory:Characters", "args": {"args": args}}
    config = parse_config({**lin_job([1.0], 8, optimizer={"name": "adamw", "lr": 0.1}), "task": task}, "/base")
    ids = torch.zeros(8, 16, dtype=torch.int64)
    found = measure(config, build_task(config.task), (ids, ids), 8, 1).activations
    kept = kept_by_autograd(CharTransformer(**args), ids, ids)
    assert found is not None and kept - ids.nbytes <= found <= 1.3 * kept


class Characters:
    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def build_model(self) -> nn.Module:
        return CharTransformer(**self.args)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def test_half_the_rows_hold_half_and_bf16_holds_less() -> None:
    deep = [64] * 8
    whole, half = (of(config_of(deep), count=16384, micro=micro).activations for micro in (16384, 8192))
    assert whole is not None and half is not None
    assert abs(whole - 2 * half) <= 0.02 * whole
    narrow = of(config_of(deep, precision="bf16"), count=16384, micro=16384).activations
    assert narrow is not None and narrow < 0.7 * whole


def test_a_model_larger_than_the_machine_is_only_counted() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    width = 200_000
    memory = of(config_of([width, width]))
    assert memory.parameters == 64 * width + width + width * width + width + width * 10 + 10  # 149 GiB
    assert memory.total is not None and memory.total > 4 * 4 * memory.parameters
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


class Peeks(nn.Linear):
    """Reads a value in its forward, which tensors without data do not have."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if float(x.sum()) > 0 else 1.0)


def test_a_model_that_reads_values_leaves_its_activations_unknown() -> None:
    memory = of(config_of(task__model={"target": "tests.planning.test_memory:Peeks"}))
    assert memory.weights == 4 * 650 and memory.activations is None and memory.total is None
    assert memory.problem is not None and memory.problem.startswith("the activations are not known: ")


def test_frozen_weights_have_no_gradient() -> None:
    memory = of(config_of(task__model={"target": "tests.planning.test_memory:HalfFrozen"}))
    assert (memory.parameters, memory.trainable, memory.gradients) == (650 + 110, 110, 4 * 110)
    assert memory.optimizer == 2 * 4 * 110 + 2 * 4


class HalfFrozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10).requires_grad_(False), nn.Linear(10, 10))
