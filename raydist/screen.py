"""What the user sees: a progress bar on a terminal, one plain line a record otherwise, and a final table."""

from __future__ import annotations

import sys
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from raydist.environment import hide

_TIMES = {"step_s", "data_wait_s", "sync_wait_s", "eval_s", "memory_mb", "compute_s", "memory_reserved_mb"}


class Screen:
    """Shows the records of one run. Call `line` for each metrics record, `event` for each event, `close` at the end."""

    def __init__(self, total_steps: int | None = None, stream: IO[str] | None = None) -> None:
        self.console = Console(file=stream or sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        self.total = total_steps
        self.pretty = self.console.is_terminal and not self.console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_step = 0
        self._rate: float | None = None

    def say(self, text: str) -> None:
        """One line, on its own."""
        self.console.print(hide(text), markup=False)

    def started(self, step: int, total_steps: int | None) -> None:
        """Training is at `step` of `total_steps`."""
        self.total = total_steps
        self._last_step = step
        if self.pretty and self._progress is None:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("training", total=total_steps, completed=step, numbers="")
            self._progress.start()

    def line(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        if step <= self._last_step and "eval_loss" not in record:
            return
        self._last_step = max(step, self._last_step)
        evaluated = {k: v for k, v in record.items() if k.startswith("eval_") and k not in _TIMES}
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, numbers=numbers(record))
            if evaluated:
                self.say(f"step {step}  epoch {record['epoch']}  {pairs(evaluated)}")
            return
        eta = self._eta(step, record)
        of = f"/{self.total}" if self.total else ""
        self.say(
            f"step {step}{of}  epoch {record['epoch']}  {numbers(record)}{eta}" + (f"  {pairs(evaluated)}" if evaluated else "")
        )

    def _eta(self, step: int, record: dict[str, Any]) -> str:
        if self.total is None or not record.get("step_s"):
            return ""
        pace = float(record["step_s"])
        self._rate = pace if self._rate is None else 0.7 * self._rate + 0.3 * pace
        return f"  eta {clock((self.total - step) * self._rate)}"

    def event(self, record: dict[str, Any]) -> None:
        kind = record.get("kind", "event")
        if kind in ("start", "finish", "checkpoint", "resume", "worker_failed", "failed"):
            return
        if kind == "slow_rank":
            self.say(str(record.get("reason", "")))
            return
        rank = f" (rank {record['rank']})" if record.get("rank") is not None else ""
        self.say(f"{kind.replace('_', ' ')}{rank}: {record.get('reason', '')}".rstrip(": "))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, summary: dict[str, Any]) -> None:
        """The final table of a run."""
        self.close()
        rows = summary_rows(summary)
        if self.pretty:
            table = Table(show_header=False, title=summary.get("name"))
            for key, value in rows:
                table.add_row(key, Text(hide(value)))
            self.console.print(table)
            return
        width = max(len(key) for key, _ in rows)
        for key, value in rows:
            self.say(f"{key:<{width}}  {value}")


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What the final table says, as (name, value)."""
    return [
        ("status", summary["status"] + (f" ({summary['reason']})" if summary.get("reason") else "")),
        ("steps", f"{summary.get('steps', 0)} ({summary.get('applied', 0)} applied, {summary.get('skipped', 0)} skipped)"),
        ("rows seen", f"{summary.get('rows_seen', 0)}"),
        *((key, _number(value)) for key, value in (summary.get("metrics") or {}).items() if key not in _TIMES),
        *_times(summary),
        *_bubble(summary),
        ("restarts", str(summary.get("restarts", 0))),
        ("seconds", f"{summary.get('seconds', 0.0):.1f}"),
        ("run", str(summary.get("run", ""))),
    ]


def _bubble(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How idle a pipeline's stages were."""
    told = summary.get("pipeline")
    return [("bubble", f"{told['bubble']:.0%} of the stages' time (the schedule's limit: {told['limit']:.0%})")] if told else []


def _times(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the time went, and the rank that the others wait for, if there is one."""
    rows = []
    totals = {key: sum(values) for key, values in (summary.get("time_split") or {}).items()}
    if whole := sum(totals.values()):
        parts = [f"{100 * total / whole:.0f} % {key.removesuffix('_s').replace('_', ' ')}" for key, total in totals.items()]
        rows.append(("time", ", ".join(parts)))
    if slow := summary.get("slow_rank"):
        rows.append(("slow rank", f"rank {slow['rank']} is slow: {slow['cause']} (in {slow['lines']} of {slow['of']} lines)"))
    return rows


def numbers(record: dict[str, Any]) -> str:
    """Loss, rate and speed of a metrics record, for a line."""
    parts = []
    if record.get("train_loss") is not None:
        parts.append(f"loss {_number(record['train_loss'])}")
    if record.get("lr") is not None:
        parts.append(f"lr {record['lr']:.3g}")
    if record.get("rows_per_s") is not None:
        parts.append(f"{record['rows_per_s']:.0f} rows/s")
    return "  ".join(parts)


def pairs(values: dict[str, Any]) -> str:
    """`key value` of each, for a line."""
    return "  ".join(f"{key} {_number(value)}" for key, value in values.items())


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
