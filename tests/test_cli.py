"""The command line in this process: exit codes, and what is said on which stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raydist.__main__ import with_command
from raydist.cli import guarded, main
from raydist.errors import ConfigError, DataError, Interrupted, TrainError
from tests.runs import lines, write_job


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    for name in ("FORCE_COLOR", "RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    return captured.err


def test_a_job_trains_locally_and_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert main(["train", str(job), "--local", "train.epochs=2"]) == 0
    text = said(capsys)
    told = text.splitlines()
    assert told[:2] == ["data.train: tests.support:line", f"run: {tmp_path}/runs/lin"]
    assert [line.split()[1] for line in told if line.startswith("step ")] == [f"{k}/6" for k in range(1, 7)]
    assert re.search(r"^status\s+finished$", text, re.M) and re.search(r"^steps\s+6 \(6 applied, 0 skipped\)$", text, re.M)
    assert re.search(rf"^run\s+{tmp_path}/runs/lin$", text, re.M)
    assert len(lines(tmp_path / "runs" / "lin")) == 6
    # the same again: nothing is left to do
    assert main(["train", str(job), "--local", "train.epochs=2"]) == 0
    again = said(capsys)
    assert "finished" in again and "step 1/6" not in again


def test_the_files_of_a_job_are_named_with_their_resolved_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data: dict[str, Any] = {"train": {"path": ["a/x.csv", "b.csv"]}, "eval": {"path": "c.csv"}}
    job = write_job(tmp_path, data=data, task__inputs=[["x"]], task__targets="y")
    assert main(["train", str(job), "--local"]) == 1
    told = said(capsys).splitlines()
    assert told[:2] == [f"data.train: {tmp_path}/a/x.csv, {tmp_path}/b.csv", f"data.eval: {tmp_path}/c.csv"]
    assert told[-1].startswith("raydist: failed: ") and "x.csv" in told[-1]


def test_all_problems_of_a_job_file_come_at_once_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert main(["train", str(job), "--local", "optimizer.lr=-1", "train.epoch=3"]) == 2
    text = said(capsys)
    assert text.startswith(f"raydist: wrong job or command: {job}: 2 problems\n")
    assert "optimizer.lr" in text and "train.epoch" in text and "Traceback" not in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'JOB.YAML'"),
        (["train", "job.yaml", "--locl"], "No such option: --locl"),
        (["export", "run"], "Missing argument 'out'"),
        (["train", "no_such_job.yaml", "--local"], "no_such_job.yaml"),
        (["train", "no_such_job.yaml", "--local", "--resume"], "--resume"),
    ],
)
def test_a_wrong_command_is_exit_code_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in said(capsys)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("train", "schema", "export"))
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--local", "--address", "--resume", "--fresh", "--verbose"))


def test_data_that_cannot_be_used_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_job(tmp_path, xs=[])), "--local"]) == 1
    told = said(capsys).splitlines()
    assert told[-1] == "raydist: failed: data.train: no rows at all in tests.support:line"
    assert "Traceback" not in "\n".join(told)
    assert json.loads((tmp_path / "runs" / "lin" / "summary.json").read_text())["status"] == "failed"


def test_a_stopped_run_is_exit_code_3_and_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = str(tmp_path / "sent")
    args = {"xs": [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], "at": 2, "number": "SIGTERM", "file": once}
    job = write_job(tmp_path, data__train={"target": "tests.runs:Signals", "args": args})
    assert main(["train", str(job), "--local"]) == 3
    told = said(capsys).splitlines()
    assert told[-1] == "raydist: stopped at step 2 by SIGTERM; the same command goes on from there"
    assert main(["train", str(job), "--local"]) == 0
    assert [line["step"] for line in lines(tmp_path / "runs" / "lin")] == [1, 2, 3]


def test_fresh_starts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(write_job(tmp_path))
    assert main(["train", job, "--local"]) == 0
    capsys.readouterr()
    assert main(["train", job, "--local", "--fresh", "optimizer.lr=0.02"]) == 0
    text = said(capsys)
    assert "note: the earlier run was moved to" in text and "step 3/3" in text
    assert main(["train", job, "--local"]) == 2
    assert "optimizer.lr: 0.02 there, 0.01 now" in said(capsys)
    assert main(["train", job, "--local", "--resume", "auto", "train.epochs=2"]) == 0
    assert "note: resuming with train.epochs = 2, was 1" in said(capsys)


def test_every_error_has_its_exit_code_and_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(error: BaseException) -> int:
        def command() -> None:
            raise error

        return guarded(command)

    assert guarded(lambda: None) == 0
    assert failing(TrainError("step 3: boom")) == 1
    assert said(capsys) == "raydist: failed: step 3: boom\n"
    assert failing(DataError("x.csv")) == 1
    assert failing(ConfigError("a: b")) == 2
    assert said(capsys).endswith("raydist: wrong job or command: a: b\n")
    assert failing(Interrupted("stopped at step 3 by Ctrl-C")) == 3
    assert said(capsys) == "raydist: stopped at step 3 by Ctrl-C\n"
    assert failing(KeyboardInterrupt()) == 130
    assert said(capsys) == "raydist: stopped at once; the last committed checkpoint stays good\n"
    assert guarded(lambda: 130) == 130  # a parser that caught Ctrl-C itself
    assert said(capsys) == "raydist: stopped at once; the last committed checkpoint stays good\n"
    assert failing(ZeroDivisionError("a bug")) == 1  # no error of ours: with its traceback
    text = said(capsys)
    assert "Traceback" in text and text.endswith("raydist: failed: ZeroDivisionError: a bug\n")


def test_verbose_shows_the_traceback_of_an_error_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-v", "--verbose"):
        assert main(["train", str(write_job(tmp_path, xs=[])), "--local", flag]) == 1
        assert "Traceback" in said(capsys)


def test_schema_is_a_json_schema_that_knows_a_good_job_from_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    job = yaml.safe_load(write_job(tmp_path).read_text())
    jsonschema.validate(job, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "batsh": {}}, schema)


def test_export_writes_the_weights_and_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_job(tmp_path)), "--local"]) == 0
    capsys.readouterr()
    out = tmp_path / "w.safetensors"
    assert main(["export", str(tmp_path / "runs" / "lin"), str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 1 tensors of step 3 from ")
    assert out.is_file()
    assert main(["export", str(tmp_path / "runs" / "lin"), str(out), "--best"]) == 1
    assert "leave out --best" in said(capsys)


def test_a_job_file_alone_means_train() -> None:
    assert with_command(["job.yaml", "--local"]) == ["train", "job.yaml", "--local"]
    assert with_command(["JOB.YML"]) == ["train", "JOB.YML"]
    assert with_command(["schema"]) == ["schema"] and with_command([]) == []
