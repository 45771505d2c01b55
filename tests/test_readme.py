"""The README's job file is a valid one."""

from __future__ import annotations

import re
from pathlib import Path

from raydist.config import load_config

README = Path(__file__).parents[1] / "README.md"


def test_the_job_file_in_the_readme_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 1
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        load_config(path)


def test_links_in_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
