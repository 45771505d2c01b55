"""Run folders as raydist writes them, with numbers that the tests know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raydist.rundir import RunDir

NASTY = '</script><script>alert("1")</script><img src=x onerror=alert(2)> & <b>bold</b>'


def stamp(seconds: float) -> str:
    return f"2026-01-01T00:{int(seconds) // 60:02d}:{seconds % 60:06.3f}+00:00"


def event(at: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": stamp(at), "kind": kind, **fields}


def line(step: int, ranks: int = 2, **values: Any) -> dict[str, Any]:
    """Loss 10 / step; a step takes 0.5 s, of which rank r waits 0.1 r for data."""
    data = [0.1 * rank for rank in range(ranks)]
    per_rank = {
        "data_wait_s": data,
        "compute_s": [0.3] * ranks,
        "sync_wait_s": [0.2 - wait for wait in data],
        "memory_mb": [500.0 + 100 * rank for rank in range(ranks)],
        "memory_reserved_mb": [600.0] * ranks,
    }
    own = {"epoch": 0, "train_loss": 10.0 / step, "lr": 0.1, "grad_norm": 1.0, "skipped": 0, "rows_seen": 8 * step}
    return {"step": step, **own, "step_s": 0.5, "rows_per_s": 16.0, "memory_mb": 500.0, "ranks": per_rank, **values}


def write(folder: Path, name: str = "one", lr: float = 0.1, nasty: bool = False, over: bool = True) -> Path:
    """A run of 8 steps that failed after step 5, went on from 4, and skipped step 7."""
    reason = NASTY if nasty else "the gradient is nan"
    root = folder / name
    run = RunDir(str(root))
    run.write_config(f"name: {name}\noptimizer: {{name: sgd, lr: {lr}}}\nbatch: {{global_size: 8}}\n")
    for step in range(1, 9):
        extra = {"eval_loss": 20.0 / step, "eval_accuracy": step / 10, "eval_s": 0.25} if step % 4 == 0 else {}
        run.append_metrics(line(step, **extra))
    for record in [
        event(0, "start", step=0, total_steps=8, world_size=2),
        event(2.5, "checkpoint", step=4),
        event(3.0, "failure", rank=1, reason="rank 1 died"),
        event(13.0, "restart", step=4, total_steps=8, lost_steps=1, reason="from step 4"),
        event(14.5, "bad_step", step=7, rank=0, reason=reason),
        *([event(16.0, "finish", step=8, reason="finished")] if over else []),
    ]:
        run._events.append(record)
    if over:
        run.write_summary(
            {
                "name": name,
                "status": "finished",
                "reason": reason if nasty else None,
                "steps": 8,
                "applied": 7,
                "skipped": 1,
                "rows_seen": 64,
                "metrics": {"train_loss": 1.25, "eval_accuracy": 0.8},
                "workers": 2,
                "restarts": 1,
                "lost_steps": 1,
                "seconds": 16.0,
                "run": str(root),
            }
        )
    return root
