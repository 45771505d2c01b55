"""What importing raydist costs, and which rooms may know of Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raydist
from raydist.__main__ import with_command

PACKAGE = Path(raydist.__file__).parent
RAY_ROOMS = ("runners/", "data/ray_data.py", "sweep/", "pipeline/", "doctor/")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_does_not_import_ray() -> None:
    run_python("import raydist.loop, sys; assert 'ray' not in sys.modules")


def test_import_is_quick() -> None:
    code = "import time; start = time.perf_counter(); import raydist; print(time.perf_counter() - start)"
    assert min(float(run_python(code)) for _ in range(5)) < 0.2


@pytest.mark.parametrize("module", ["raydist", "raydist.config", "raydist.cli"])
def test_reading_a_job_file_needs_no_torch(module: str) -> None:
    run_python(f"import {module}, sys; assert not {{'torch', 'ray'}} & set(sys.modules)")


def test_public_names_are_there_and_documented() -> None:
    for name in raydist.__all__:
        assert getattr(raydist, name).__doc__, name
    assert set(raydist.__all__) <= set(dir(raydist))


def test_an_unknown_public_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; its public names are: .*JobConfig.*load_config"):
        _ = raydist.nothing


def test_ray_is_imported_in_the_runner_rooms_only() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).as_posix()
        if not room.startswith(RAY_ROOMS):
            found += [f"{room}:{line}" for line in ray_imports(path.read_text())]
    assert found == []


def test_the_scan_sees_every_way_to_import_ray() -> None:
    ways = [
        "import ray",
        "import ray.train as t",
        "from ray import train",
        "from ray.data import x",
        "import os, ray",
        "def f():\n    import ray",
    ]
    assert [len(ray_imports(way)) for way in ways] == [1] * len(ways)
    assert ray_imports("import raydist\nfrom raydist.loop import fit\nfrom . import ray\n'import ray'\n") == []


def ray_imports(source: str) -> list[int]:
    """Lines that import ray or a part of it."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == "ray" for name in names):
            lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["job.yaml"], ["train", "job.yaml"]),
        (["jobs/digits.yml", "seed=1"], ["train", "jobs/digits.yml", "seed=1"]),
        (["train", "job.yaml"], ["train", "job.yaml"]),
        (["schema"], ["schema"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_a_job_file_alone_means_train(given: list[str], meant: list[str]) -> None:
    assert with_command(given) == meant
