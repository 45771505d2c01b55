"""What user code prints in a worker, as events with the rank, so that it reaches the user's screen."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

from raydist.control import Control
from raydist.environment import hide


class Lines(io.TextIOBase):
    """A text stream that makes an event of each line and passes all text on to `under` (Ray's own log of the worker)."""

    def __init__(self, control: Control, under: io.TextIOBase) -> None:
        self.control, self.under = control, under
        self._open = ""

    def write(self, text: str) -> int:
        """Note complete lines; the rest waits for its end."""
        self.under.write(hide(text))
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            if line.strip():
                self.control.event("print", reason=line.rstrip())
        return len(text)

    def flush(self) -> None:
        """Pass the flush on; an open line stays open."""
        self.under.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream below."""
        return getattr(self.under, "encoding", "utf-8")


@contextlib.contextmanager
def captured(control: Control) -> Iterator[None]:
    """Within it, what this process prints to stdout becomes events."""
    before = sys.stdout
    sys.stdout = Lines(control, before)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.stdout = before
