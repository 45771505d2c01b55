"""README and docs: links lead somewhere, command lines and YAML are ones that raydist takes, the site builds."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import raydist
from raydist.__main__ import with_command
from raydist.cli import app
from raydist.config import JobConfig, json_schema, load_config, parse_config
from raydist.config_file import read_job_file
from raydist.config_help import HELP
from raydist.config_reference import markdown

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "jobs").glob("*.md")])
PLACEHOLDERS = {"job.yaml", "trabajo.yaml"}  # "your job file"
page_of = pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])


FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, *kinds: str) -> list[str]:
    return [textwrap.dedent(body) for kind, body in FENCED.findall((ROOT / page).read_text()) if kind in kinds]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs.yml's slugify give the headings."""
    titles = [title.strip().replace("`", "") for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# -- links -----------------------------------------------------------------------------------------------------------


@page_of
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    lost = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(ROOT / page))):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_anchors_are_made_as_on_github() -> None:
    assert {"a-job-file", "any-script-on-ray", "quick-start"} <= anchors(ROOT / "README.md")


# -- commands --------------------------------------------------------------------------------------------------------


def told(page: str) -> Iterator[str]:
    """The command lines of the page's blocks: all lines of a block, or those after `$ ` where a block has such."""
    for block in blocks(page, "", "bash", "sh", "console"):
        lines = re.sub(r"\\\n", " ", block).splitlines()
        typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
        yield from (
            line.strip() for line in typed if re.match(r"(raydist (?!\w*:)|make |python -m raydist|torchrun )", line.strip())
        )


def refusal(arguments: list[str]) -> str | None:
    """What raydist's own parser says against these arguments; nothing is run."""
    taken: dict[str, Any] = {}

    def record(**values: Any) -> None:
        taken.update(values)

    def disarm(command: Any) -> None:
        for inner in getattr(command, "commands", {}).values():
            disarm(inner)
        if not getattr(command, "commands", {}):
            command.callback = record

    parser: Any = typer.main.get_command(app)
    disarm(parser)
    try:
        parser.main(args=with_command(arguments), standalone_mode=False, prog_name="raydist")
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    if arguments[0] == "submit":
        return refusal(arguments[arguments.index(taken["command"][0]) :])
    if isinstance(job := taken.get("job"), Path):
        return job_refusal(job, taken.get("overrides") or [])
    return None


def job_refusal(job: Path, overrides: list[str]) -> str | None:
    if job.suffix == ".yaml" and job.parts[0] != "runs":  # a run's own files come with the run
        try:
            load_config(ROOT / ("jobs/digits.yaml" if str(job) in PLACEHOLDERS else job), overrides)
        except (raydist.ConfigError, OSError) as error:
            return str(error)
    return None


def wrong(line: str) -> str | None:
    """What is wrong with a command line of the docs. `[--option]` is one that may be left out, `…` stands for any more."""
    words = shlex.split(re.sub(r"\[(--[^\]]*)\]", r"\1", re.sub(r"\s#.*|\s>.*|…", "", line)))
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        lost = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no such target: {lost}" if lost else None
    if words[0] in ("python", "torchrun"):
        if "raydist" not in words:
            return None
        words = words[words.index("raydist") :]
    return refusal(words[1:])


@page_of
def test_command_lines_are_ones_that_raydist_takes(page: str) -> None:
    assert [(line, why) for line in told(page) if (why := wrong(line))] == []


def test_wrong_command_lines_are_found() -> None:
    for line in (
        "raydist trian job.yaml",
        "raydist train job.yaml --locl",
        "raydist train job.yaml train.epoch=3",
        "raydist train jobs/no_such.yaml",
        "raydist submit train job.yaml --nonsense",
        "torchrun --nproc_per_node=2 -m raydist jobs/no_such.yaml",
        "make trian",
    ):
        assert wrong(line), line
    assert len(list(told("README.md"))) > 15


@page_of
def test_commands_named_in_the_text_exist(page: str) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = prose(ROOT / page)
    assert [word for word in re.findall(r"`raydist ([a-z]\w*)", text) if word not in known] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [word for word in re.findall(r"`make ([a-z-]+)", text) if word not in targets] == []


# -- YAML and Python -------------------------------------------------------------------------------------------------


@page_of
def test_parts_of_job_files_are_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    digits = yaml.safe_load((ROOT / "jobs/digits.yaml").read_text())
    del digits["scaling"]
    for block in blocks(page, "yaml"):
        (tmp_path / "part.yaml").write_text(block)
        part, _ = read_job_file(tmp_path / "part.yaml")
        if not set(part) <= set(JobConfig.model_fields):
            continue  # not a job file's
        if any({"choice", "grid"} & set(value) for value in part.values() if isinstance(value, dict)):
            part = {"sweep": {"space": part}}
        parse_config(part if {"task", "data", "batch"} <= set(part) else {**digits, **part}, ROOT / "jobs")


@page_of
def test_python_is_python_and_its_names_of_raydist_exist(page: str) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
        assert [name for name in re.findall(r"\braydist\.([a-zA-Z_]\w*)\(", block) if name not in raydist.__all__] == []


def test_the_reference_of_the_job_file_is_in_step() -> None:
    page = (ROOT / "docs/job-file.md").read_text()
    assert page == markdown(), "make it anew: raydist schema --markdown > docs/job-file.md"
    for row in (
        r"\| `global_size` \|  \| an integer >= 1 \|",
        r"\| `async` \| `true` \|",
        r"\| `schedule` \| `\"1f1b\"` \| gpipe",
    ):
        assert re.search(row, page), row


def test_every_line_of_help_is_of_a_key_and_reaches_the_schema() -> None:
    schema = json_schema()
    sections = {"JobConfig": schema, **schema["$defs"]}
    for section, lines in HELP.items():
        for key, text in lines.items():
            assert sections[section]["properties"][key]["description"] == text


# -- the site --------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    page = (tmp_path / "sweeps.html").read_text()
    (link,) = set(re.findall(r'href="(repository/[^"]*digits_sweep\.yaml)"', page))
    assert (tmp_path / link).read_text() == (ROOT / "jobs/digits_sweep.yaml").read_text()
