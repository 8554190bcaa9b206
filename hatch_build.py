"""Description of the package on an index: the README, with links that work away from the repository.

`[project.urls]` of pyproject.toml says where the project lives. With its `Source`, links become addresses of the files
of the released version; as long as it names none, they are plain text, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)]*)\)")
_CAPTION = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n\*[^*]*\*\n\n")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://)([^)]*)\)")
# Readers of the index install from it, not from a checkout.
_FROM_CHECKOUT = re.compile(r" Unfog is not on PyPI yet: [^\n]+")


def description(readme: str, source: str | None, version: str) -> str:
    """Return the README for an index of packages. `source` is the address of the repository, if it is known."""
    text = _FROM_CHECKOUT.sub("", readme).replace('pip install ".[all]"', 'pip install "unfog[all]"')
    if not source:
        return _LINK.sub(r"\1", _CAPTION.sub("", text))
    text = _PICTURE.sub(rf"![\1]({source}/raw/v{version}/\2)", text)

    def absolute(link: re.Match[str]) -> str:
        shown, target = link.groups()
        return link[0] if target.startswith("#") else f"[{shown}]({source}/blob/v{version}/{target})"

    return _LINK.sub(absolute, text)


class Description(MetadataHookInterface):
    """Hook that hatchling calls as it builds the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source")
        readme = (Path(self.root) / "README.md").read_text("utf-8")
        text = description(readme, source and source.rstrip("/"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
