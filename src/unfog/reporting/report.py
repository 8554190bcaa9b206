"""Report of a run: one self-contained HTML file, made from the run folder alone: the page with its data inside."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from unfog.errors import RequestError
from unfog.files.safe_files import list_folder, write_atomic
from unfog.reporting.channel_sheets import FOLDER as CHANNELS
from unfog.reporting.channel_sheets import read_channels
from unfog.reporting.image_grids import png_data_uri
from unfog.reporting.page import run_data
from unfog.reporting.page.bundle import embed
from unfog.reporting.records import (
    SESSION_ENDS,
    SESSION_STARTS,
    Floats,
    Row,
    drop_undone_events,
    finite_number,
    read_events,
    read_metrics,
)

_FILMSTRIP = 12  # sample grids over time, at most
_THUMBNAIL, _LARGE = 400, 1600  # pixels across, at most, that an image is embedded with
_CHANNEL_BYTES = 2**23  # of all sheets of channels that are embedded
_EVENTS = 300  # latest events shown, at most
_MOST_COLUMNS = 200  # people add columns of their own; a damaged file could have any number
_LONGEST_LIST = 64
_BINS = 600  # of the metrics; up to four times as many rows are embedded as they are
_REFRESH = 10  # seconds after which the report of a running run loads itself again


def write_report(run_dir: Path, unended: tuple[str, str] | None = None) -> Path:
    """Write RUN/report.html from the run folder, running or ended, and return its path.

    `unended`: state and details of a run that has not recorded its end, such as ("running", "60/150, 52 s left").

    RequestError when `run_dir` is not a run folder. What is missing in the folder is missing in the report.
    """
    record = [run_dir / name for name in ("config.toml", "metrics.jsonl", "events.jsonl")]
    changed = [path.stat().st_mtime for path in record if os.path.exists(path)]
    if not changed:
        raise RequestError(f"{run_dir} is not a run: it has no config.toml, metrics.jsonl or events.jsonl")
    events = read_events(run_dir / "events.jsonl")
    # Running, or killed without a last event; the record does not show which.
    silent = "not ended", f"last line written {datetime.fromtimestamp(max(changed), UTC):%Y-%m-%d %H:%M UTC}"
    state, detail = _state(events) or unended or silent
    run = {**_record(run_dir, events), **_pictures(run_dir), "status": {"state": state, "detail": detail}}
    run["status"] |= {"step": run.pop("step"), "steps": run.pop("steps")}
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = embed({"written": written, "runs": [run]}, str(run["name"]), _REFRESH if state == "running" else 0)
    path = run_dir / "report.html"
    # Names of files that are not UTF-8 hold surrogates, which cannot be encoded.
    write_atomic(path, page.encode("utf-8", "replace"), run_dir, shared=True)
    return path


def _record(run_dir: Path, events: Sequence[Row]) -> dict[str, Any]:
    """Return the facts that the record on disk has about the run."""
    metrics, kept = read_metrics(run_dir / "metrics.jsonl"), drop_undone_events(events)
    columns = _number_columns(metrics)
    steps = [finite_number(event.get("steps")) for event in kept]
    last = finite_number(metrics[-1].get("step")) if metrics else 0.0
    whole, size = _checkpoints(run_dir / "checkpoints")
    return {
        "id": 0,
        "name": run_dir.resolve().name,
        "step": last if last > 0 else 0,
        "steps": next((count for count in reversed(steps) if count > 0), None),
        "columns": list(columns),
        "rows": len(metrics),
        "metrics": base64.b64encode(pack_columns(thin_columns(columns, _BINS))).decode(),
        "events": run_data.event_rows(events[-_EVENTS:]),
        "events_left_out": max(0, len(events) - _EVENTS),
        "counts": {kind: sum(event.get("kind") == kind for event in kept) for kind in ("step_refused", "rolled_back")},
        "choices": run_data.read_choices(events),
        "settings": run_data.read_settings(run_dir / "config.toml"),
        "data": run_data.read_data_report(run_dir, events),
        "checkpoints": whole,
        "checkpoint_bytes": size,
    }


def _pictures(run_dir: Path) -> dict[str, Any]:
    """Return the sample grids, the strips of denoising, the contact sheet and those of evaluations, as data URIs."""
    samples, denoising = _numbered(run_dir / "samples", ".png"), _numbered(run_dir / "denoising", ".png")
    pictures: dict[str, Any] = {}
    shown: dict[str, list[int]] = {"preview": [], "denoising": []}
    # Of the last ones the pixels are seen; the others show how it came to that.
    wanted = [("preview", step, path, _THUMBNAIL) for step, path in _evenly(samples, _FILMSTRIP)[:-1]]
    wanted += [("preview", step, path, _LARGE) for step, path in samples[-1:]]
    wanted += [("denoising", step, path, _LARGE) for step, path in denoising[-1:]]
    for kind, step, path, widest in wanted:
        if uri := _data_uri(path, run_dir, widest):
            pictures[f"{kind}/{step}"] = uri
            shown[kind].append(step)
    pictures |= (channels := _channels(run_dir, shown["preview"]))
    if uri := _data_uri(run_dir / "contact-sheet.png", run_dir, _LARGE):
        pictures["contact"] = uri
    evaluations = run_data.read_evaluations(run_dir)
    for copy in (copy for one in evaluations for copy in one["copies"]):
        copy["picture"] = copy["picture"] and _data_uri(copy["picture"], run_dir, _LARGE)
    return {
        "previews": shown["preview"],
        "channels": [int(name.partition("/")[2]) for name in channels],
        "denoising": shown["denoising"],
        "contact_sheet": "contact" in pictures,
        "pictures": pictures,
        "evaluations": evaluations,
    }


def _channels(run_dir: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Return the sheets of channels of these previews, as far as they are small enough, the newest first."""
    found, size = dict[str, Any](), 0
    for step in reversed(steps):
        sheet = read_channels(run_dir / CHANNELS / f"{step:08d}.png", run_dir)
        size += len(sheet["picture"]) if sheet else 0
        if size > _CHANNEL_BYTES:
            break
        if sheet:
            found[f"channels/{step}"] = sheet
    return found


