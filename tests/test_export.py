"""Weights out of a run: the newest, the best, the averaged; plain names, no shared memory, nothing half written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from raydist.checkpoint import load
from raydist.errors import CheckpointError, ConfigError
from raydist.export import export_weights, pick
from tests.runs import Tied, local_run


@pytest.fixture(autouse=True)
def recorder_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")


def some_run(folder: Path) -> Path:
    """Three epochs of one step at a rate so high that the loss grows: the first checkpoint is the best."""
    return local_run(
        folder,
        xs=[1.0, 2.0],
        train={"epochs": 3, "ema": {"decay": 0.5}},
        optimizer__lr=1.0,
        checkpoint={"keep": 1, "best": {"metric": "eval_loss"}},
        data__eval={"target": "tests.support:line", "args": {"xs": [1.0]}},
    )


def test_newest_best_and_averaged_weights_have_plain_names(tmp_path: Path) -> None:
    run = some_run(tmp_path)
    # w' = w + 2 * mean(x^2) * (3 - w), mean(x^2) = 2.5: 15, -45, 195; the average starts at the first and halves
    values = {"newest": 195.0, "best": 15.0, "ema": 0.5 * (0.5 * 15 + 0.5 * -45) + 0.5 * 195}
    out = tmp_path / "new" / "weights.safetensors"
    words = export_weights(str(run), out)
    assert words == f"{out}: 1 tensors of step 3 from {run}/checkpoints/step-00000003"
    assert load_file(out)["weight"].item() == pytest.approx(values["newest"])
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    export_weights(str(run), out, best=True)
    assert load_file(out)["weight"].item() == pytest.approx(values["best"])
    export_weights(str(run), out, ema=True)
    assert load_file(out)["weight"].item() == pytest.approx(values["ema"])
    export_weights(str(run / "checkpoints" / "step-00000001"), out)
    assert load_file(out)["weight"].item() == pytest.approx(values["best"])
    assert [path.name for path in out.parent.iterdir()] == ["weights.safetensors"]


def test_tied_weights_are_written_under_both_names_and_load_into_the_model(tmp_path: Path) -> None:
    run = local_run(tmp_path, task__model__target="tests.runs:Tied")
    out = tmp_path / "weights.safetensors"
    export_weights(str(run), out)
    weights = load_file(out)
    model = Tied()
    assert weights.keys() == model.state_dict().keys()
    assert not any(name.startswith("module.") for name in weights)
    model.load_state_dict(weights)
    assert torch.equal(weights["first.weight"], weights["second.weight"])
    _, state = pick(str(run))
    assert torch.equal(model.first.weight.detach(), state.model["first.weight"])
    assert torch.equal(model.norm.running_mean, load(pick(str(run))[0])[0].model["norm.running_mean"])  # type: ignore[arg-type]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    with pytest.raises(CheckpointError, match=r"absent has no committed checkpoint; give a run folder or a checkpoint folder"):
        export_weights(str(tmp_path / "absent"), out)
    run = local_run(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"checkpoints has no best checkpoint: the job has no checkpoint.best; leave out --best"
    ):
        export_weights(str(run), out, best=True)
    with pytest.raises(
        CheckpointError, match=r"step-00000003 has no averaged weights: the job has no train.ema; leave out --ema"
    ):
        export_weights(str(run), out, ema=True)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} is a folder; name the file to write, such as {tmp_path}/weights.safetensors"
    ):
        export_weights(str(run), tmp_path)
    assert not out.exists()


def test_a_damaged_newest_checkpoint_falls_back_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = some_run(tmp_path)
    (run / "checkpoints" / "step-00000003" / "model.safetensors").write_bytes(b"damaged")
    words = export_weights(str(run), tmp_path / "weights.safetensors")
    assert "of step 1 from" in words
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "step-00000003 is damaged" in captured.err
    assert "warning" not in captured.out
