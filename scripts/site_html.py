"""What the generator of the site leaves to do in its HTML: tables for phones, pictures, and a foot of each page."""

from __future__ import annotations

import html
import re
from pathlib import Path

from PIL import Image

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_CELL = re.compile(r"<(t[hd])\b([^>]*)>(.*?)</\1>", re.S)
_TAG = re.compile(r"<[^>]+>")
_LONG_WORD = 40  # characters of code in a table, from which on it is broken on wide screens too
_LONG_COLUMN = 24  # characters of a cell on average, from which on a column is kept wide
# Characters of a row on average, of so many columns, from which on a phone shows its cells below each other.
_LONG_ROW = {2: 150, 3: 60}


def keep_words_whole(page: str) -> str:
    """Return the HTML of a page whose code in tables is broken at spaces, not within words.

    Where site.css has it so, for a phone, words are broken behind dots and the like too. Very long ones always are.
    """

    def word(text: str) -> str:
        if len(text) <= _LONG_WORD:
            return "<span>" + re.sub(r"(?<=[a-z_][.(/:=])(?=\w)", "<wbr>", text) + "</span>"
        return '<span class="long">' + re.sub(r"(?<=[\w):][./:=_])(?!py\b)(?=\w)", "<wbr>", text) + "</span>"

    def words(code: re.Match[str]) -> str:
        return "<code>" + " ".join(word(part) for part in code[1].split(" ")) + "</code>"

    return re.sub(r"<td.*?</td>", lambda cell: re.sub(r"<code>([^<]*)</code>", words, cell[0]), page, flags=re.S)


def mark_tables(page: str) -> str:
    """Return the HTML of a page whose cells name their column, and whose tables say whether a phone stacks their cells.

    site.css shows the cells of a stacked table below each other, each behind the name of its column.
    """
    return _TABLE.sub(lambda table: _mark_table(table[0]), page)


def _mark_table(table: str) -> str:
    rows = [_CELL.findall(row) for row in re.findall(r"<tr>.*?</tr>", table, re.S)]
    names = [_text(cell[2]) for cell in rows[0]]
    body = [[len(_text(cell[2])) for cell in row] for row in rows[1:]]
    if not body or len(names) < 2 or any(len(row) != len(names) for row in body):
        return table
    means = [sum(column) / len(body) for column in zip(*body, strict=True)]
    stacked = sum(means) > _LONG_ROW[min(len(names), 3)]

    def cells(row: re.Match[str]) -> str:
        column = iter(range(len(names)))

        def cell(match: re.Match[str]) -> str:
            at = next(column)
            long = " data-long" if means[at] > _LONG_COLUMN and len(names) > 2 else ""
            # Without its display as a table, a browser would not tell a screen reader that it is one.
            name = f' role="cell" data-label="{html.escape(names[at])}"' if stacked else ""
            return f"<td{match[2]}{long}{name}>{match[3]}</td>" if match[1] == "td" else match[0]

        whole = _CELL.sub(cell, row[0])
        return whole.replace("<tr>", '<tr role="row">', 1) if stacked else whole

    # A head without words is none to a screen reader.
    marked = re.sub(r"<tr>.*?</tr>", cells, table, flags=re.S).replace("<th></th>", "<td></td>")
    return marked.replace("<table>", '<table role="table" data-stacked>', 1) if stacked else marked


def _text(cell: str) -> str:
    return html.unescape(_TAG.sub("", cell)).strip()


# Not within a link, as `[![alt](picture.png)](page.md)` is; and an alt text may have a ">" in it.
_OWN_PICTURE = re.compile(r'<img (?:[^>"]|"[^"]*")*?src="([^":]+\.(?:png|webp|svg))"(?:[^>"]|"[^"]*")*>(?!\s*</a>)')


def open_pictures(page: str, folder: Path) -> str:
    """Return the HTML of a page in `folder` whose pictures lead to their files, where a phone can enlarge them.

    Moving pictures stand still for those who ask for less motion. The still, the last frame, is written beside them.
    """

    def picture(match: re.Match[str]) -> str:
        name, shown = match[1], match[0].replace("<img ", '<img loading="lazy" ', 1)
        if still := _write_still(folder / name):
            beside = name.removesuffix(Path(name).name) + still.name
            # At the top of a page, so not lazy.
            shown = f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{beside}">{match[0]}</picture>'
        return f'<a href="{name}">{shown}</a>'

    before, start, article = page.partition("<article")
    return before + start + re.sub(_OWN_PICTURE, picture, article)


def _write_still(path: Path) -> Path | None:
    """Write the last frame of a moving picture beside it, and return its path; None of another picture."""
    if path.suffix != ".webp":
        return None
    beside = path.with_name(f"{path.stem}-still.webp")
    with Image.open(path) as moving:
        frames = getattr(moving, "n_frames", 1)
        if frames == 1:
            return None
        moving.seek(frames - 1)
        moving.convert("RGB").save(beside, quality=85, method=6)
    return beside


def add_foot(page: str, markdown: str, index: str, source: str) -> str:
    """Return the HTML of a page whose foot links to its Markdown and to llms.txt, and names the file it is made of.

    `markdown` and `index` are addresses relative to the page; `source` is HTML.
    """
    alternate = f'<link rel="alternate" type="text/markdown" href="{markdown}">'
    foot = (
        f'<p class="foot"><a href="{markdown}">This page as Markdown</a> · '
        f'<a href="{index}">all pages for programs</a> · made from {source}</p>\n'
    )
    page = page.replace("</head>", f"{alternate}\n</head>", 1)
    return page.replace("</article>", f"{foot}</article>", 1)
