"""raydist from Python: train, results, checkpoints; and notebooks, in which nothing is left behind."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist
from raydist.notebook import screen_for
from tests.runs import config_of, write_job
from tests.support import lin_job


def test_training_from_python_gives_a_result_with_all_that_the_run_wrote(tmp_path: Path) -> None:
    result = raydist.train(write_job(tmp_path, train__epochs=2), ["train.log_every.steps=3"], local=True, quiet=True)
    assert result.status == "finished" and result.summary["steps"] == 6
    assert result.root == str(tmp_path / "runs" / "lin") and result.config.train.log_every.steps == 3
    frame = result.metrics_frame()
    assert list(frame.index) == [3, 6] and frame.index.name == "step"
    assert frame["train_loss"].iloc[-1] == result.metrics["train_loss"] and "compute_s.0" in frame
    assert next(event["kind"] for event in result.events()) == "start"
    state = result.load_checkpoint()
    assert state.counters["step"] == 6
    checkpoint = Path(result.root) / "checkpoints" / "step-00000006"
    assert torch.equal(raydist.load_checkpoint(checkpoint).model["weight"], state.model["weight"])
    with pytest.raises(raydist.CheckpointError):
        raydist.load_checkpoint(tmp_path)


def test_a_job_is_a_file_a_dict_or_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = {**lin_job([1.0, 2.0], 2), "storage": str(tmp_path / "runs")}
    first = raydist.train(job, ["name=first"], local=True, quiet=True)
    second = raydist.train(config_of(tmp_path, xs=[1.0, 2.0], optimizer__lr=0.1), ["name=second"], local=True, quiet=True)
    assert first.metrics == second.metrics and (first.summary["name"], second.summary["name"]) == ("first", "second")
    with pytest.raises(raydist.ConfigError, match=r"optimizer\.lr"):
        raydist.train(job, ["optimizer.lr=-1"], local=True)


TASK = """
import torch

class Task:
    def build_model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return (model(batch[0]) * 0).mean() + {value}
"""


def test_a_second_call_takes_files_as_they_are_then_and_leaves_paths_and_modules(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    losses = []
    for value in (1.0, 2.0):
        (tmp_path / "task.py").write_text(textwrap.dedent(TASK.format(value=value)))
        write_job(tmp_path, task={"target": "./task.py:Task"})
        losses.append(raydist.train(tmp_path / "job.yaml", local=True, fresh=True, quiet=True).metrics["train_loss"])
    assert losses == [1.0, 2.0]
    assert sys.path == path
    assert not {name for name in set(sys.modules) - modules if name.startswith("raydist_file_")}


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    screen_for(quiet=True).say("hello")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_notebook_shows_one_output_that_updates_and_runs_again_in_the_same_kernel(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    write_job(tmp_path, data__eval={"target": "tests.support:line", "args": {"xs": [1.0, 2.0]}})
    train = "result = raydist.train('job.yaml', local=True, fresh=True)"
    count = "print(threading.active_count(), len(multiprocessing.active_children()), signal.getsignal(signal.SIGTERM))"
    cells = ["import raydist, threading, multiprocessing, signal", train, count, train, count, "result.metrics_frame()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook = run_notebook(nbclient, notebook, tmp_path)
    outputs = [cell["outputs"] for cell in notebook["cells"]]
    for at in (1, 3):
        assert [output["output_type"] for output in outputs[at]] == ["display_data"]  # no stream: one output, updated
        html = outputs[at][0]["data"]["text/html"]
        assert 'max="3" value="3"' in html and "step 3 of 3" in html and "eval_loss" in html and "finished" in html
    assert outputs[2][0]["text"] == outputs[4][0]["text"]  # no thread, process or signal handler more than before
    assert "train_loss" in outputs[5][0]["data"]["text/html"]


def run_notebook(nbclient: Any, notebook: Any, folder: Path) -> Any:
    """Execute all cells in one kernel that starts in `folder`."""
    import subprocess

    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import nbformat, nbclient; "
        "book = nbformat.read(sys.argv[1], 4); "
        "where = {'metadata': {'path': sys.argv[2]}}; "
        "nbclient.NotebookClient(book, timeout=120, kernel_name='python3', resources=where).execute(); "
        "nbformat.write(book, sys.argv[1])"
    )
    path = folder / "book.ipynb"
    import nbformat

    nbformat.write(notebook, path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JUPYTER_PATH": str(folder)}
    command = [sys.executable, "-c", code, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return nbformat.read(path, 4)
