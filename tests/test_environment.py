"""The job file's env: what is a secret, how it is resolved, and that no output of a run holds one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from raydist import environment
from raydist.api import as_config
from raydist.cli import main
from raydist.config import diff_settings, load_config, parse_config, to_plain, to_yaml
from raydist.environment import applied, hide, is_secret, masked, resolve
from raydist.errors import ConfigError
from tests.runs import config_of, write_job
from tests.support import lin_job

SECRET = 'sk-"quoted"\\1/é-7f3a9c'
OTHER = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_secrets", set())
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    for name in ("RANK", "WORLD_SIZE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name",
    [
        "KEY",
        "API_KEY",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "token",
        "DB_PASSWORD",
        "APIKEY",
        "TOKEN_2",
        "SSH_KEYS",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "KEYBOARD", "OMP_NUM_THREADS", "SECRETARY", "PATH"])
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_settings_show_references_and_mask_literals() -> None:
    env = {"API_KEY": "abcdefgh", "HF_TOKEN": "${HF_TOKEN}", "A_TOKEN": "x${HF_TOKEN}", "NCCL_DEBUG": "INFO", "EMPTY_KEY": ""}
    assert masked(env) == {
        "API_KEY": "***",
        "HF_TOKEN": "${HF_TOKEN}",
        "A_TOKEN": "***",
        "NCCL_DEBUG": "INFO",
        "EMPTY_KEY": "",
    }


def test_references_are_resolved_and_all_that_is_missing_is_told() -> None:
    there = {"A": "aaaaaa", "TOKEN": "tttttt", "HOME": "/somewhere"}
    assert resolve({"X": "${A}-${TOKEN}", "Y": "$A $$", "Z": "${HOME}/x"}, there) == {
        "X": "aaaaaa-tttttt",
        "Y": "$A $$",
        "Z": "/somewhere/x",
    }
    assert hide("aaaaaa-tttttt and /somewhere/x") == "*** and /somewhere/x"
    with pytest.raises(
        ConfigError, match=r"(?s)env\.X refers to \$\{B\}, which is not set.*env\.Y refers to \$\{C\}.*env\.Z_KEY is \*\*\*"
    ):
        resolve({"X": "${B}", "Y": "${C}", "Z_KEY": "***"}, there)


def test_short_values_are_not_looked_for_in_text() -> None:
    resolve({"PIN_TOKEN": "1", "API_KEY": "longer-than-six"}, {})
    assert hide("step 1 of 10: longer-than-six") == "step 1 of 10: ***"


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "1")
    monkeypatch.delenv("NEW", raising=False)
    with applied({"BEFORE": "2", "NEW": "3"}):
        assert (os.environ["BEFORE"], os.environ["NEW"]) == ("2", "3")
    assert os.environ["BEFORE"] == "1" and "NEW" not in os.environ


def test_numbers_are_taken_as_text_and_other_values_refused_without_showing_them(tmp_path: Path) -> None:
    job = lin_job([1.0], 1, env={"OMP_NUM_THREADS": 4})
    assert parse_config(job, tmp_path).env == {"OMP_NUM_THREADS": "4"}
    for env, words in (
        ({"API_KEY": ["hunter2-hunter2"]}, "env.API_KEY: "),
        ({"API_KEY": True}, "env.API_KEY: "),
        ({"1X": "a"}, "not the name of a variable"),
        ({"RANK": "0"}, "set for each worker by the runner"),
        ({"X": "a\0"}, "NUL"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(lin_job([1.0], 1, env=env), tmp_path)
        assert words in str(caught.value) and OTHER not in str(caught.value)


def test_a_wrong_override_of_a_secret_does_not_show_it(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(job, [f"env.API_KEY=[{OTHER}"])
    assert "env.API_KEY" in str(caught.value) and OTHER not in str(caught.value)


def test_the_settings_never_hold_a_literal_secret(tmp_path: Path) -> None:
    config = config_of(tmp_path, env={"API_KEY": OTHER, "NCCL_DEBUG": "INFO"})
    assert OTHER not in to_yaml(config) and OTHER not in str(to_plain(config)) and OTHER not in repr(config)
    again = config_of(tmp_path, env={"API_KEY": "another-one", "NCCL_DEBUG": "WARN"})
    assert diff_settings(config, again) == [("env.NCCL_DEBUG", "INFO", "WARN")]
    assert config.env["API_KEY"] == OTHER and as_config(config, ["seed=3"]).env["API_KEY"] == OTHER


class Leaky(Dataset[Any]):
    """Rows (x, 3x) whose owner prints, warns of and fails with the secrets that it was given."""

    def __init__(self, fail: bool) -> None:
        self.fail = fail
        assert os.environ["NCCL_DEBUG"] == "INFO"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Any:
        words = f"{os.environ['API_KEY']} {os.environ['LOGIN']}"
        if row == 1:
            warnings.warn(f"old key {words}", stacklevel=1)
        if row == 5 and self.fail:
            raise ValueError(f"401 for {words}")
        return torch.tensor([1.0]), torch.tensor([3.0])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fail", [False, True])
def test_no_output_of_a_run_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fail: bool
) -> None:
    monkeypatch.setenv("LOGIN_FROM_OUTSIDE", OTHER)
    job = write_job(
        tmp_path,
        data={"train": {"target": "tests.test_environment:Leaky", "args": {"fail": fail}}},
        checkpoint={"every": {"steps": 1}},
        loggers=["tensorboard"],
        env={"API_KEY": SECRET, "LOGIN": "${LOGIN_FROM_OUTSIDE}", "NCCL_DEBUG": "INFO"},
    )
    assert main(["train", str(job), "--local", "-v"]) == (1 if fail else 0)
    captured = capfd.readouterr()
    assert ("401 for *** ***" in captured.err) == fail
    outputs = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    names = {path.name for path in outputs}
    assert {"config.yaml", "events.jsonl", "metrics.jsonl", "summary.json", "state.json", "optimizer.pt"} <= names
    assert any(b"old key *** ***" in content for content in outputs.values())
    assert "LOGIN: ${LOGIN_FROM_OUTSIDE}" in (tmp_path / "runs/lin/config.yaml").read_text()
    everything = {**outputs, "out": captured.out.encode(), "err": captured.err.encode()}
    for secret in (SECRET, OTHER):
        for form in (secret, repr(secret)[1:-1], secret.replace("\\", "\\\\").replace('"', '\\"')):
            assert [str(place) for place, content in everything.items() if form.encode() in content] == []
    assert {"API_KEY", "LOGIN", "NCCL_DEBUG"}.isdisjoint(os.environ)
