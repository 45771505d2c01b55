"""A live view on a terminal of a run that another process or cluster makes: it only reads the run's folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raydist import storage
from raydist.errors import ConfigError
from raydist.heartbeat import Beat, read_beats
from raydist.monitor import TIMES
from raydist.report.words import duration, number
from raydist.rundir import RunDir
from raydist.screen import Screen

_BARS = "▁▂▃▄▅▆▇█"
_OVER = ("finish", "failed")
_STARTS = ("start", "restart", "resume")
MOST_RANKS = 16
"""Ranks that the table shows; the slowest ones when there are more."""


@dataclass
class View:
    """What is known of a run so far."""

    root: str
    total: int | None = None
    status: str = "waiting for the first event"
    over: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=6))
    beats: dict[int, Beat] = field(default_factory=dict)

    def take(self, kind: str, record: dict[str, Any]) -> None:
        """Add an event or a line of metrics."""
        if kind == "line":
            self.last = record
            if isinstance(record.get("train_loss"), float | int):
                self.losses.append(float(record["train_loss"]))
            self.evaluated.update({k: v for k, v in record.items() if k.startswith("eval_") and k != "eval_s"})
            return
        name = str(record["kind"])
        if name in _STARTS:
            self.total, self.status, self.over = record.get("total_steps"), "training", False
        if name in _OVER:
            self.status, self.over = str(record.get("reason") if name == "finish" else "failed"), True
        if name != "checkpoint":
            rank = f" (rank {record['rank']})" if record.get("rank") is not None else ""
            self.events.append(f"{record['time'][11:19]}  {name.replace('_', ' ')}{rank}  {record.get('reason', '')}")

    def render(self) -> RenderableType:
        """The view as rich shows it."""
        step = int(self.last.get("step", 0))
        of = f" of {self.total}" if self.total else ""
        left = ""
        if self.total and self.last.get("step_s") and not self.over:
            left = f", about {duration((self.total - step) * float(self.last['step_s']))} left"
        parts: list[RenderableType] = [Text(f"{self.root}", style="bold"), Text(f"{self.status}: step {step}{of}{left}")]
        if self.losses:
            parts.append(Text(f"loss {number(self.losses[-1])}  {sparkline(self.losses)}"))
        if self.evaluated:
            parts.append(Text("  ".join(f"{key} {number(value)}" for key, value in self.evaluated.items())))
        numbers = [(key, self.last.get(key)) for key in ("lr", "grad_norm", "rows_per_s", "skipped")]
        if any(value is not None for _, value in numbers):
            parts.append(Text("  ".join(f"{key} {number(value)}" for key, value in numbers if value is not None)))
        if (table := self._ranks()) is not None:
            parts.append(table)
        parts += [Text(event) for event in self.events]
        return Group(*parts)

    def _ranks(self) -> Table | None:
        ranks = self.last.get("ranks")
        count = len(ranks["compute_s"]) if ranks else len(self.beats)
        if not count:
            return None
        order = list(range(count))
        if count > MOST_RANKS and ranks:
            order = sorted(order, key=lambda r: -(ranks["compute_s"][r] + ranks["data_wait_s"][r]))[:MOST_RANKS]
        table = Table("rank", "now", "data wait ms", "compute ms", "sync wait ms", "peak MiB")
        for rank in order[:MOST_RANKS]:
            beat = self.beats.get(rank)
            now = "" if beat is None or self.over else f"{beat.phase}, step {beat.step}"
            times = [number(1e3 * ranks[key][rank]) if ranks else "" for key in TIMES]
            table.add_row(str(rank), now, *times, number(ranks["memory_mb"][rank]) if ranks else "")
        return table


def sparkline(values: list[float], width: int = 48) -> str:
    """The values as a row of blocks, each the mean of as many values as needed to fit `width`."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / span * len(_BARS)))] for value in means)


def watch(
    root: str,
    once: bool = False,
    every: float = 1.0,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show the run at `root` until it is over (or, with `once`, as it is now); returns its last status.

    Where there is no terminal, each record is one plain line. Raises ConfigError when there is no such folder.
    """
    root = root.rstrip("/")
    if not storage.exists(root):
        raise ConfigError(f"{root}: no such folder; give a run's folder, `<storage>/<name>` of its job file")
    console = console or Console(highlight=False)
    view, follower = View(root), RunDir(root).follow()
    if not console.is_terminal and not once:
        return _plain(view, follower, console, every, sleep)
    _update(view, follower)
    if once:
        console.print(view.render())
        return view.status
    with Live(view.render(), console=console, auto_refresh=False) as live:
        while not view.over:
            sleep(every)
            _update(view, follower)
            live.update(view.render(), refresh=True)
    return view.status


def _update(view: View, follower: Any) -> list[tuple[str, dict[str, Any]]]:
    news: list[tuple[str, dict[str, Any]]] = follower.new()
    for kind, record in news:
        view.take(kind, record)
    view.beats = read_beats(view.root)
    return news


def _plain(view: View, follower: Any, console: Console, every: float, sleep: Callable[[float], None]) -> str:
    screen = Screen(stream=console.file)
    while True:
        for kind, record in _update(view, follower):
            if kind == "event" and record["kind"] in _STARTS:
                screen.started(record["step"], record.get("total_steps"))
            (screen.line if kind == "line" else screen.event)(record)
        if view.over:
            screen.say(f"{view.root}: {view.status}")
            return view.status
        sleep(every)
