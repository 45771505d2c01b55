"""`raydist watch`: what a run's folder says, live, until the run is over."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raydist.cli import main
from raydist.errors import ConfigError
from raydist.rundir import RunDir
from raydist.watch import View, sparkline, watch
from tests.report.runs import event, line, write


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view.render())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_view_says_where_the_run_is_and_which_rank_waits(tmp_path: Path) -> None:
    view = View(str(tmp_path))
    assert "waiting for the first event" in shown(view)
    view.take("event", event(0, "start", step=0, total_steps=20, reason="from scratch"))
    for step in (1, 2):
        view.take("line", line(step, eval_loss=0.5))
    view.take("event", event(3, "bad_step", rank=1, reason="a [bold]nan[/bold]"))
    text = shown(view)
    assert "training: step 2 of 20, about 9.0 s left" in text  # 18 steps of 0.5 s
    assert "loss 5  █▁" in text and "eval_loss 0.5" in text
    assert "00:00:03  bad step (rank 1)  a [bold]nan[/bold]" in text
    row = next(text_line for text_line in text.splitlines() if "600" in text_line)
    assert row.replace("│", " ").split() == ["1", "100", "300", "100", "600"]
    view.take("event", event(9, "finish", step=20, reason="interrupted"))
    assert view.over and shown(view).splitlines()[1] == "interrupted: step 2 of 20"


def test_a_sparkline_has_a_block_a_value_or_a_mean_of_several() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], width=2) == "▁█"
    assert sparkline([3.0]) == "▁"


def test_without_a_terminal_each_record_is_a_line_and_it_ends_with_the_run(tmp_path: Path) -> None:
    root = write(tmp_path, over=False)
    run, slept = RunDir(str(root)), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            run.append_metrics(line(9))
            run.append_event("finish", step=9, reason="finished")

    out = io.StringIO()
    assert watch(str(root), every=0.5, console=Console(file=out), sleep=sleep) == "finished"
    assert slept == [0.5, 0.5]
    lines = out.getvalue().splitlines()
    assert sum(text.startswith("step ") for text in lines) >= 5 and lines[-2].startswith("step 9/8")
    assert lines[-1] == f"{root}: finished"
    assert any(text.startswith("failure (rank 1): rank 1 died") for text in lines)


def test_on_a_terminal_it_redraws_until_the_run_is_over(tmp_path: Path) -> None:
    root = write(tmp_path, over=False)
    out: Any = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    status = watch(str(root), console=console, sleep=lambda _: RunDir(str(root)).append_event("failed", reason="boom"))
    assert status == "failed" and "failed: step 8 of 8" in out.getvalue() and "boom" in out.getvalue()


def test_the_command_shows_a_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(write(tmp_path)), "--once"]) == 0
    assert "finished: step 8 of 8" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no such folder"):
        watch(str(tmp_path / "none"))
