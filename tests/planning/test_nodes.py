"""Shapes of nodes, and workers on them."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.config import JobConfig, parse_config
from raydist.errors import ConfigError
from raydist.planning.nodes import Node, parse_nodes, place
from tests.support import lin_job


def job(**changes: Any) -> JobConfig:
    return parse_config(lin_job([1.0], 1, **changes), "/base")


def test_a_shape_gives_that_many_nodes_with_their_memory() -> None:
    nodes = parse_nodes(["2x8xA100-80G+96cpu, 1x4xMYGPU:48", "3x16cpu"])
    assert [(n.name, n.gpus, n.cpus, n.gpu_type) for n in nodes] == [
        ("node 0", 8, 96, "A100-80G"),
        ("node 1", 8, 96, "A100-80G"),
        ("node 2", 4, None, "MYGPU"),
        *((f"node {at}", 0, 16, None) for at in (3, 4, 5)),
    ]
    assert [n.gpu_bytes for n in nodes] == [80 * 10**9] * 2 + [48 * 2**30] + [None] * 3


@pytest.mark.parametrize("shape", ["", "8", "2x", "0x8", "2x8x", "2x8xA100:", "axb", "2x8xA100+cpu", "-1x2"])
def test_what_is_no_shape_is_refused_with_examples(shape: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes '.*' is no shape: .*such as 2x8xA100"):
        parse_nodes([shape])


@pytest.mark.parametrize(
    ("shapes", "changes", "ranks"),
    [
        (["2x8xA100"], {"workers": 16}, [list(range(8)), list(range(8, 16))]),
        (["2x8xA100"], {"workers": 3}, [[0, 1, 2], []]),
        (["2x8xA100"], {"workers": [2, 64]}, [list(range(8)), list(range(8, 16))]),
        (["1x1xA100,1x4xA100"], {"workers": 5}, [[4], [0, 1, 2, 3]]),
        (["2x2xA100"], {"workers": 2, "gpus_per_worker": 2}, [[0], [1]]),
        (["1x1xA100"], {"workers": 4, "gpus_per_worker": 0.25}, [[0, 1, 2, 3]]),
        (["1x8xA100+4cpu"], {"workers": [1, 8], "cpus_per_worker": 2}, [[0, 1]]),
        (["2x4cpu"], {"workers": 5}, [[0, 1, 2, 3], [4]]),
    ],
)
def test_workers_fill_nodes_one_after_the_other(shapes: list[str], changes: dict[str, Any], ranks: list[list[int]]) -> None:
    placed = place(job(scaling=changes), parse_nodes(shapes))
    assert (placed.ranks, placed.problem) == (ranks, None)


@pytest.mark.parametrize(
    ("shapes", "changes"),
    [
        (["2x8xA100"], {"workers": 17}),
        (["2x1cpu"], {"workers": 3}),
        (["2x4cpu"], {"workers": 1, "gpus_per_worker": 1}),
        (["2x3xA100"], {"workers": 3, "gpus_per_worker": 2}),  # six GPUs, but no node has room for two workers
        (["2x4cpu"], {"workers": 1, "resources": {"slot": 1}}),
    ],
)
def test_too_few_nodes_are_a_problem(shapes: list[str], changes: dict[str, Any]) -> None:
    placed = place(job(scaling=changes), parse_nodes(shapes))
    assert placed.workers == 0 and placed.problem is not None
    assert f"at least {changes['workers']} workers are asked for and {placed.fits} fit" in placed.problem


def test_what_is_there_is_named() -> None:
    words = {shape: place(job(scaling={"workers": 99}), parse_nodes([shape])).problem or "" for shape in ("1x2cpu", "2x8xA100")}
    assert "there are 0 GPUs and 2 CPUs on 1 node)" in words["1x2cpu"]
    assert "there are 16 GPUs on 2 nodes)" in words["2x8xA100"]


def test_resources_of_one_s_own_limit_too() -> None:
    nodes = [Node("a", cpus=8, resources={"slot": 2}), Node("b", cpus=8)]
    assert place(job(scaling={"workers": [1, 9], "resources": {"slot": 1}}), nodes).ranks == [[0, 1], []]


def test_unused_gpus_are_told() -> None:
    placed = place(job(scaling={"workers": 1, "backend": "gloo"}), parse_nodes(["1x8xA100+8cpu"]))
    assert placed.gpus_per_worker == 0 and "the job uses none" in placed.notes[0]
