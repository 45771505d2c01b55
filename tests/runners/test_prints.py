"""Prints of a worker become events, whole lines only, and still reach the stream below."""

from __future__ import annotations

import io
import sys

import pytest

from raydist.control import Control
from raydist.runners.prints import Lines, captured


def test_whole_lines_become_events_and_all_text_goes_on() -> None:
    control, under = Control(), io.StringIO()
    lines = Lines(control, under)
    print("one\ntwo", file=lines)
    print("thr", end="", file=lines)
    assert [event["reason"] for event in control.take()] == ["one", "two"]
    print("ee\n\n   ", file=lines)
    assert control.take() == [{"kind": "print", "reason": "three"}]
    assert under.getvalue() == "one\ntwo\nthree\n\n   \n"


def test_stdout_is_given_back_also_after_an_error() -> None:
    control, before = Control(), sys.stdout
    with pytest.raises(RuntimeError, match="no"), captured(control):
        print("heard")
        raise RuntimeError("no")
    assert sys.stdout is before
    assert control.take() == [{"kind": "print", "reason": "heard"}]
