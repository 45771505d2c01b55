"""A sweep on the screen: a live table on a terminal, one line a trial otherwise, and the result at the end. No ray."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from raydist.environment import hide
from raydist.plain_table import aligned
from raydist.report.words import number
from raydist.screen import clock
from raydist.sweep.journal import ENDED, Journal, Row
from raydist.sweep.space import name_of

if TYPE_CHECKING:
    from raydist.sweep.run import Sweep

_EVERY_S = 0.5
_SHOWN = 12


class Board:
    """Shows a sweep that is under way."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._live: Live | None = None
        self._updated = 0.0
        self._done_before = sweep.journal.count(*ENDED)

    def ended(self, row: Row) -> None:
        """A trial has ended: a line of it where there is no live table."""
        if row.status in ENDED and not self.sweep.screen.pretty:
            self.sweep.screen.say(line_of(row, self.sweep.journal.metric))

    def update(self) -> None:
        """Draw the table anew, if it is time."""
        screen = self.sweep.screen
        if not screen.pretty or time.monotonic() - self._updated < _EVERY_S:
            return
        self._updated = time.monotonic()
        if self._live is None:
            self._live = Live(console=screen.console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """Best so far, the trials that run, the latest that ended, counts and the time left."""
        journal = self.sweep.journal
        best = journal.best()
        rows = list(journal.rows.values())
        shown = [row for row in rows if row.status == "running"]
        shown = [*([best] if best is not None else []), *shown, *[row for row in reversed(rows) if row.status in ENDED]]
        table = Table(title=self.title(), title_justify="left")
        keys = journal.keys()
        for name in ("trial", "status", journal.metric, "steps", *keys):
            table.add_column(name)
        for row in list({row.number: row for row in shown}.values())[:_SHOWN]:
            name, *cells = _cells(row, journal.metric, keys)
            table.add_row(*(Text(hide(cell)) for cell in [name + " *" * (row is best), *cells]))
        return table

    def title(self) -> str:
        """Counts and the time left."""
        journal, total = self.sweep.journal, self.sweep.plan.trials
        done, failed = journal.count(*ENDED), journal.count("failed")
        new = done - self._done_before
        eta = clock((time.monotonic() - self.sweep.began) / new * (total - done)) if new else "?"
        return f"{self.sweep.config.name}: {done}/{total} done, {journal.count('running')} running, {failed} failed, eta {eta}"

    def close(self) -> None:
        """Take the live table away; the result is said by `result`."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def line_of(row: Row, metric: str) -> str:
    """A trial that has ended, in a line."""
    settings = "  ".join(f"{key} {number(value)}" for key, value in row.settings.items())
    value = row.value(metric)
    told = row.error if row.status == "failed" else f"{metric} {number(value)}" if value is not None else f"no finite {metric}"
    return f"trial {name_of(row.number)} {row.status} at step {row.last.get('steps', 0)}: {told}  ({settings})"


def result(journal: Journal) -> list[str]:
    """What a sweep has found, as lines: the trials, the best first, what failed, and where the best is."""
    rows = sorted(journal.rows.values(), key=lambda row: row.number)
    scored = journal.ranked()
    keys = journal.keys()
    header: list[Any] = ["trial", "status", journal.metric, "steps", *keys]
    table = [_cells(row, journal.metric, keys) for row in [*scored, *(row for row in rows if row not in scored)]]
    lines = aligned([header, *table])
    failed = [row for row in rows if row.status == "failed"]
    if failed:
        lines.append(f"{len(failed)} of {len(rows)} failed")
        lines += [f"  trial {name_of(row.number)}: {row.error}" for row in failed]
    best = journal.best()
    if best is not None:
        value = number(best.value(journal.metric))
        lines.append(
            f"best: trial {name_of(best.number)} with {journal.metric} {value}; raydist train {journal.root}/best.yaml"
        )
    return lines


def _cells(row: Row, metric: str, keys: list[str]) -> list[str]:
    """A trial's line of a table: name, status, metric, steps, and what it has for the swept keys."""
    told = [name_of(row.number), row.status, number(row.value(metric)), str(row.last.get("steps", ""))]
    return told + [number(row.settings.get(key, "")) for key in keys]
