"""Report of a run: one self-contained HTML file, made from the run folder alone."""

from __future__ import annotations

import json
import math
import struct
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from PIL import Image

from unfog.errors import RequestError
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
)
from unfog.reporting.report_charts import finite_column, metric_charts, smoothed
from unfog.safe_files import read_file, write_atomic
from unfog.text import without_secrets

_FILMSTRIP = 12  # sample grids over time, at most
_THUMBNAIL, _LARGE = 400, 1600  # pixels across, at most, that an image is embedded with
_EVENTS = 300  # latest events shown, at most
_EVALUATIONS = 20  # latest evaluations shown, at most
_LARGEST_EVALUATION = 10 * 2**20  # bytes of a file; those that Unfog writes have a few thousand
_EVALUATION_HEAD = ("metric", "value", "95% interval", "real images", "n", "reference", "features", "resize")
_TROUBLES = (
    "warning",
    "step_refused",
    "rolled_back",
    "passed_over",
    "disk_full",
    "not_removed",
    "averages_left_out",
    "sink_failed",
    "failed",
)
_SHOWN_TROUBLES = 20
_DEEPEST = 8  # lists in lists that are written out
_T = TypeVar("_T")


def write_report(run_dir: Path, unended: tuple[str, str] | None = None) -> Path:
    """Write RUN/report.html from the run folder, running or ended, and return its path.

    `unended`: state and details of a run that has not recorded its end, such as ("running", "60/150, 52 s left").

    RequestError when `run_dir` is no run folder. What is missing in the folder is missing in the report.
    """
    record = [run_dir / name for name in ("config.toml", "metrics.jsonl", "events.jsonl")]
    changed = [path.stat().st_mtime for path in record if path.exists()]
    if not changed:
        raise RequestError(f"{run_dir} is not a run: it has no config.toml, metrics.jsonl or events.jsonl")
    metrics, events = read_metrics(run_dir / "metrics.jsonl"), read_events(run_dir / "events.jsonl")
    state, detail = _state(events) or unended or _silent(datetime.fromtimestamp(max(changed), UTC))
    samples, denoising = _numbered(run_dir / "samples", "*.png"), _numbered(run_dir / "denoising", "*.png")
    film = _images(_evenly(samples, _FILMSTRIP), _THUMBNAIL)
    run = {
        "name": run_dir.resolve().name,
        "state": state,
        "detail": detail,
        "facts": [*_metric_facts(metrics), *_checkpoint_facts(run_dir / "checkpoints"), *_event_facts(events)],
        "samples": _last(_images(samples[-1:], _LARGE)),
        "denoising": _last(_images(denoising[-1:], _LARGE)),
        "film": film if len(film) > 1 else [],
        "charts": metric_charts(metrics),
        "evaluations": _evaluations(run_dir / "evaluations"),
        "evaluation_head": _EVALUATION_HEAD,
        "data": _last([_fields(event) for event in _of_kind(events, "data")]),
        "choices": [defaultdict(str, _fields(event)) for event in _of_kind(events, "choice")],
        "settings": _settings(run_dir / "config.toml"),
        "troubles": [_event(event) for event in _of_kind(events, *_TROUBLES)[-_SHOWN_TROUBLES:]],
        "events": [_event(event) for event in events[-_EVENTS:]],
        "events_left_out": max(0, len(events) - _EVENTS),
    }
    path = run_dir / "report.html"
    # Names of files that are not UTF-8 hold surrogates, which cannot be encoded.
    write_atomic(path, render_template("report.html", run=run).encode("utf-8", "replace"))
    return path


def render_template(template: str, **values: Any) -> str:
    """Return an HTML page from the template of this name; all values are escaped, and a missing name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unfog.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=now, **values)


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the latest results of `unfog evaluate`, by step."""
    found = []
    for path in folder.glob("*.json"):
        # People edit such files: damaged ones are left out.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            stored = json.loads(read_file(path, _LARGEST_EVALUATION))
            found.append((path.stat().st_mtime, _evaluation(path, stored)))
    latest = [one for _, one in sorted(found, key=itemgetter(0))[-_EVALUATIONS:]]
    for one in latest:
        pairs = [(severity, text, [(one["step"], path)] if path else []) for severity, text, path in one["pairs"]]
        one["pairs"] = [(severity, text, _last(_images(files, _LARGE))) for severity, text, files in pairs]
    return sorted(latest, key=itemgetter("step"))


