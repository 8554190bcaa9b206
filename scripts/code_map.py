"""Write docs/code-map.md, the map of the code, from the tree and the first line of each module.

`python scripts/code_map.py --check` writes nothing and exits with 1 if the map is out of date; the tests call it so.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "unfog"
PAGE = ROOT / "docs" / "code-map.md"
HEAD = """\
# Map of the code

Every folder and module of the package with the first line of its docstring, from the command line down to the folders
that all others may import. `python scripts/code_map.py` writes this page; a test checks that it is current.

"""
# From the command line down. Folders that all others may import are not named here, and come last.
ORDER = (
    *("", "cli", "serve", "commands", "runs", "checks", "inference", "planning", "pipeline", "process", "config"),
    *("training", "export", "data", "diffusion", "models", "evaluation", "reporting"),
)


def first_sentence(module: Path) -> str:
    """Return the first line of a module's docstring, without the full stop."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def rank(folder: Path) -> tuple[int, str]:
    """Return the place of a folder on the map."""
    parts = folder.relative_to(SOURCE).parts
    layer = parts[0] if parts else ""
    return (ORDER.index(layer) if layer in ORDER else len(ORDER), "/".join(parts))


def draw() -> str:
    """Return the map as Markdown: a heading for each folder, a line for each module."""
    lines = []
    for folder in sorted({module.parent for module in SOURCE.rglob("*.py")}, key=rank):
        name = "/".join(("unfog", *folder.relative_to(SOURCE).parts))
        lines += [f"## `{name}/`", "", f"{first_sentence(folder / '__init__.py')}.", ""]
        modules = sorted(m for m in folder.glob("*.py") if not m.name.startswith("__"))
        lines += [f"- `{module.stem}`: {first_sentence(module)}" for module in modules]
        lines += [""] if modules else []
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write or check the map."""
    current = HEAD + draw()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == current:
        return 0
    if "--check" in sys.argv:
        print("docs/code-map.md is out of date; run: python scripts/code_map.py")
        return 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
