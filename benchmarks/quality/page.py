"""The table of the contest and a grid of every cell, as Markdown: `python benchmarks/quality/page.py OUT >PAGE.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from contest import Cell
from score import cells

COLUMNS = "contestant, images, images/s, parameters, KID x 1000, FID, precision, recall, sampler, calls, ms a picture"
HEADER = f"| {COLUMNS.replace(', ', ' | ')} |\n{'|---' * (COLUMNS.count(',') + 1)}|"


def main(out: Path) -> None:
    """A section for each set and number of minutes."""
    scored = [cell for cell in cells(out) if cell.score.exists()]
    for name, minutes in sorted({(cell.set, cell.minutes) for cell in scored}):
        here = [cell for cell in scored if (cell.set, cell.minutes) == (name, minutes)]
        print(f"## {name}, {minutes:g} minutes' worth of images each\n\n{told(here[0])}\n\n{HEADER}")
        print("\n".join(map(row, here)) + "\n")
        for cell in here:
            print(f"{cell.contestant.name} (seed {cell.seed}): {cell.contestant.what}.\n")
            print(f"![{cell.contestant.name}](grids/{name}-{minutes:g}m-{cell.contestant.name}-{cell.seed}.png)\n")


def told(cell: Cell) -> str:
    """What the numbers are of."""
    one = load(cell)["measured"][0]
    return (
        f"{one['n']:,} pictures against {one['n_reference']:,} images of the set, {one['features']} features, "
        f"{one['resize']}; unconditional. Each was trained for images/s x minutes images, so the rates are those of "
        "the machine that rates.json was measured on. KID with its standard error; FID compares at this n alone."
    )


def load(cell: Cell) -> dict[str, Any]:
    """score.json."""
    found: dict[str, Any] = json.loads(cell.score.read_text())
    return found


def row(cell: Cell) -> str:
    """One line of the table."""
    found = load(cell)
    trained, drawn = found["trained"], found["drawn"]
    measured = {one["metric"]: one for one in found["measured"]}
    fid = measured.get("fid", measured.get("fd"))
    columns = [
        f"{cell.contestant.name} ({cell.seed})",
        f"{trained['images']:,}",
        f"{trained['rate']:.0f}",
        f"{drawn['parameters'] / 1e6:.2f}M",
        f"{1000 * measured['kid']['value']:.2f} ± {1000 * measured['kid']['error']:.2f}",
        "refused" if fid is None or fid["value"] is None else f"{fid['value']:.1f}",
        *(f"{measured[name]['value']:.2f}" for name in ("precision", "recall")),
        drawn["sampler"],
        f"{drawn['calls']:.0f}",
        f"{1000 * drawn['seconds'] / drawn['n']:.0f}",
    ]
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
