"""Progress in a notebook: one output that updates itself, in place of a terminal's bar."""

from __future__ import annotations

import importlib
import io
import sys
from html import escape
from typing import Any

from raydist.screen import Screen, numbers, pairs, summary_rows


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel (not plain IPython on a terminal)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _Nowhere(io.StringIO):
    """Takes text and keeps none."""

    def write(self, text: str) -> int:
        return len(text)


def screen_for(quiet: bool = False) -> Screen:
    """The screen for where this process runs: none, a notebook's output, a terminal, or plain lines."""
    if quiet:
        return Screen(stream=_Nowhere())
    return NotebookScreen() if in_notebook() else Screen()


class NotebookScreen(Screen):
    """Shows a run as one HTML output: a bar, the numbers, the last evaluation, and what happened."""

    def __init__(self) -> None:
        super().__init__()
        shown: Any = importlib.import_module("IPython.display")
        self._html = shown.HTML
        self._handle = shown.display(shown.HTML(""), display_id=True)
        self._step = 0
        self._numbers = self._evaluated = ""
        self._notes: list[str] = []
        self._rows: list[tuple[str, str]] = []

    def say(self, text: str) -> None:
        self._notes.append(text)
        self._show()

    def started(self, step: int, total_steps: int | None) -> None:
        self.total, self._step, self._last_step = total_steps, step, step
        self._show()

    def line(self, record: dict[str, Any]) -> None:
        self._step = max(self._step, int(record["step"]))
        self._numbers = f"epoch {record['epoch']}  {numbers(record)}"
        evaluated = {k: v for k, v in record.items() if k.startswith("eval_") and k != "eval_s"}
        if evaluated:
            self._evaluated = f"step {record['step']}: {pairs(evaluated)}"
        self._show()

    def close(self) -> None:
        pass

    def table(self, summary: dict[str, Any]) -> None:
        self._rows = summary_rows(summary)
        self._show()

    def _show(self) -> None:
        of = f" of {self.total}" if self.total else ""
        most = f' max="{self.total}" value="{self._step}"' if self.total else ""
        parts = [f"<div><progress{most} aria-label='training'></progress> step {self._step}{of}</div>"]
        parts += [f"<div>{escape(text)}</div>" for text in (self._numbers, self._evaluated, *self._notes[-8:]) if text]
        if self._rows:
            cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in self._rows)
            parts.append(f"<table>{cells}</table>")
        if self._handle is not None:
            self._handle.update(self._html("".join(parts)))
