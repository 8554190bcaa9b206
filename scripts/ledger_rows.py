"""Rows of the ledger: measurements and their figures, read from benchmarks/ledger, with the checks of their form."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "benchmarks" / "ledger"
# File of the ledger and page of docs/evidence -> title and first sentence of the page.
TOPICS = {
    "quality": ("Quality of samples", "Runs, recipes, networks, EMAs and autoencoders, compared by their samples."),
    "sampling": ("Sampling", "Samplers, grids of noise levels, guidance and editing."),
    "conditions": ("Conditions and arrays", "Numbers, captions, masks, sizes, arrays and fields."),
    "metrics": ("Metrics", "FID, KID and the other metrics against known values, and what each of them sees."),
    "speed": ("Speed", "Training steps, sampling, start and refusals."),
    "gpu": ("GPU", "Measured on a GPU, or counted on code for one."),
    "distributed": ("Several processes", "Runs on two and more ranks against one, kills of ranks, and traffic."),
    "data": ("Reading images", "Sources, packs, shards, the cache and augmentation."),
    "checks": ("Checks before training", "`unfog doctor`, `unfog plan` and `unfog find-lr` against known answers."),
    "reliability": ("Reliability", "Kills, full disks, hostile files, guards, and the cost of all of these."),
    "page": ("The page", "`unfog serve` and its page in a browser."),
    "tests": ("Tests and code", "Duration of the tests, and figures of the code."),
}
_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_KEYS = {"date", "machine", "state", "commit", "after", "command", "note", "figures"}
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


class LedgerError(ValueError):
    """A row that has not the form of the ledger."""


@dataclass(frozen=True)
class Figure:
    """One value of a measurement. `id` is MEASUREMENT.NAME; `values` holds one number, or several such as a range."""

    id: str
    what: str
    values: tuple[float, ...]
    unit: str = ""
    error: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    record: str = ""

    @property
    def suffix(self) -> str:
        """The unit as it follows a number: "%", " images/s", or ""."""
        return self.unit and ("%" if self.unit == "%" else f" {self.unit}")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that prose may give, in order: the values, then the error, or the ends of the interval."""
        after = (self.error,) if self.error is not None else (self.low, self.high)
        return self.values + tuple(number for number in after if number is not None)


@dataclass(frozen=True)
class Measurement:
    """One row of the ledger: the command that was run, where and when, and what came out."""

    id: str
    topic: str
    date: date
    machine: str
    command: str
    note: str
    state: str = ""
    commit: str = ""
    after: str = ""
    figures: tuple[Figure, ...] = field(default=())


def machines() -> dict[str, str]:
    """Return the machines by their key."""
    return dict(_load(LEDGER / "machines.toml"))


def charts() -> dict[str, dict[str, Any]]:
    """Return the charts by their name."""
    return _load(LEDGER / "charts.toml")


def read(folder: Path = LEDGER) -> dict[str, Measurement]:
    """Return all measurements by id, in the order of the files.

    Raises:
        LedgerError: if a row has not the form of the ledger; the message names the row and the remedy.
    """
    rows: dict[str, Measurement] = {}
    known = machines()
    for topic in TOPICS:
        for name, row in _load(folder / f"{topic}.toml").items():
            if name in rows:
                raise LedgerError(f"{name} is in {rows[name].topic}.toml and {topic}.toml; give one of them another id")
            rows[name] = _measurement(name, topic, row, known)
    for row in rows.values():
        if row.after and row.after not in rows:
            raise LedgerError(f"{row.id}: after = {row.after!r} is not an id of the ledger")
    return rows


def figures(rows: dict[str, Measurement]) -> dict[str, Figure]:
    """Return all figures by id."""
    return {figure.id: figure for row in rows.values() for figure in row.figures}


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LedgerError(f"{path.name}: {error}") from error


