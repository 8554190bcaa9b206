"""Build the site into src/unfog/site, from the pages of docs and the files of the project that belong to it.

Links to files that are not pages, such as modules, become addresses in the repository. As long as [project.urls] of
pyproject.toml names none, they become plain text, as the site is read without the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from addresses import addresses
from llms import llms_text, named_pages
from site_html import add_foot, keep_words_whole, mark_tables, open_pictures

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "src" / "unfog" / "site"
# Files outside of docs -> page.
OTHERS = {
    "README.md": "index.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/LEDGER.md": "project/ledger.md",
    "benchmarks/speedrun/README.md": "project/speedrun.md",
}
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
# A paragraph that begins with a system in bold, and the code below it.
_SYSTEM = re.compile(r"^\*\*(\w+)\.?\*\*(?: (\(\w+\))\.)? (.+(?:\n.+)*)\n\n((?: {4}.*\n)+)\n?", re.M)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def page_of(file: Path) -> str | None:
    """Return the page, below the folder of pages, that a file of the repository becomes; None if it becomes none."""
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
    if name.startswith("docs/"):
        return name.removeprefix("docs/") if file.is_file() else None
    return OTHERS.get(name)


def convert(text: str, file: Path) -> str:
    """Return the text of a page of the site, with links to other pages of it."""
    here = Path(page_of(file) or "").parent
    source = addresses().get("Source")

    def link(match: re.Match[str]) -> str:
        picture, shown, target = match.groups()
        path, hash, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        there = (file.parent / path).resolve()
        page = page_of(there)
        if page is None and source and not picture:
            return f"[{shown}]({source}/blob/HEAD/{there.relative_to(ROOT).as_posix()}{hash}{anchor})"
        if page is None:
            return "" if picture else shown if "`" in shown else f"{shown} (`{path.lstrip('./')}`)"
        return f"{picture}[{shown}]({os.path.relpath(page, here)}{hash}{anchor})"

    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(_FENCED.split(text)))


def systems_as_tabs(text: str) -> str:
    """Return a text in which the paragraphs of Windows, macOS and Linux, with the code of each, are tabs."""

    def tab(match: re.Match[str]) -> str:
        name, shell, words, code = match.groups()
        if name not in ("Windows", "macOS", "Linux"):
            return match[0]
        inside = f"{words}\n\n{code}".splitlines()
        title = f"{name} {shell}" if shell else name
        return f'=== "{title}"\n\n' + "".join(f"    {line}".rstrip() + "\n" for line in inside) + "\n"

    return _SYSTEM.sub(tab, text)


def indent_lists(text: str) -> str:
    """Return a text whose items of lists have their further lines at four columns, as Python-Markdown wants them.

    Pages have them where the text of the item begins, as elsewhere. An item after one of several paragraphs gets the
    empty line that it needs there.
    """
    lines: list[str] = []
    columns: list[int] = []  # where the text of the open items begins
    fence, shift, after_blank, paragraphs = "", 0, True, False
    for line in text.splitlines():
        bare = line.lstrip(" ")
        indent = len(line) - len(bare)
        if bare and not fence:
            item, inside = re.match(r"(?:[-*]|\d+\.) +", bare), bool(columns)
            # A line that only wraps its item stays in it, wherever it begins.
            while columns and indent < columns[-1] and (after_blank or item):
                columns.pop()
            shift = max(0, 4 * len(columns) - columns[-1]) if columns and indent >= columns[-1] else 0
            paragraphs = (paragraphs or (after_blank and not item)) and (bool(columns) or (inside and bool(item)))
            if item:
                lines += [""] * (paragraphs and not after_blank)
                columns.append(indent + len(item[0]))
        if bare.startswith("```"):
            fence = "" if fence else "```"
        lines.append(" " * shift + line if bare else line)
        after_blank = not bare
    return "\n".join(lines) + "\n"


def write_pages() -> dict[str, Path]:
    """Write all pages, and the pictures that they show; return the file of the repository that each is made of."""
    shutil.rmtree(PAGES, ignore_errors=True)
    files = [*(path for path in (ROOT / "docs").rglob("*") if path.is_file()), *(ROOT / name for name in OTHERS)]
    made_of = {page_of(file) or "": file for file in files}
    for name, file in made_of.items():
        page = PAGES / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            text = indent_lists(systems_as_tabs(convert(file.read_text(encoding="utf-8"), file)))
            page.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(file, page)
    return made_of


def finish(made_of: dict[str, Path]) -> None:
    """Finish the HTML of all pages, and put the Markdown of each where its links lead to that of others."""
    source = addresses().get("Source")
    for name, file in made_of.items():
        if file.suffix != ".md":
            continue
        path = SITE / re.sub(r"(^|/)(index|README)\.md$", r"\1index.html", name)
        path = path if path.suffix == ".html" else path.with_suffix("") / "index.html"
        here, shown = path.parent, f"<code>{file.relative_to(ROOT).as_posix()}</code>"
        if source:
            shown = f'<a href="{source}/blob/HEAD/{file.relative_to(ROOT).as_posix()}">{shown}</a>'
        page = open_pictures(mark_tables(keep_words_whole(path.read_text(encoding="utf-8"))), here)
        page = add_foot(page, os.path.relpath(SITE / name, here), os.path.relpath(SITE / "llms.txt", here), shown)
        path.write_text(page, encoding="utf-8")
        shutil.copyfile(PAGES / name, SITE / name)


def settings() -> dict[str, Any]:
    """Return the settings of the site, those of zensical.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return project


def not_in_navigation() -> list[str]:
    """Return the pages that zensical.toml leaves out."""
    named = set(named_pages(settings()["nav"]))
    return sorted({path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")} - named)


def main() -> int:
    """Build the site, and return the exit status: 1 for a dead link, or a page that the navigation leaves out."""
    made_of = write_pages()
    if left_out := not_in_navigation():
        print(f"zensical.toml has no place for {', '.join(left_out)}")
        return 1
    (PAGES / "llms.txt").write_text(llms_text(settings(), PAGES), encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT)
    if done.returncode == 0:
        finish(made_of)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
