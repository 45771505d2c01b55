"""What a command that is submitted asks for, read from the job file and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.errors import ConfigError
from raydist.runners.needs import demands
from raydist.runners.packing import Need
from tests.runs import write_job


def needs_of(root: Path, *arguments: str) -> dict[str, tuple[str, ...]]:
    return {need.key: need.names for need in demands(root, arguments).needs}


def files_job(root: Path, **data: Any) -> None:
    write_job(root, data=data, task__inputs=["x"], task__targets="y", storage="/mnt/shared/runs")


def test_data_paths_and_task_files_are_needed_from_the_job_files_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs/parts").mkdir(parents=True)
    (tmp_path / "jobs/parts/1.csv").touch()
    (tmp_path / "jobs/parts/2.csv").touch()
    (tmp_path / "my").mkdir()
    (tmp_path / "my/__init__.py").touch()
    (tmp_path / "my/clean.py").touch()
    files_job(
        tmp_path / "jobs",
        train={
            "path": ["parts/*.csv", "/abs/x.csv", "s3://b/y"],
            "transforms": [{"target": "../fix.py:f"}, {"target": "my.clean:g"}],
        },
        eval={"path": "../eval.csv"},
    )
    found = demands(tmp_path, ["train", "jobs/job.yaml", "seed=1", "-v"])
    assert {need.key: need.names for need in found.needs} == {
        "jobs/job.yaml": ("jobs/job.yaml",),
        "data.train.path": ("jobs/parts/1.csv", "jobs/parts/2.csv"),
        "data.train.transforms.0.target": ("fix.py",),
        "data.train.transforms.1.target": ("my/__init__.py", "my/clean.py"),
        "data.eval.path": ("eval.csv",),
    }
    assert found.notes == [
        "data.train.path: /abs/x.csv is looked up on the cluster's nodes",
        "storage: /mnt/shared/runs is looked up on the cluster's nodes",
    ]
    assert found.config is not None and found.config.seed == 1
    assert demands(tmp_path, ["sweep", "jobs/job.yaml", "seed=1", "-v"]) == found


def test_results_must_not_go_into_the_package(tmp_path: Path) -> None:
    write_job(tmp_path)
    with pytest.raises(ConfigError, match=r"storage: .*/runs is written as a path from the job file.*storage=s3://bucket/runs"):
        demands(tmp_path, ["train", "job.yaml"])
    assert needs_of(tmp_path, "train", "job.yaml", "storage=s3://b/runs") == {"job.yaml": ("job.yaml",)}
    with pytest.raises(ConfigError, match=r"loggers\.0\.dir: "):
        demands(tmp_path, ["train", "job.yaml", "storage=/x", "loggers=[{name: tensorboard, dir: tb}]"])


def test_what_lies_outside_the_working_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here/deeper").mkdir(parents=True)
    files_job(tmp_path / "here", train={"path": "../there.csv"})
    with pytest.raises(ConfigError, match=r"data\.train\.path: .*/there\.csv lies outside the working directory .*/here"):
        demands(tmp_path / "here", ["train", "job.yaml"])
    with pytest.raises(ConfigError, match="lies outside the working directory"):
        demands(tmp_path / "here/deeper", ["train", "../job.yaml"])
    with pytest.raises(ConfigError, match="will not be at that place on the cluster"):
        demands(tmp_path / "here", ["train", str(tmp_path / "here/job.yaml")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "none is given"),
        (["trian", "job.yaml"], "'trian' is none"),
        (["train"], "no job file"),
        (["train", "job.yaml", "--address", "x:1"], "put --address before train"),
        (["train", "job.yaml", "name=\udcff"], "is not UTF-8"),
        (["train", "job.yaml", "name=a\0"], "is not UTF-8"),
        (["train", "job.yaml", "optimizer.lr=-1", "storage=/x"], "optimizer.lr"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["run", "--workers", "2"], "submit run: no script is given"),
        (["run", "--workers", "2", "absent.py"], "there is no file absent.py in /"),
        (["run", "../job.yaml"], "there is no file ../job.yaml in /"),
        (["run", __file__], "only that folder's files are sent"),
        (["run", "--address", "x:1", "job.yaml"], "put --address before run"),
        (["train", "job.yaml", "env.WANDB_API_KEY=abc"], r"WANDB_API_KEY would stand in the job's command, .* show to all"),
        (["run", "--env", "HF_TOKEN=abc", "job.yaml"], "give HF_TOKEN='.{HF_TOKEN}'"),
        (["run", "--env=HF_TOKEN=abc", "job.yaml"], "HF_TOKEN would stand"),
    ],
)
def test_a_command_that_could_not_run_there_is_refused_here(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_job(tmp_path)
    with pytest.raises(ConfigError, match=words):
        demands(tmp_path, arguments)


def test_a_reference_to_a_secret_may_be_sent(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    for before in (["--env", "HF_TOKEN=${HF_TOKEN}"], ["--env", "NCCL_DEBUG=INFO"]):
        assert demands(tmp_path, ["run", *before, "script.py", "env.MY_TOKEN=x"]).needs  # what follows is the script's own


def test_other_commands_need_the_files_they_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    assert demands(tmp_path, ["doctor", "script.py", "absent"]).needs == [Need("script.py", ("script.py",))]


def test_a_script_needs_itself_and_what_its_arguments_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("script.py", "data/1.csv", "part.py"):
        (tmp_path / name).touch()
    options = ["--workers", "2", "--env", "A=1", "--log-dir=/mnt/shared"]
    arguments = ["--address", "x", "data", "absent", "", ".", "..", "/", "--exclude", "--", "data/1.csv"]
    found = demands(tmp_path, ["run", *options, "script.py", *arguments])
    assert [need.names for need in found.needs] == [("script.py",), ("data",), ("data/1.csv",)]
    assert found.notes == []
    found = demands(tmp_path, ["run", "--log-dir", "/mnt/logs", "-m", "part", "--log-dir", "x"])
    assert [need.names for need in found.needs] == [("part.py",)] and found.notes == []
    found = demands(tmp_path, ["run", "--log-dir", "logs", "-m", "torch.distributed.run"])
    assert found.needs == [] and "--log-dir names one that all nodes share" in found.notes[0]