def _measurement(name: str, topic: str, row: Any, known: dict[str, str]) -> Measurement:
    if not _ID.fullmatch(name):
        raise LedgerError(f"{name!r}: an id has small letters, digits and hyphens")
    if not isinstance(row, dict) or not {"date", "machine", "command", "note"} <= set(row) <= _KEYS:
        needed = "date, machine, command and note; it may have state, commit, after and figures"
        raise LedgerError(f"{name}: a row needs {needed}, has {', '.join(row) if isinstance(row, dict) else row!r}")
    if not isinstance(row["date"], date) or not re.search(rf"-{row['date']}(-\d+)?$", name):
        raise LedgerError(f"{name}: an id ends with the date of its row, as -{row['date']}")
    if row["machine"] not in known:
        raise LedgerError(f"{name}: machine {row['machine']!r} is not in machines.toml ({', '.join(known)})")
    if not all(isinstance(row.get(key, ""), str) for key in _KEYS - {"date", "figures"}):
        raise LedgerError(f"{name}: all but date and figures are texts")
    if not re.fullmatch("[0-9a-f]{8,40}|", row.get("commit", "")):
        raise LedgerError(f"{name}: commit {row['commit']!r} is not 8 to 40 hexadecimal digits")
    found = tuple(_figure(f"{name}.{key}", value) for key, value in row.get("figures", {}).items())
    texts = {key: " ".join(row.get(key, "").split()) for key in _KEYS - {"date", "figures"}}
    return Measurement(name, topic, row["date"], figures=found, **texts)


def _figure(name: str, entry: Any) -> Figure:
    if not isinstance(entry, dict) or not {"what", "value"} <= set(entry):
        raise LedgerError(f"{name}: a figure needs `what` and `value`")
    values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
    numbers = [*values, *(entry[key] for key in ("error", "low", "high", "n") if key in entry)]
    if not values or not all(type(number) in (int, float) for number in numbers):
        raise LedgerError(f"{name}: value, error, low, high and n are numbers; value may be a list of them")
    if ("low" in entry) != ("high" in entry) or {"low", "error"} <= set(entry):
        raise LedgerError(f"{name}: give error, or low and high")
    others = {key: value for key, value in entry.items() if key != "value"}
    try:
        return Figure(name, values=tuple(values), **others)
    except TypeError as error:
        unknown = set(others) - set(Figure.__dataclass_fields__)
        raise LedgerError(f"{name}: {', '.join(sorted(unknown))} is not a field of a figure") from error


def shown_numbers(text: str) -> Iterator[tuple[float, float]]:
    """Yield each number of a text of prose with half a unit of its last digit; "3 min 07 s" is one number of seconds.

    Whole numbers from 10,000 on that end with zeros count as rounded.
    """
    spoken = r"(?<![\d.,])(?:(\d+) h )?(?:(\d+) min )?(\d+) s\b"
    text = re.sub(spoken, lambda m: f"{int(m[1] or 0) * 3600 + int(m[2] or 0) * 60 + int(m[3])}", text)
    for match in _NUMBER.finditer(text):
        digits = match[0].replace(",", "").replace("−", "-")
        number, mantissa = float(digits), digits.lower().partition("e")
        place = 10.0 ** -len(mantissa[0].partition(".")[2]) * 10.0 ** int(mantissa[2] or 0)
        if "." not in digits and not mantissa[1] and abs(number) >= 10_000:
            place = 10.0 ** (len(digits) - len(digits.rstrip("0")))
        yield number, place / 2


def differs(text: str, figure: Figure) -> str:
    """Return how a text of prose differs from the figure that it links to; "" if it does not.

    The numbers of the text are the first ones of `Figure.numbers`, rounded to the digits that the text has.
    """
    found = list(shown_numbers(text))
    if not found:
        return f"{text!r} has no number"
    if len(found) > len(figure.numbers):
        return f"{text!r} has {len(found)} numbers, {figure.id} has {len(figure.numbers)}"
    for (shown, half), number in zip(found, figure.numbers, strict=False):
        if abs(abs(shown) - abs(number)) > half * (1 + 1e-6) + 1e-15:
            return f"{text!r} says {shown:g}, {figure.id} is {number:g}"
    return ""


def links(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield text, topic and id of each link of a Markdown text to a row on a page of docs/evidence."""
    pattern = rf"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?:[^()\s]*/)?({'|'.join(TOPICS)})\.md#([a-z0-9-]+-20\d\d[a-z0-9.-]*)\)"
    for match in re.finditer(pattern, text):
        yield match[1].replace("*", ""), match[2], match[3]
