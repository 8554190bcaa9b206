"""Evaluations that `unfog evaluate` stored in a run folder, for the report: metrics and nearest training images."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unfog.reporting.records import finite_number

_LARGEST = 10 * 2**20  # bytes of a file; ours have a few thousand
_MOST = 20  # evaluations shown, the latest


@dataclass(frozen=True)
class StoredEvaluation:
    """One stored evaluation of a run, as texts for the report."""

    step: int
    sampling: str
    """How the pictures were drawn."""
    rows: list[tuple[str, ...]]
    """Cells of the table below `HEAD`."""
    notes: list[str]
    memorization: list[tuple[str, str, Path | None]]
    """Of each search for copies: severity, what was found, the picture of the nearest pairs."""
    changed: float
    """When it was written."""


COLUMNS = ("metric", "value", "95% interval", "n", "reference", "features", "resize")


def read_evaluations(run_dir: Path) -> list[StoredEvaluation]:
    """The latest evaluations of a run, by step; what is damaged is left out, since people edit such files."""
    found = []
    for path in (run_dir / "evaluations").glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            if path.stat().st_size <= _LARGEST:
                found.append(_evaluation(path, json.loads(path.read_bytes())))
    latest = sorted(found, key=lambda one: one.changed)[-_MOST:]
    return sorted(latest, key=lambda one: (one.step, one.changed))


def _evaluation(path: Path, stored: Mapping[str, Any]) -> StoredEvaluation:
    measured = [one for one in stored["measured"] if isinstance(one, dict)]
    copies = []
    for one in stored["copies"]:
        name = Path(str(one.get("picture", "")))
        inside = not name.is_absolute() and ".." not in name.parts and name.suffix == ".png"
        evidence = f"by {one['by']}: {one['evidence']}" + (f"; {one['remedy']}" if one.get("remedy") else "")
        copies.append((str(one["severity"]), evidence, path.parent / name if inside else None))
    return StoredEvaluation(
        int(stored["step"]),
        ", ".join(f"{name} {value}" for name, value in stored["drawn"].items()),
        [_row(one) for one in measured],
        [f"{one['metric']}: {one['note']}" for one in measured if one.get("note")],
        copies,
        path.stat().st_mtime,
    )


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    value, low, high = (finite_number(one.get(name)) for name in ("value", "low", "high"))
    shown = "refused" if math.isnan(value) else f"{value:.4g}"
    within = "" if math.isnan(low) or math.isnan(high) else f"{low:.4g} to {high:.4g}"
    counts = [f"{int(n):,}" if (n := finite_number(one.get(name))) > 0 else "-" for name in ("n", "n_reference")]
    return str(one["metric"]), shown, within, *counts, str(one.get("features", "")), str(one.get("resize", ""))
