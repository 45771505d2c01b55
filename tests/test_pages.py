"""What test_docs.py cannot tell of the pages for newcomers: the example trains, keys of the table exist, messages are real."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import torch
import yaml

import raydist
from raydist.config import load_config, parse_config
from raydist.task import Task
from tests.config_jobs import data_of
from tests.test_docs import ROOT, blocks

TUTORIAL = "docs/from-a-tutorial-script.md"
TROUBLE = "docs/troubleshooting.md"


def test_the_tutorials_task_and_data_set_train_together() -> None:
    found: dict[str, Any] = {}
    for block in blocks(TUTORIAL, "python"):
        if {"Digits", "DigitsTask"} & {node.name for node in ast.parse(block).body if isinstance(node, ast.ClassDef)}:
            exec(compile(block, TUTORIAL, "exec"), found)
    task, train, held_out = found["DigitsTask"](), found["Digits"]("train"), found["Digits"]("eval")
    assert isinstance(task, Task)
    assert len(train) + len(held_out) == 1797  # scikit-learn's digits
    batch = (torch.stack([train[row][0] for row in range(8)]), torch.stack([train[row][1] for row in range(8)]))
    loss = task.loss(task.build_model(), batch)
    assert loss.shape == ()
    assert loss.requires_grad


def test_every_section_of_the_tutorial_goes_with_its_first_job() -> None:
    job, *parts = [yaml.safe_load(block) for block in blocks(TUTORIAL, "yaml")]
    assert len(parts) >= 12
    for part in parts:
        parse_config({**job, **part}, "/base")


def test_keys_of_the_tutorials_table_exist() -> None:
    table = (ROOT / TUTORIAL).read_text().split("## 1.")[0]
    rows = re.findall(r"^\| .+ \| (.+) \|$", table, re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([a-z_.]+: [^`]+)`", row)]
    assert len(keys) >= 25
    data = {**data_of(), "data": {"train": {"target": "my.data:Set"}, "eval": {"target": "my.data:Set"}}}
    for text in keys:
        key, _, value = text.partition(": ")
        if "…" not in value:
            parse_config(data, "/base", [f"{key}={value}"])


def words_in_the_code() -> list[str]:
    """Every text literal of raydist, with NUL where an f-string has a value."""
    found = []
    for path in Path(raydist.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message: str, texts: list[str]) -> bool:
    """Whether one text has the message's words in their order, with something of the text for each `…`."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    parts = re.findall(r"^## raydist: .*?(?=^## )", (ROOT / TROUBLE).read_text(), re.DOTALL | re.MULTILINE)
    quoted = [row for part in parts for row in re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)]
    texts = words_in_the_code()
    assert len(quoted) >= 45
    assert not is_said("no such words … anywhere", texts)
    assert [message for message in quoted if not is_said(message, texts)] == []


def commands(page: str) -> set[str]:
    """The command lines of a page, without their comments."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return {re.sub(r"\s+#.*", "", line).strip() for line in lines}


def test_spanish_commands_are_those_of_the_english_pages() -> None:
    docs = [f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if not page.name.endswith(".es.md")]
    known = set().union(*map(commands, ["README.md", *docs]))
    for page in ("README.es.md", "docs/quickstart.es.md"):
        assert len(commands(page)) >= 8
        assert commands(page) - known == set()


def test_the_spanish_job_file_is_the_english_one(tmp_path: Path) -> None:
    loaded = []
    for name in ("README.md", "README.es.md"):
        (tmp_path / "job.yaml").write_text(blocks(name, "yaml")[0])
        loaded.append(load_config(tmp_path / "job.yaml"))
    assert loaded[0] == loaded[1]


def test_spanish_exit_codes_are_the_english_ones() -> None:
    pages = ((ROOT / name).read_text() for name in ("README.md", "README.es.md"))
    english, spanish = (re.findall(r"^\| (\d+) \|", page, re.MULTILINE) for page in pages)
    assert len(english) >= 5
    assert spanish == english
