"""What the user sees: each line once and without escape codes where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
from typing import Any

import pytest

from raydist.screen import Screen

LINE: dict[str, Any] = {"step": 10, "epoch": 1, "train_loss": 0.123456789, "lr": 1e-3, "rows_per_s": 1234.5, "step_s": 0.5}
SUMMARY: dict[str, Any] = {
    "name": "digits",
    "status": "finished",
    "reason": None,
    "steps": 40,
    "applied": 38,
    "skipped": 2,
    "rows_seen": 640,
    "metrics": {"eval_loss": 0.25, "eval_accuracy": 0.98, "eval_s": 1.0},
    "restarts": 1,
    "seconds": 12.34,
    "run": "runs/[a] :boom: x/digits",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def plain() -> tuple[Screen, io.StringIO]:
    stream = io.StringIO()
    return Screen(stream=stream), stream


def test_without_a_terminal_each_record_is_one_plain_line() -> None:
    screen, stream = plain()
    screen.started(0, 40)
    screen.line(LINE)
    screen.line({**LINE, "step": 20, "eval_loss": 0.5, "eval_acc": 0.75, "eval_s": 9.0})
    screen.close()
    first, second = stream.getvalue().splitlines()
    # 30 steps are left at 0.5 s each, then 20
    assert first == "step 10/40  epoch 1  loss 0.12346  lr 0.001  1234 rows/s  eta 00:15"
    assert second == "step 20/40  epoch 1  loss 0.12346  lr 0.001  1234 rows/s  eta 00:10  eval_loss 0.5  eval_acc 0.75"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_a_step_is_shown_once_though_it_comes_twice() -> None:
    screen, stream = plain()
    screen.started(5, None)
    for step in (4, 5, 10, 10, 9):
        screen.line({**LINE, "step": step})
    assert [text.split("  ")[0] for text in stream.getvalue().splitlines()] == ["step 10"]


def test_a_long_line_is_not_broken_and_is_written_as_it_is() -> None:
    screen, stream = plain()
    text = "data: /a/" + "very/long/" * 40 + "[bold]x[/bold] :warning: [/]"
    screen.say(text)
    assert stream.getvalue() == text + "\n"


@pytest.mark.parametrize(
    ("left", "words"), [(59, "00:59"), (3599, "59:59"), (3600, "01:00:00"), (30 * 3600 + 61, "30:01:01"), (-5, "00:00")]
)
def test_the_time_left_is_in_minutes_or_hours(left: int, words: str) -> None:
    screen, stream = plain()
    screen.started(0, 10 + left)
    screen.line({**LINE, "step_s": 1.0})
    assert stream.getvalue().rstrip().endswith(f"eta {words}")


def test_the_pace_of_the_time_left_follows_the_last_lines() -> None:
    screen, stream = plain()
    screen.started(0, 110)
    screen.line({**LINE, "step_s": 1.0})
    screen.line({**LINE, "step": 11, "step_s": 11.0})
    assert stream.getvalue().splitlines()[1].endswith("eta 06:36")  # 99 steps at 0.7 * 1 + 0.3 * 11 = 4 s


def test_events_say_what_happened_and_on_which_rank_and_routine_is_quiet() -> None:
    screen, stream = plain()
    for kind in ("start", "finish", "checkpoint", "resume", "worker_failed", "failed"):
        screen.event({"kind": kind, "reason": "routine"})
    screen.event({"kind": "bad_step", "rank": 1, "reason": "CUDA error: [/] boom"})
    screen.event({"kind": "note", "reason": "resuming with lr = 2, was 1"})
    screen.event({"kind": "warning", "rank": 0, "reason": "UserWarning: slow"})
    screen.event({"kind": "slow_rank", "rank": 3, "reason": "rank 3 is slow: data"})
    assert stream.getvalue().splitlines() == [
        "bad step (rank 1): CUDA error: [/] boom",
        "note: resuming with lr = 2, was 1",
        "warning (rank 0): UserWarning: slow",
        "rank 3 is slow: data",
    ]


def test_the_final_table_has_one_value_a_line() -> None:
    screen, stream = plain()
    screen.table({**SUMMARY, "reason": "early stop"})
    assert [text.split(maxsplit=1) for text in stream.getvalue().splitlines()] == [
        ["status", "finished (early stop)"],
        ["steps", "40 (38 applied, 2 skipped)"],
        ["rows", "seen      640"],
        ["eval_loss", "0.25"],
        ["eval_accuracy", "0.98"],
        ["restarts", "1"],
        ["seconds", "12.3"],
        ["run", "runs/[a] :boom: x/digits"],
    ]


def test_the_final_table_says_where_the_time_went_and_who_was_slow() -> None:
    screen, stream = plain()
    split = {"data_wait_s": [1.0, 3.0], "compute_s": [7.0, 7.0], "sync_wait_s": [2.0, 0.0]}
    screen.table({**SUMMARY, "time_split": split, "slow_rank": {"rank": 1, "cause": "data", "lines": 3, "of": 4}})
    rows = stream.getvalue().splitlines()
    assert "time           20 % data wait, 70 % compute, 10 % sync wait" in rows
    assert "slow rank      rank 1 is slow: data (in 3 of 4 lines)" in rows


def test_the_final_table_of_a_run_that_ended_early_has_what_there_is() -> None:
    screen, stream = plain()
    screen.table({"status": "failed", "reason": "a [/] bracket", "metrics": None})
    assert "failed (a [/] bracket)" in stream.getvalue() and "0 (0 applied, 0 skipped)" in stream.getvalue()


def test_a_terminal_gets_a_bar_and_lines_for_evaluations_only() -> None:
    stream = Terminal()
    screen = Screen(stream=stream)
    assert screen.pretty
    screen.started(0, 40)
    screen.line(LINE)
    screen.line({**LINE, "step": 20, "eval_loss": 0.5})
    screen.event({"kind": "note", "reason": "[a] :boom: hello"})
    screen.table(SUMMARY)
    text = stream.getvalue()
    assert "\x1b" in text and "training" in text and "20/40" in text
    assert "step 20  epoch 1  eval_loss 0.5" in text and "step 10 " not in text
    assert "note: [a] :boom: hello" in text
    assert "digits" in text and "runs/[a] :boom: x/digits" in text
    screen.close()  # twice is fine


def test_a_terminal_that_cannot_move_the_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    screen = Screen(stream=stream)
    screen.started(0, 40)
    screen.line(LINE)
    screen.table(SUMMARY)
    assert stream.getvalue().startswith("step 10/40  ") and "\x1b" not in stream.getvalue()