def _state(events: Sequence[Row]) -> tuple[str, str] | None:
    """Return the end of the run in a word, and details; None if none is recorded since it began."""
    sessions = [event for event in events if event.get("kind") in (*SESSION_STARTS, *SESSION_ENDS)]
    if not sessions or sessions[-1]["kind"] not in SESSION_ENDS:
        return None
    last = sessions[-1]
    fields = [run_data.plain_text(value) for key, value in last.items() if key not in ("time", "step", "kind")]
    return str(last["kind"]), " · ".join([f"at step {run_data.plain_text(last.get('step', 0))}", *fields])


def _checkpoints(folder: Path) -> tuple[list[int], int]:
    """Return the steps of whole checkpoints, and the bytes of the newest."""
    # The manifest is written last: without it, a checkpoint is not whole.
    whole = [(step, path) for step, path in _numbered(folder, "") if os.path.exists(path / "manifest.json")]
    size = 0
    with suppress(OSError):  # a running process may delete files meanwhile
        size = sum(file.lstat().st_size for file in list_folder(whole[-1][1], folder.parent)) if whole else 0
    return [step for step, _ in whole], size


def _numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return the files or folders of a folder in the run whose names are steps, in order of steps."""
    with suppress(OSError):
        there = (path for path in list_folder(folder, folder.parent) if path.suffix == suffix)
        return sorted((int(path.stem), path) for path in there if path.stem.isdecimal())
    return []


def _evenly(items: Sequence[tuple[int, Path]], most: int) -> list[tuple[int, Path]]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _data_uri(path: Path, root: Path, widest: int) -> str:
    """Return a readable image as a data URI; "" otherwise."""
    image = png_data_uri(path, root, widest)
    return "" if image is None else image[0]


def _number_columns(metrics: Sequence[Row]) -> dict[str, Floats]:
    """Return name -> float64 [rows], nan if a line has no number; a list is NAME.0, NAME.1, …"""
    columns: dict[str, Floats] = {}
    for i, row in enumerate(metrics):
        for name, value in row.items():
            cells = value[:_LONGEST_LIST] if isinstance(value, list) else [value]
            for j, cell in enumerate(cells):
                key = f"{name}.{j}" if isinstance(value, list) else name
                if not np.isfinite(number := finite_number(cell)):
                    continue
                if key not in columns:
                    if len(columns) >= _MOST_COLUMNS:
                        continue
                    columns[key] = np.full(len(metrics), np.nan)
                columns[key][i] = number
    return columns


def thin_columns(columns: Mapping[str, Floats], bins: int) -> dict[str, Floats]:
    """Return NAME.mean, NAME.min, NAME.max and NAME.last of so many parts of the rows, each of finite values alone.

    Of lists only the mean: a map shows no spikes. Columns of up to four values a bin are returned as they are.
    """
    rows = max((len(column) for column in columns.values()), default=0)
    if rows <= 4 * bins:
        return dict(columns)
    edges = np.linspace(0, rows, bins + 1).astype(int)[:-1]
    found: dict[str, Floats] = {}
    for name, column in columns.items():
        present = np.isfinite(column)
        counts = np.add.reduceat(present.astype(np.float64), edges)
        none = counts == 0
        mean = np.add.reduceat(np.where(present, column, 0.0), edges) / np.where(none, np.nan, counts)
        found[f"{name}.mean"] = mean
        if name.rpartition(".")[2].isdecimal():
            continue
        found[f"{name}.min"] = np.where(none, np.nan, np.minimum.reduceat(np.where(present, column, np.inf), edges))
        found[f"{name}.max"] = np.where(none, np.nan, np.maximum.reduceat(np.where(present, column, -np.inf), edges))
        # The last finite value, not the last row: a metric that is measured seldom has none in most rows.
        indices = np.maximum.reduceat(np.where(present, np.arange(rows), -1), edges)
        found[f"{name}.last"] = np.where(none, np.nan, column[indices])
    return found


def pack_columns(columns: Mapping[str, Floats]) -> bytes:
    """Return columns of one length as bytes that the page decodes: a header, and float32 values little-endian."""
    rows = len(next(iter(columns.values()))) if columns else 0
    header = {"columns": list(columns), "rows": rows, "from": 0, "offset": 0, "identity": "", "reset": True, "bits": 32}
    text = json.dumps(header, ensure_ascii=True).encode()
    # The values begin at a multiple of 8, where the browser can read them in place.
    text += b" " * (-(4 + len(text)) % 8)
    # What float32 cannot hold becomes infinite, which the page leaves out.
    with np.errstate(over="ignore"):
        values = [np.asarray(column, "<f4").tobytes() for column in columns.values()]
    return b"".join([struct.pack("<I", len(text)), text, *values])
