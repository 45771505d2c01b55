"""A hook of mkdocs: files outside docs/ that a page links to (`../jobs/digits.yaml`) come along in the site's repository/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"\]\(\.\./([^)#\s]+)")


def _place(link: str) -> str:
    """Where the site has it; Markdown comes as text, for its own links are the repository's."""
    return f"repository/{link}.txt" if link.endswith(".md") else f"repository/{link}"


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to. A folder is not added, so that mkdocs warns of the link."""
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            if (root / link).is_file() and files.get_file_from_path(_place(link)) is None:
                files.append(File.generated(config, _place(link), abs_src_path=str(root / link)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point the links there."""
    return LINK.sub(lambda found: f"]({_place(found[1])}", markdown)
