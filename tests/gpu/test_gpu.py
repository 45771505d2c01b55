"""What only a CUDA device shows; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.world import from_env
from tests.support import lin_job, run_ranks, train_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weight(result: dict[str, Any]) -> float:
    return float(result["model"]["weight"].reshape(()))


def test_the_world_picks_the_gpu_of_its_local_rank() -> None:
    world = from_env()
    assert world.device == torch.device("cuda", 0)
    assert world.backend == "nccl"


def test_the_numbers_of_the_batch_law_hold_on_the_gpu() -> None:
    assert weight(train_here(lin_job([1, 1, 1, 1, 2], 5))) == pytest.approx(0.96, abs=1e-6)
    assert weight(train_here(lin_job([1] * 7, 4, batch__micro_size=3))) == pytest.approx(1.08, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "fp16", "init_scale": 1024.0}])
def test_clip_gives_the_same_step_at_any_precision(precision: Any) -> None:
    result = train_here(lin_job([1] * 4, 4, train={"epochs": 3}, precision=precision, clip_grad_norm=0.5))
    assert weight(result) == pytest.approx(0.15, abs=1e-4)


def test_two_gloo_ranks_give_the_same_numbers_as_one() -> None:
    job = lin_job([1, 1, 1, 1, 2], 5, scaling={"workers": 2, "backend": "gloo"})
    assert weight(run_ranks(2, train_here, job)[0]) == pytest.approx(0.96, abs=1e-6)


class Greedy(torch.nn.Linear):
    """Takes 40 % of the device's free memory for each row above 2."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        free, _ = torch.cuda.mem_get_info()
        held = torch.empty(int(free * 0.4) * max(0, len(x) - 2), dtype=torch.uint8, device=x.device)
        return super().forward(x) + 0 * held[:1].sum()


def test_an_out_of_memory_halves_the_micro_batch_until_it_fits_and_changes_no_number() -> None:
    job = lin_job([1] * 16, 16)
    job["task"]["model"] = {"target": "tests.gpu.test_gpu:Greedy"}
    result = train_here(job)
    assert weight(result) == pytest.approx(0.6, abs=1e-6)
    assert [event["kind"] for event in result["events"]] == ["out_of_memory"] * 2
