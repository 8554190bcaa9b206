"""Write the pages and charts of docs/evidence from the rows of the ledger, benchmarks/ledger/*.toml.

    python scripts/ledger.py            # write the pages that are out of date
    python scripts/ledger.py --check    # write nothing; exit with 1 if a row, a page or a link is wrong

A link of README or docs to a figure, such as `[0.031](evidence/quality.md#ID.NAME)`, has to have its value. A decimal
of a metric has to be in such a link.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ledger_charts import bar_chart
from ledger_rows import ROOT, TOPICS, Figure, LedgerError, Measurement, charts, differs, figures, links, machines, read

FOLDER = ROOT / "docs" / "evidence"
METRIC = re.compile(r"±|\b(?:KID|FID|FD|Fréchet|PSNR)\b")
MADE = (
    "*`python scripts/ledger.py` writes this page from the rows of the [ledger](../../benchmarks/LEDGER.md); "
    "a test checks that it is current.*"
)


def pages(rows: dict[str, Measurement]) -> dict[str, str]:
    """Return the text of each file of docs/evidence by its name."""
    made = {"README.md": index(rows), "benchmarks.md": benchmarks(rows), "records.md": records(rows)}
    for topic in TOPICS:
        made[f"{topic}.md"] = topic_page(topic, rows)
    found = figures(rows)
    for name, chart in charts().items():
        if missing := [one for one, _ in chart["bars"] if one not in found]:
            raise LedgerError(f"charts.toml, {name}: {', '.join(missing)} is not a figure of the ledger")
        bars = [(label, found[one]) for one, label in chart["bars"]]
        made[f"charts/{name}.svg"] = bar_chart(chart["title"], bars, log=chart.get("log", False))
    return made


def index(rows: dict[str, Measurement]) -> str:
    """Return the first page: what the ledger is, its pages and its machines."""
    lines = [
        "# Evidence",
        "",
        f"The ledger holds {len(rows)} measurements with {len(figures(rows))} figures, failures included. "
        "Each has an id, a date, a machine, a commit and a command. Figures in these pages link to their rows, and a "
        "test compares the two.",
        "",
        MADE,
        "",
        "- [Benchmarks](benchmarks.md): charts",
        "- [Records](records.md): the best values so far, and how they came about",
        *(
            f"- [{title}]({topic}.md): {text} {sum(row.topic == topic for row in rows.values())} measurements"
            for topic, (title, text) in TOPICS.items()
        ),
        "",
        "Compare ratios within a row only: the machines are shared and drift by 15%. The commit of a row is the one "
        "that recorded it. The program is that of the commit, or of an earlier one of the same day.",
        "",
        "## Machines",
        "",
        *table(("machine", ""), machines().items()),
    ]
    return page(lines)


def benchmarks(rows: dict[str, Measurement]) -> str:
    """Return the page of charts, each with the rows that it is drawn from."""
    lines = ["# Benchmarks", "", "Charts of the main figures. Each bar is a row of the ledger.", "", MADE, ""]
    found = figures(rows)
    for name, chart in charts().items():
        measured = dict.fromkeys(one.partition(".")[0] for one, _ in chart["bars"])
        lines += [f"## {chart['title'].partition(':')[0]}", "", f"![{chart['title']}](charts/{name}.svg)", ""]
        lines += [relative(chart["note"]), ""]
        bars = [(label, link(found[one], rows), rows[one.partition(".")[0]]) for one, label in chart["bars"]]
        cells = ((label, value, f"{row.date}, {row.machine}") for label, value, row in bars)
        lines += [*table(("", "value", "date, machine"), cells)]
        commands = dict.fromkeys(rows[one].command for one in measured)
        lines += ["Measured by:", "", *(f"- {relative(command)}" for command in commands), ""]
    return page(lines)


def records(rows: dict[str, Measurement]) -> str:
    """Return the page of records: for each task the figures that were the best of their day."""
    lines = [
        "# Records",
        "",
        "The best values of a task so far, newest last. To make a record yourself, follow the rules of the "
        "[speedrun](../../benchmarks/speedrun/README.md).",
        "",
        MADE,
        "",
    ]
    named = [figure for figure in figures(rows).values() if figure.record]
    for task in dict.fromkeys(figure.record for figure in named):
        best = sorted((one for one in named if one.record == task), key=lambda one: rows[one.id.partition(".")[0]].date)
        lines += [f"## {task}", ""]
        cells = ((str(rows[one.id.partition(".")[0]].date), one.what, link(one, rows)) for one in best)
        lines += table(("date", "", "value"), cells)
    return page(lines)


def topic_page(topic: str, ledger: dict[str, Measurement]) -> str:
    """Return the page of a topic: its figures, then all measurements, newest first."""
    title, text = TOPICS[topic]
    rows = [row for row in ledger.values() if row.topic == topic]
    lines = [f"# {title}", "", text, "", MADE, ""]
    named = [(row, figure) for row in rows for figure in row.figures]
    if named:
        lines += ["## Figures", ""]
        cells = (
            (
                f'<a id="{figure.id}"></a>{figure.what}',
                f"**{value(figure)}**",
                f"{figure.n:,}" if figure.n else "",
                f"[{row.date}, {row.machine}](#{row.id})",
            )
            for row, figure in named
        )
        lines += table(("", "value", "n", "measurement"), cells)
    lines += ["## Measurements", ""]
    for row in sorted(rows, key=lambda row: row.date, reverse=True):
        lines += [
            f'<a id="{row.id}"></a>**{row.id}** · machine {", ".join(filter(None, (row.machine, row.state)))}'
            + (f" · commit {row.commit}" if row.commit else "")
            + (f" · continues [{row.after}]({ledger[row.after].topic}.md#{row.after})" if row.after else ""),
            "",
            f"- Command: {relative(row.command)}",
            f"- Result: {relative(row.note)}",
            "",
        ]
    return page(lines)


def link(figure: Figure, rows: dict[str, Measurement]) -> str:
    """Return a value that links to its row."""
    return f"[{value(figure)}]({rows[figure.id.partition('.')[0]].topic}.md#{figure.id})"


def value(figure: Figure) -> str:
    """Return a figure as text: the value or the range, its error or interval, and the unit."""
    text = (" to " if len(figure.values) == 2 else ", ").join(map(number, figure.values))
    if figure.error is not None:
        text += f" ± {number(figure.error)}"
    if figure.low is not None and figure.high is not None:
        text += f" ({number(figure.low)} to {number(figure.high)})"
    return text + figure.suffix


def number(one: float) -> str:
    """Return a number with commas and without an exponent if it is of usual size."""
    return f"{one:,}" if one == 0 or abs(one) >= 1e-4 else f"{one:g}"


def relative(text: str) -> str:
    """Return a text of the ledger with links from docs/evidence instead of from the root of the repository."""
    return re.sub(
        r"\]\((?!https?:|#)([^)#]+)",
        lambda match: f"]({os.path.relpath(ROOT / match[1], FOLDER)}".replace(os.sep, "/"),
        text,
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table and an empty one."""
    body = ("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) + " |" for row in rows)
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""]


