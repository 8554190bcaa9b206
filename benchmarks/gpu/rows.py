"""Results of the benchmark: rows, and the table, JSON, picture and ledger row that are made of them. Needs no Unfog."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STATES = ("ok", "failed", "skipped")


@dataclass(frozen=True)
class Row:
    """One result: what was measured in which part, in words, with its figures."""

    part: str
    name: str
    said: str
    """The result as a person reads it; of what failed, the error; of what was skipped, the reason."""
    state: str = "ok"
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state = {self.state!r} is not one of {', '.join(STATES)}")

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, file: Path) -> list[Row]:
        """Return the rows of a file of JSON lines; a last line that was cut off does not count."""
        found = []
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                found.append(cls(**json.loads(line)))
            except (ValueError, TypeError):
                break
        return found


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of a Markdown table, those of one part together."""
    lines = ["| part | what | result |", "|---|---|---|"]
    for row in rows:
        mark = "" if row.state == "ok" else f"**{row.state}**: "
        lines.append("| " + " | ".join(_cell(text) for text in (row.part, row.name, mark + row.said)) + " |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def mfu(flops_per_image: float, images_per_second: float, peak: float) -> float:
    """Return the model FLOPs utilisation: FLOP/s that the network needs, over FLOP/s that the device has.

    Recomputed and wasted operations do not count, so it compares programs.
    """
    return flops_per_image * images_per_second / peak


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end): the time in which at least one kernel runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(rows: Sequence[Row]) -> str:
    """Return the counts of the states: "31 ok, 2 failed (steps: bare compiled), 1 skipped"."""
    words = []
    for state in STATES:
        found = [row for row in rows if row.state == state]
        names = f" ({', '.join(f'{row.part}: {row.name}' for row in found)})" if state == "failed" and found else ""
        if found or state == "ok":
            words.append(f"{len(found)} {state}{names}")
    return ", ".join(words)


def short_summary(machine: str, rows: Sequence[Row], most: int = 30) -> list[str]:
    """Return what a person reads first, in `most` lines: the counts, what failed, then a line for each part."""
    lines = [machine, summary([row for row in rows if row.state != "failed"])]
    bad = [row for row in rows if row.state == "failed"]
    lines[1] += f", {len(bad)} failed"
    lines += [f"FAILED {row.part}, {row.name}: {row.said}"[:200] for row in bad[: most // 3]]
    if len(bad) > most // 3:
        lines.append(f"... and {len(bad) - most // 3} more that failed; table.md has all")
    speeds = [row for row in rows if row.part.startswith("steps") and "images_per_second" in row.figures]
    for part in dict.fromkeys(row.part for row in rows):
        of = [row for row in rows if row.part == part and row not in speeds]
        said = "; ".join(
            f"{row.name}: {row.said}" for row in of if row.state == "ok" and not row.name.startswith("kernel ")
        )
        lines.append(f"{part}: {summary([row for row in rows if row.part == part])}. {said}"[:160])
    room = max(0, most - len(lines))
    lines += [f"{row.part}, {row.name}: {row.said}"[:160] for row in speeds[:room]]
    return lines[:most]


def ledger_row(date: str, machine: str, command: str, rows: Sequence[Row]) -> str:
    """Return a row for benchmarks/ledger/gpu.toml: what was measured, less seconds of commands and single kernels."""
    kept = [row for row in rows if row.state == "ok" and row.figures and row.part != "commands"]
    kept = [row for row in kept if not row.name.startswith("kernel ")]
    figures = "; ".join(f"{row.part}, {row.name}: {row.said}" for row in kept)
    values = {
        "machine": "GPU",
        "state": machine,
        "command": f"`{command}`",
        "note": f"{figures}. {summary(rows)}",
    }
    # Texts of JSON are texts of TOML.
    lines = (f"{key} = {json.dumps(' '.join(value.split()), ensure_ascii=False)}" for key, value in values.items())
    return "\n".join([f"[gpu-visit-{date}]", f"date = {date}", *lines])


def picture(file: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw images/s as bars, one group for each network, with MFU and the time of a step beside them."""
    from PIL import Image, ImageDraw, ImageFont

    bars = [row for row in rows if row.part.startswith("steps") and "images_per_second" in row.figures]
    others = [row for row in rows if row.state != "ok"]
    height, left, width = 22, 220, 360
    image = Image.new("RGB", (1280, 70 + height * (len(bars) + len({r.part for r in bars}) + len(others) + 2)), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    pen.text((16, 14), title, "black", font=ImageFont.load_default(18))
    y, part = 50, ""
    for row in bars:
        if row.part != part:
            part = row.part
            pen.text((16, y), part, "black", font=ImageFont.load_default(16))
            y += height
        most = max(r.figures["images_per_second"] for r in bars if r.part == part)
        length = round(width * row.figures["images_per_second"] / most)
        colour = "#1f6f8b" if row.name.startswith("unfog") else "#b9b9b9"
        pen.text((32, y), row.name, "black", font=font)
        pen.rectangle((left, y + 2, left + max(1, length), y + height - 4), fill=colour)
        pen.text((left + length + 8, y), row.said, "black", font=font)
        y += height
    for row in others:
        y += height
        pen.text((16, y), f"{row.state}: {row.part}, {row.name}: {row.said}"[:170], "#a02020", font=font)
    image.save(file)
