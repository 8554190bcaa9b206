"""Pages for people: short sentences and cells, spelling, and a picture in each tutorial and how-to page."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")
MOST_WORDS = 30
MOST_IN_A_CELL = 35
# Pages that are made from code or rows, and decisions, which record what was thought at the time.
NOT_FOR_PEOPLE = ("reference", "decisions", "evidence", "code-map.md")
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.relative_to(ROOT / "docs").parts[0] not in NOT_FOR_PEOPLE),
]


def units(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists, headings and cells of tables, less code."""
    text = re.sub(r"^ *```.*?^ *```$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\||#|!!! |>)", text):
        if block.strip().startswith("|"):
            yield from block.strip().strip("| ").split(" | ")
        elif not block.lstrip("\n").startswith("    "):
            yield " ".join(block.split())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page."""
    for unit in units(text):
        unit = re.sub(r"\b(e\.g|i\.e|etc|vs|al)\.", r"\1", plain(unit))
        yield from re.split(r"(?<=[.!?])[)*\"”]*\s+", unit)


def plain(text: str) -> str:
    """Return a text in which a piece of code is one word, and the address of a link none."""
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^()\s]+\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def long_sentences(text: str) -> list[str]:
    """Return the sentences of over 30 words."""
    return [one for one in sentences(text) if words(one) > MOST_WORDS]


def long_cells(text: str) -> list[str]:
    """Return the cells of tables that have over 35 words, however many their sentences are."""
    rows = (plain(line).strip("| ") for line in text.splitlines() if line.startswith("|"))
    return [cell for row in rows for cell in row.split(" | ") if words(cell) > MOST_IN_A_CELL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_cells_for_people_are_short(page):
    found = long_sentences(page.read_text("utf-8"))
    assert not found, f"over {MOST_WORDS} words, divide:\n" + "\n".join(found)
    found = long_cells(page.read_text("utf-8"))
    assert not found, f"over {MOST_IN_A_CELL} words, shorten, or make another row:\n" + "\n".join(found)


def test_long_sentences_are_found_where_they_stand():
    long = " ".join(["word"] * 31)
    for text in (f"{long}.\n", f"- {long}\n- a\n", f"| a | {long} |\n", f"a b.\n{long[:80]}\n{long[80:]} (c)."):
        assert len(long_sentences(text)) == 1, text
    for text in (f"```\n{long}\n```\n", f"    {long}\n", f"`{long}`", f"[a](b) {long[5:]}".replace(" word", "", 1)):
        assert long_sentences(text) == [], text


def test_long_cells_are_found():
    short, long = " ".join(["word"] * 35), " ".join(["word"] * 20) + ". " + " ".join(["Word"] * 16)
    assert long_cells(f"| a | {long}. |\n| {short} | `{long}` |\n\n{long}\n") == [f"{long}."]


def test_words_are_spelled_as_a_list_of_misspellings_asks():
    files = [str(page) for page in (*PAGES, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))]
    files += [str(path) for path in (ROOT / "src" / "unfog").rglob("*.py")]
    command = [sys.executable, "-m", "codespell_lib", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_each_tutorial_and_how_to_page_has_a_picture():
    sections = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    listed = [page for section in sections for name in ("Tutorials", "How to") for page in section.get(name, [])]
    flat = [page for each in listed for page in ([each] if isinstance(each, str) else next(iter(each.values())))]
    assert len(flat) > 30
    assert [page for page in flat if "![" not in (ROOT / "docs" / page).read_text("utf-8")] == []
