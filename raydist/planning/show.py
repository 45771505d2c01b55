"""A plan as text."""

from __future__ import annotations

from typing import Any

from raydist.plain_table import aligned, size


def text(plan: dict[str, Any]) -> str:
    """The plan for people, as `raydist plan` prints it."""
    parts = [
        [f"{plan['job']}: strategy {plan['strategy']}, precision {plan['precision']}"],
        ["", "batches", *aligned(_batches(plan)), *_epoch(plan)],
        ["", _memory_head(plan["memory"], bool(plan["pipeline"])), *aligned(_memory(plan["memory"]))],
        ["", "placement", *aligned(_placement(plan["placement"])), *_elastic(plan)],
        *([["", "pipeline, times measured here", *plan["pipeline"]["table"]]] if plan["pipeline"] else []),
        *([["", *(f"note: {note}" for note in plan["notes"])]] if plan["notes"] else []),
        *([["", *(f"problem: {problem}" for problem in plan["problems"])]] if plan["problems"] else []),
    ]
    return "\n".join(line for part in parts for line in part)


def _batches(plan: dict[str, Any]) -> list[list[object]]:
    who = "replicas" if plan["pipeline"] else "workers"
    rows: list[list[object]] = [[who, "rows each", "micro-batch", "per step", "short last batch", "global batch"]]
    for row in plan["batches"]:
        each = _range(row["smallest"], row["largest"])
        sign = "=" if row["even"] else "≤"
        whole = f"{plan['global_size']} {sign} {row['workers']} × {row['micro']} × {row['accumulation']}"
        tail = _range(min(row["tail"]), max(row["tail"])) + " each" if row["tail"] else "none"
        rows.append([row["workers"], each, row["micro"], row["accumulation"], tail, whole])
    return rows


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def _epoch(plan: dict[str, Any]) -> list[str]:
    epoch, total = plan["epoch"], plan["total_steps"]
    if epoch["steps"] is None:
        known = "steps per epoch: not known before the data is read"
    else:
        tail = f", the last with {epoch['tail_rows']} rows" if epoch["tail_rows"] else ""
        known = f"epoch: {epoch['rows']} rows, {epoch['steps']} steps{tail}"
    return [f"  {known}", *([f"  run: {total} steps"] if total is not None else [])]


def _memory_head(memory: dict[str, Any], pipeline: bool) -> str:
    known = memory["activations"] is not None
    of = "memory of the whole model" if pipeline else f"memory of each of {memory['workers']} workers"
    return of + (f", micro-batches of {memory['micro']} rows" if known else "")


def _memory(memory: dict[str, Any]) -> list[list[object]]:
    frozen = memory["parameters"] - memory["trainable"]
    count = f"{memory['parameters']:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    rows: list[list[object]] = [
        ["weights", size(memory["weights"]), count],
        ["buffers", size(memory["buffers"]), None],
        ["gradients", size(memory["gradients"]), None],
        ["reduction", size(memory["reduction"]), "buckets beside the gradients (gradient_as_bucket_view: false)"],
        ["gathered", size(memory["gathered"]), "whole units beside the shards (fsdp)"],
        ["average", size(memory["ema"]), "train.ema"],
    ]
    rows = [row for row in rows if row[1] != "0 B" or row[0] in ("weights", "gradients")]
    rows.append(["optimizer", _known(memory["optimizer"]), None])
    rows.append(["activations", _known(memory["activations"]), "at their peak, with temporaries"])
    rows.append(["in all", _known(memory["total"]), "at most; CUDA itself and fragmentation come on top"])
    return rows


def _known(count: int | None) -> str:
    return "not known" if count is None else size(count)


def _placement(placement: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for node in placement["nodes"]:
        gpus = f"{node['gpus']:g} × {node['gpu_type'] or 'GPU'}" if node["gpus"] else ""
        cpus = f"{node['cpus']:g} CPU" if node["cpus"] is not None else ""
        rows.append([node["name"], ", ".join(part for part in (gpus, cpus) if part), _ranks(node["ranks"])])
    return rows


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no worker"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"


def _elastic(plan: dict[str, Any]) -> list[str]:
    elastic = plan["elastic"]
    if elastic is None:
        return [f"  {plan['placement']['workers']} workers"]
    now = min(elastic["most"], elastic["fit"])
    return [f"  elastic: {elastic['least']} to {elastic['most']} workers, {now if now >= elastic['least'] else 'none'} here"]
