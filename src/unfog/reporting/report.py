"""Report of a run: one self-contained HTML file, made from the run folder alone."""

from __future__ import annotations

import struct
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from unfog.errors import RequestError
from unfog.reporting.html import render_template
from unfog.reporting.image_grids import png_data_uri
from unfog.reporting.progress import format_duration, format_number
from unfog.reporting.records import (
    LARGEST,
    SESSION_ENDS,
    SESSION_STARTS,
    Row,
    drop_undone_events,
    finite_number,
    read_events,
    read_metrics,
    write_atomic,
)
from unfog.reporting.report_charts import finite_column, metric_charts, smoothed
from unfog.reporting.stored_evaluations import COLUMNS, StoredEvaluation, read_evaluations
from unfog.text import without_secrets

_FILMSTRIP = 12  # sample grids over time, at most
_THUMBNAIL, _LARGE = 400, 1600  # pixels across, at most, that a picture is embedded with
_EVENTS = 300  # latest events shown, at most
_TROUBLES = frozenset(
    ["warning", "step_refused", "rolled_back", "disk_full", "not_removed", "averages_left_out", "sink_failed", "failed"]
)
_SHOWN_TROUBLES = 20
_DEEPEST = 8  # lists in lists that are written out
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunData:
    """Contents of a run folder for the report."""

    name: str
    metrics: list[Row]
    events: list[Row]
    settings: dict[str, dict[str, str]]
    """Section of config.toml ("" for the top) -> key -> value as text."""

    samples: list[tuple[int, Path]]
    """Preview grids by step."""

    denoising: list[tuple[int, Path]]
    """Denoising strips by step."""

    checkpoints: list[tuple[int, int]]
    """Whole checkpoints: step and bytes."""

    written: datetime
    """When the record was last added to."""

    evaluations: Sequence[StoredEvaluation] = ()
    """What `unfog evaluate` has measured, by step."""


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from the run folder, running or ended, and return its path.

    RequestError when `run_dir` is no run folder. What is missing in the folder is missing in the report.
    """
    path = run_dir / "report.html"
    write_atomic(path, render_report([read_run(run_dir)]).encode("utf-8", "replace"))
    return path


def read_run(run_dir: Path) -> RunData:
    """Read the record in a run folder; RequestError when there is none."""
    record = [run_dir / name for name in ("config.toml", "metrics.jsonl", "events.jsonl")]
    found = [path for path in record if path.exists()]
    if not found:
        raise RequestError(f"{run_dir} is not a run: it has no config.toml, metrics.jsonl or events.jsonl")
    return RunData(
        name=run_dir.resolve().name,
        metrics=read_metrics(run_dir / "metrics.jsonl"),
        events=read_events(run_dir / "events.jsonl"),
        settings=_settings(run_dir / "config.toml"),
        samples=_numbered(run_dir / "samples", "*.png"),
        denoising=_numbered(run_dir / "denoising", "*.png"),
        checkpoints=[
            (step, _size(path))
            for step, path in _numbered(run_dir / "checkpoints", "*")
            if (path / "manifest.json").exists()
        ],
        written=datetime.fromtimestamp(max(path.stat().st_mtime for path in found), UTC),
        evaluations=read_evaluations(run_dir),
    )


def render_report(runs: Sequence[RunData]) -> str:
    """Render the runs, in order, as a self-contained HTML page that makes no requests."""
    return render_template("report.html", runs=[_view(run) for run in runs])


def _view(run: RunData) -> dict[str, object]:
    state, detail = _state(run)
    film = _pictures(_evenly(run.samples, _FILMSTRIP), _THUMBNAIL)
    return {
        "name": run.name,
        "state": state,
        "detail": detail,
        "facts": _facts(run),
        "samples": _last(_pictures(run.samples[-1:], _LARGE)),
        "denoising": _last(_pictures(run.denoising[-1:], _LARGE)),
        "film": film if len(film) > 1 else [],
        "charts": metric_charts(run.metrics),
        "evaluations": [_evaluated(one) for one in run.evaluations],
        "data": _last([_fields(event) for event in _of_kind(run, "data")]),
        "choices": [defaultdict(str, _fields(event)) for event in _of_kind(run, "choice")],
        "settings": run.settings,
        "troubles": [_event(event) for event in _of_kind(run, *_TROUBLES)[-_SHOWN_TROUBLES:]],
        "events": [_event(event) for event in run.events[-_EVENTS:]],
        "events_left_out": max(0, len(run.events) - _EVENTS),
    }


def _evaluated(one: StoredEvaluation) -> dict[str, object]:
    pairs = [
        (severity, said, _last(_pictures([(one.step, path)] if path else [], _LARGE)))
        for severity, said, path in one.memorization
    ]
    return {
        "step": f"{one.step:,}",
        "how": one.sampling,
        "head": COLUMNS,
        "rows": one.rows,
        "notes": one.notes,
        "pairs": pairs,
    }


def _state(run: RunData) -> tuple[str, str]:
    """Return the state of the run in a word, and details."""
    last = _last(_of_kind(run, *SESSION_STARTS, *SESSION_ENDS))
    if last is None or last["kind"] not in SESSION_ENDS:
        # Running, or killed without a last event; the record alone cannot tell which.
        return "not ended", f"last line written {run.written:%Y-%m-%d %H:%M UTC}"
    return str(last["kind"]), " · ".join([f"at step {_text(last.get('step', 0))}", *_fields(last).values()])


def _facts(run: RunData) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (label, value, remark)."""
    facts = []
    if run.metrics:
        last = run.metrics[-1]
        facts.append(("images seen", _text(last.get("images", 0)), f"{_text(last.get('step', 0))} steps"))
        facts.append(("time", format_duration(finite_number(last.get("seconds", 0.0))), ""))
    _, rates = finite_column(run.metrics, "images_per_second")
    if len(rates):
        facts.append(("images a second", format_number(float(np.median(rates))), "median"))
    _, losses = finite_column(run.metrics, "loss")
    if len(losses):
        facts.append(("loss", f"{smoothed(losses)[-1]:.4g}", "smoothed"))
    steps, held_out = finite_column(run.metrics, "held_out_loss")
    if len(held_out):
        best = int(held_out.argmin())
        remark = f"lowest {held_out[best]:.4g} at step {steps[best]:,.0f}"
        facts.append(("held-out loss", f"{held_out[-1]:.4g}", remark))
    if run.checkpoints:
        step, size = run.checkpoints[-1]
        remark = f"newest at step {step:,}, {size / 1e6:,.1f} MB"
        facts.append(("checkpoints", str(len(run.checkpoints)), remark))
    events = drop_undone_events(run.events)
    refused = sum(event.get("kind") == "step_refused" for event in events)
    if refused:
        facts.append(("steps skipped", f"{refused:,}", "not finite; weights untouched"))
    rolled_back = sum(event.get("kind") == "rolled_back" for event in events)
    if rolled_back:
        facts.append(("roll-backs", f"{rolled_back:,}", "to earlier weights, as the run diverged"))
    return facts


