"""A small job for the config tests, and what is refused of its variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.config import JobConfig, load_config, parse_config
from raydist.errors import ConfigError

JOB = """\
name: digits
task:
  model: {target: raydist.models:MLP, args: {hidden: [128, 64]}}
  loss: {target: torch.nn.functional.cross_entropy}
  metrics: {accuracy: {target: torchmetrics.classification:MulticlassAccuracy, args: {num_classes: 10}}}
  inputs: [pixels]
  targets: label
data:
  train: {path: data/train, shuffle: true}
  eval: {path: "data/eval/*.parquet"}
batch: {global_size: 64}
train: {epochs: 10}
optimizer: {name: adamw, lr: 3.0e-3}
"""
TORCH_DATA = "data={train: {target: my.data:Set}, eval: {target: my.data:Set}}"
NO_EVAL = "data.eval=null"


def data_of(text: str = JOB) -> dict[str, Any]:
    return yaml.safe_load(text)


def parse(*overrides: str) -> JobConfig:
    return parse_config(data_of(), "/base", overrides)


def refused(*overrides: str, data: Any = None) -> list[str]:
    """The lines of problems, without the place."""
    with pytest.raises(ConfigError) as caught:
        parse_config(data_of() if data is None else data, "/base", overrides)
    head, *lines = str(caught.value).split("\n")
    count = len(lines)
    assert head == ("job: 1 problem" if count == 1 else f"job: {count} problems")
    assert caught.value.exit_code == 2
    return [line.removeprefix("  ").replace(" (command line)", "") for line in lines]


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def file_error(tmp_path: Path, content: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, content))
    return str(caught.value).removeprefix(str(tmp_path / "bad.yaml"))