def page(lines: Iterable[str]) -> str:
    """Return the text of a page."""
    return "\n".join(lines).rstrip() + "\n"


def prose() -> Iterator[Path]:
    """Yield the pages whose figures may link to rows."""
    yield from (ROOT / "README.md", ROOT / "CHANGELOG.md")
    yield from sorted(path for path in (ROOT / "docs").rglob("*.md") if not path.is_relative_to(FOLDER))
    yield from sorted((ROOT / "benchmarks").rglob("*.md"))


def guides() -> Iterator[Path]:
    """Yield the pages for people: README and docs, without the evidence, the decisions and the reference."""
    apart = [FOLDER, *(ROOT / "docs" / name for name in ("decisions", "reference"))]
    yield ROOT / "README.md"
    yield from sorted(p for p in (ROOT / "docs").rglob("*.md") if not any(map(p.is_relative_to, apart)))


def wrong_links(rows: dict[str, Measurement], files: Iterable[Path]) -> list[str]:
    """Return what is wrong with links to rows: an unknown id, another page, or a value that is not that of the row."""
    found, wrong = figures(rows), []
    for file in files:
        for text, topic, name in links(file.read_text(encoding="utf-8")):
            row = rows.get(name.partition(".")[0])
            where = f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name}: "
            if row is None or ("." in name and name not in found):
                wrong.append(f"{where}{name} is not in the ledger")
            elif row.topic != topic:
                wrong.append(f"{where}{name} is on {row.topic}.md, not on {topic}.md")
            elif "." in name and (problem := differs(text, found[name])):
                wrong.append(where + problem)
    return wrong


def unlinked(files: Iterable[Path]) -> list[str]:
    """Return the sentences and rows of tables that give a decimal of a metric without a link to a row of the ledger.

    Figures of others are said to be of the literature, or published.
    """
    wrong = []
    for file in files:
        text = re.sub(r"(?ms)^ *```.*?^ *```|^    .*?$", "", file.read_text(encoding="utf-8"))
        for block in re.split(r"\n\s*\n", text):
            parts = block.split("\n") if block.startswith("|") else re.split(r"(?<=[.:;]) ", " ".join(block.split()))
            for part in parts:
                plain = re.sub(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)|`[^`]*`", "", part)
                others = re.search("literature|published", part)
                if METRIC.search(plain) and re.search(r"(?<![\w.])\d+\.\d", plain) and not others:
                    wrong.append(f"{file.name}: {part[:100]!r} gives a figure of a metric; link it to its row")
    return wrong


def main() -> int:
    """Write or check the pages, and check the links of prose; return the exit status."""
    try:
        rows = read()
        made = pages(rows)
    except LedgerError as error:
        print(error)
        return 1
    check, stale = "--check" in sys.argv, []
    for name, text in made.items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    left = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*")} - set(made)
    for name in left if not check else ():
        (FOLDER / name).unlink()
    wrong = wrong_links(rows, prose()) + unlinked(guides())
    if check and (stale or left):
        wrong.append(f"docs/evidence/{', '.join([*stale, *left])} out of date; run: python scripts/ledger.py")
    print("\n".join(wrong) or f"{len(rows)} measurements, {len(figures(rows))} figures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