def _settings(path: Path) -> dict[str, dict[str, str]]:
    """config.toml as section -> key -> text; a file that is no TOML shows as the reason why."""
    if not path.exists():
        return {}
    try:
        sections: dict[str, dict[str, str]] = {}
        _flatten(tomllib.loads(path.read_text(encoding="utf-8-sig")), "", sections)
        return sections
    except (OSError, ValueError, RecursionError) as error:
        return {"": {"config.toml": f"cannot be read: {error}"}}


def _flatten(tree: Mapping[str, Any], section: str, sections: dict[str, dict[str, str]]) -> None:
    # Numbers hold no secrets.
    values = {
        key: _text(value) if isinstance(value, int | float) else without_secrets(_text(value))
        for key, value in tree.items()
        if not isinstance(value, dict)
    }
    if values:
        sections[section] = values
    for key, value in tree.items():
        if isinstance(value, dict):
            _flatten(value, f"{section}.{key}".lstrip("."), sections)


def _event(event: Row) -> dict[str, str]:
    details = " · ".join(f"{key} {value}" for key, value in _fields(event).items())
    time = str(event.get("time", ""))[:19].replace("T", " ")
    return {
        "time": time,
        "step": _text(event.get("step", "")),
        "kind": _text(event.get("kind", "")),
        "details": details,
    }


def _fields(event: Row) -> dict[str, str]:
    return {key: _text(value) for key, value in event.items() if key not in ("time", "step", "kind")}


def _of_kind(run: RunData, *kinds: str) -> list[Row]:
    return [event for event in run.events if event.get("kind") in kinds]


def _text(value: object, depth: int = 0) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < LARGEST else "a number of over a hundred digits"
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        return ", ".join(_text(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item, depth + 1)}" for key, item in value.items())
    return str(value)


def _numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return the files or folders whose names are steps, in order of steps."""
    return sorted((int(path.stem), path) for path in folder.glob(pattern) if path.stem.isdecimal())


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; a running process may delete files meanwhile."""
    size = 0
    for file in folder.glob("*"):
        with suppress(OSError):
            size += file.lstat().st_size
    return size


def _evenly(items: Sequence[tuple[int, Path]], most: int) -> list[tuple[int, Path]]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _pictures(files: Sequence[tuple[int, Path]], widest: int) -> list[dict[str, object]]:
    """Return the readable images: step, data URI, width in pixels, and displayed width."""
    pictures: list[dict[str, object]] = []
    for step, path in files:
        picture = None
        # A file may claim an enormous size, or make Pillow's readers fail in ways that png_data_uri does not catch.
        with suppress(ValueError, IndexError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError):
            picture = png_data_uri(path, widest)
        if picture is not None:
            uri, width = picture
            # A small one is enlarged by an integer, so that its pixels stay square.
            pictures.append({"step": f"{step:,}", "uri": uri, "width": width, "shown": width * max(1, 480 // width)})
    return pictures


def _last(items: Sequence[_T]) -> _T | None:
    return items[-1] if items else None
