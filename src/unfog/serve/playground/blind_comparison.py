"""Blind comparison of two drawings: votes are kept in the run folder, and counted with a Wilson interval."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfog.config.requests.sample import SampleRequest
from unfog.errors import RequestError
from unfog.files.safe_files import open_file, read_file
from unfog.serve.playground.drawing import settings_of

_FILE = "blind-comparisons.jsonl"
_MOST_BYTES = 2**22
_CHOICES = ("first", "second", "neither")
_Z = 1.959964  # of a 95% interval


def add_vote(run: Path, first: SampleRequest, second: SampleRequest, picture: int, choice: Any) -> list[dict[str, Any]]:
    """Record which of two pictures somebody found better without knowing whose they are; return all counts.

    RequestError if the choice is unknown, the drawings are the same, or the file is full.
    """
    if choice not in _CHOICES:
        raise RequestError(f"choice = {choice!r} must be one of {', '.join(_CHOICES)}")
    # Identity of a side: all settings but number and noise of the pictures.
    asked = [settings_of(request) for request in (first, second)]
    sides = [{name: value for name, value in one.items() if name not in ("n", "seed")} for one in asked]
    if first.seed != second.seed:
        raise RequestError(f"seed = {first.seed} and {second.seed}: a fair comparison is of the same noise")
    if sides[0] == sides[1]:
        raise RequestError("both drawings have the same settings; compare two checkpoints, or two settings")
    row: dict[str, Any] = {"time": round(time.time()), "first": sides[0], "second": sides[1]}
    row |= {"seed": first.seed, "picture": picture, "choice": choice}
    line = json.dumps(row).encode() + b"\n"
    with open_file(run / _FILE, "ab", run, buffering=0) as file:
        if file.tell() + len(line) > _MOST_BYTES:
            raise RequestError(f"{_FILE} is full; move it away")
        file.write(line)
    return tallies(run)


def tallies(run: Path) -> list[dict[str, Any]]:
    """Return the counts of each pair that was compared: wins, ties, and the share of wins with its 95% interval.

    Votes of all seeds are counted together. Of several votes on a picture the last one counts.
    """
    votes: dict[str, dict[tuple[object, int], str]] = {}
    for row in _rows(run):
        sides = [json.dumps(row[name], sort_keys=True) for name in ("first", "second")]
        choice, order = row["choice"], sorted(range(2), key=lambda i: sides[i])
        if order[0] and choice != "neither":
            choice = "second" if choice == "first" else "first"
        pair = json.dumps([json.loads(sides[i]) for i in order])
        votes.setdefault(pair, {})[str(row.get("seed")), row["picture"]] = choice
    found = []
    for pair, choices in votes.items():
        first, second, ties = (list(choices.values()).count(name) for name in _CHOICES)
        low, high = _wilson_interval(first, first + second)
        sides = json.loads(pair)
        counts = {"first_wins": first, "second_wins": second, "ties": ties, "interval": [round(low, 4), round(high, 4)]}
        found.append({"first": sides[0], "second": sides[1], **counts})
    return found


def _wilson_interval(wins: int, votes: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson 1927), which is right for few votes too; (0, 1) without any."""
    if votes == 0:
        return 0.0, 1.0
    share, z2 = wins / votes, _Z**2 / votes
    middle, half = share + z2 / 2, _Z * math.sqrt((share * (1 - share) + z2 / 4) / votes)
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def _rows(run: Path) -> list[dict[str, Any]]:
    """Return the votes that can be read."""
    try:
        lines = read_file(run / _FILE, run, _MOST_BYTES).split(b"\n")
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, Mapping) or not isinstance(row.get("picture"), int) or row.get("choice") not in _CHOICES:
            continue
        if isinstance(row.get("first"), Mapping) and isinstance(row.get("second"), Mapping):
            found.append(dict(row))
    return found
