"""The site's llms.txt: each page of the navigation with its address and its first sentence, for programs that read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^()\s]+\)")
_NOT_PROSE = re.compile(r"#|\||!\[|<|```|=== |    |[-*] |\d+\. ")


def llms_text(project: dict[str, Any], pages: Path) -> str:
    """Return the text of llms.txt (llmstxt.org), for `project` of zensical.toml and the folder of its `pages`."""
    root = str(project.get("site_url", "")).rstrip("/")
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    for section in project["nav"]:
        for name, entries in section.items():
            lines += ["", f"## {name}", ""]
            lines += [_line(page, pages, f"{root}/" if root else "") for page in named_pages(entries)]
    return "\n".join(lines) + "\n"


def named_pages(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of a navigation, in its order."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from named_pages(each)


def _line(page: str, pages: Path, root: str) -> str:
    text = (pages / page).read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, re.M)
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n") if not _NOT_PROSE.match(part.lstrip("\n")))
    first = re.split(r"(?<=[.!?]) ", _LINK.sub(r"\1", next(paragraphs, "")))[0].rstrip(":")
    folder = re.sub(r"(^|/)(index|README)\.md$", r"\1", page).removesuffix(".md")
    address = root + (f"{folder.rstrip('/')}/" if folder else "")
    return f"- [{title[1] if title else page}]({address or './'})" + f": {first}" * bool(first)