def _evaluation(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    measured = [one for one in stored["measured"] if isinstance(one, dict)]
    pairs = []
    for one in stored["copies"]:
        name = Path(str(one.get("picture", "")))
        # A run folder may come from a stranger: only an image beside the file is embedded.
        inside = not name.is_absolute() and ".." not in name.parts and name.suffix == ".png"
        evidence = f"by {one['by']}: {one['evidence']}" + (f"; {one['remedy']}" if one.get("remedy") else "")
        pairs.append((str(one["severity"]), evidence, path.parent / name if inside else None))
    return {
        "step": int(stored["step"]),
        "verdict": str(stored.get("verdict", "")),
        "sampling": ", ".join(f"{name} {value}" for name, value in stored["drawn"].items()),
        "rows": [_metric_row(one) for one in measured],
        "notes": [f"{one['metric']}: {one['note']}" for one in measured if one.get("note")],
        "pairs": pairs,
    }


def _metric_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a metric, one for each column of _EVALUATION_HEAD."""
    value, low, high = (finite_number(one.get(name)) for name in ("value", "low", "high"))
    shown = "refused" if math.isnan(value) else f"{value:.4g}"
    within = "" if math.isnan(low) or math.isnan(high) else f"{low:.4g} to {high:.4g}"
    counts = [f"{int(n):,}" if (n := finite_number(one.get(name))) > 0 else "-" for name in ("n", "n_reference")]
    real = "" if math.isnan(among := finite_number(one.get("real"))) else f"{among:.4g}"
    return str(one["metric"]), shown, within, real, *counts, str(one.get("features", "")), str(one.get("resize", ""))


def _state(events: Sequence[Row]) -> tuple[str, str] | None:
    """Return the end of the run in a word, and details; None if none is recorded since it began."""
    last = _last(_of_kind(events, *SESSION_STARTS, *SESSION_ENDS))
    if last is None or last["kind"] not in SESSION_ENDS:
        return None
    return str(last["kind"]), " · ".join([f"at step {_text(last.get('step', 0))}", *_fields(last).values()])


def _silent(written: datetime) -> tuple[str, str]:
    # Running, or killed without a last event; the record alone cannot tell which.
    return "not ended", f"last line written {written:%Y-%m-%d %H:%M UTC}"


_Fact = tuple[str, str, str]  # a headline number: label, value, remark


def _metric_facts(metrics: Sequence[Row]) -> list[_Fact]:
    if not metrics:
        return []
    last = metrics[-1]
    facts = [
        ("images seen", _text(last.get("images", 0)), f"{_text(last.get('step', 0))} steps"),
        ("time", format_duration(finite_number(last.get("seconds", 0.0))), ""),
    ]
    _, rates = finite_column(metrics, "images_per_second")
    if len(rates):
        facts.append(("images a second", format_number(float(np.median(rates))), "median"))
    _, losses = finite_column(metrics, "loss")
    if len(losses):
        facts.append(("loss", f"{smoothed(losses)[-1]:.4g}", "smoothed"))
    steps, held_out = finite_column(metrics, "held_out_loss")
    if len(held_out):
        best = int(held_out.argmin())
        remark = f"lowest {held_out[best]:.4g} at step {steps[best]:,.0f}"
        facts.append(("held-out loss", f"{held_out[-1]:.4g}", remark))
    return facts


def _checkpoint_facts(folder: Path) -> list[_Fact]:
    # The manifest is written last: without it, a checkpoint is not whole.
    whole = [(step, path) for step, path in _numbered(folder, "*") if (path / "manifest.json").exists()]
    if not whole:
        return []
    step, path = whole[-1]
    size = 0
    for file in path.glob("*"):
        with suppress(OSError):  # a running process may delete files meanwhile
            size += file.lstat().st_size
    return [("checkpoints", str(len(whole)), f"newest at step {step:,}, {size / 1e6:,.1f} MB")]


def _event_facts(events: Sequence[Row]) -> list[_Fact]:
    kept = drop_undone_events(events)
    counts = [
        ("steps skipped", len(_of_kind(kept, "step_refused")), "not finite; weights untouched"),
        ("roll-backs", len(_of_kind(kept, "rolled_back")), "to earlier weights, because the run diverged"),
    ]
    return [(label, f"{count:,}", remark) for label, count, remark in counts if count]


def _settings(path: Path) -> dict[str, dict[str, str]]:
    """config.toml as section -> key -> text; a file that is no TOML shows as the reason why."""
    if not path.exists():
        return {}
    try:
        sections: dict[str, dict[str, str]] = {}
        _flatten(tomllib.loads(read_file(path).decode("utf-8-sig")), "", sections)
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
    return {
        "time": str(event.get("time", ""))[:19].replace("T", " "),
        "step": _text(event.get("step", "")),
        "kind": _text(event.get("kind", "")),
        "details": " · ".join(f"{key} {value}" for key, value in _fields(event).items()),
    }


def _fields(event: Row) -> dict[str, str]:
    return {key: _text(value) for key, value in event.items() if key not in ("time", "step", "kind")}


def _of_kind(events: Sequence[Row], *kinds: str) -> list[Row]:
    return [event for event in events if event.get("kind") in kinds]


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


def _evenly(items: Sequence[tuple[int, Path]], most: int) -> list[tuple[int, Path]]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _images(files: Sequence[tuple[int, Path]], widest: int) -> list[dict[str, object]]:
    """Return the readable images: step, data URI, width in pixels, and displayed width."""
    images: list[dict[str, object]] = []
    for step, path in files:
        image = None
        # A file may claim an enormous size, or make Pillow's readers fail in ways that png_data_uri does not catch.
        with suppress(ValueError, IndexError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError):
            image = png_data_uri(path, widest)
        if image is not None:
            uri, width = image
            # A small one is enlarged by an integer, so that its pixels stay square.
            images.append({"step": f"{step:,}", "uri": uri, "width": width, "shown": width * max(1, 480 // width)})
    return images


def _last(items: Sequence[_T]) -> _T | None:
    return items[-1] if items else None
