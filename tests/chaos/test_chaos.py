"""A few of the faults, each of another kind, end as promised; and the harness sees what is not as promised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.config import parse_config
from raydist.faults import VARIABLE
from raydist.runners.local import train_local
from tests.chaos.cases import CASES, Case, random_kills
from tests.chaos.promises import problems_of
from tests.chaos.runs import job, lines_of, state_of, unseen

REPOSITORY = Path(__file__).parents[2]
SUBSET = ("kill while it saves", "stop rank 1")
MORE = ("raylet, copies", "rollback")


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("names", [SUBSET, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_some_faults_and_random_kills_end_as_promised(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    command = [sys.executable, str(REPOSITORY / "jobs" / "chaos.py"), *names, "--random", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    number = len(names) + 1
    assert done.stdout.count("| yes |") == number and f"{number} of {number} as promised" in done.stdout
    assert "left behind: nothing" in done.stdout


def test_every_name_of_the_subset_is_one_fault() -> None:
    for name in SUBSET + MORE:
        assert sum(name.lower() in case.name.lower() for case in CASES) == 1, name


def test_random_kills_follow_from_the_seed_and_can_all_happen() -> None:
    assert random_kills(20, 1) == random_kills(20, 1) != random_kills(20, 2)
    assert all(1 <= fault["step"] <= 16 for fault in random_kills(200, 3).faults)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chaos job, trained by one process with nothing happening to it."""
    folder = tmp_path_factory.mktemp("chaos")
    train_local(parse_config(job(folder, "calm", {"scaling.workers": 1}), folder), screen=unseen())
    return folder / "calm"


CALM = Case("calm", [], "^finished$", lost=0)


def problems(run: Path, case: Case = CALM, change: Callable[[Any], None] | None = None) -> list[str]:
    expected = state_of(run), lines_of(run)
    if change is not None:
        change(expected)
    return problems_of(case, run, None, expected)


def test_a_calm_run_keeps_its_promises(run: Path) -> None:
    assert problems(run) == []


def test_the_harness_sees_other_weights_other_lines_and_missing_words(run: Path) -> None:
    def one_bit(expected: Any) -> None:
        expected[0].model["layers.0.weight"].view(-1).view(torch.int32)[3] ^= 1

    assert any("model layers.0.weight is off" in words for words in problems(run, change=one_bit))
    assert problems(run, change=lambda expected: expected[1].pop()) == ["metrics.jsonl differs from the undisturbed run's"]
    assert problems(run, replace(CALM, says="rank 1 died"))[0].startswith("nobody said 'rank 1 died'")
    assert problems(run, replace(CALM, ends=True)) == ["it should have failed; the summary says finished"]


def test_the_harness_sees_rows_that_were_left_out(run: Path) -> None:
    found = problems(run, replace(CALM, left_out=8))
    assert any(words.startswith("rows used not once an epoch") for words in found)
