"""Details of one run, all but its curves: settings, choices, previews, checkpoints, evaluations and findings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from unfog.config.requests.train import ResumeRequest
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.errors import RequestError
from unfog.files.positions import pread
from unfog.files.safe_files import open_file
from unfog.reporting.channel_sheets import FOLDER as CHANNELS
from unfog.reporting.page.run_data import event_rows, read_choices, read_data_report, read_evaluations
from unfog.reporting.records import SESSION_STARTS, Row, drop_undone_events, json_values
from unfog.serve.child_processes import command_text
from unfog.serve.controls import remedy_settings, run_commands, setting_words
from unfog.serve.metric_columns import Sample, parse_lines
from unfog.serve.run_files import (
    checkpoint_steps,
    conditions_of,
    numbered_files,
    plain_settings,
    read_json,
    read_settings,
    stat_of,
)
from unfog.serve.runs import RunEntry
from unfog.text import sanitize
from unfog.values.colour_map import category_colours
from unfog.values.condition_format import TEXT
from unfog.values.kinds.image_kinds import IMAGE_KINDS

_FINDINGS, _MOST_EVENTS = 200, 5000  # shown, at most
_EVENT_BYTES = 2**22  # from the end of events.jsonl
_DOCTOR_FOLDERS = 50  # that are looked into for the findings about a run
# Beginnings of settings that are facts about the images rather than a person's choice.
_RESOLVED = ("source", "fingerprint", "classes", "columns", "latents", "autoencoder.")


def run_detail(run: RunEntry, result: Path | None = None, sample: Sample | None = None) -> dict[str, Any]:
    """Return the details of a run for the page. Its columns are read unless there is a `sample` of a long record.

    `result` is the folder of the newest check of it that the page has started.
    """
    columns, rows = (run.columns, run.columns.rows) if sample is None else sample
    settings, conditions = run.unchanged("config.toml", lambda: (read_settings(run.path), _conditions(run.path)))
    events = drop_undone_events(run.events)
    changed = {
        name: [_defaults().get(name), value]
        for name, value in settings.items()
        if value != _defaults().get(name) and not name.startswith(_RESOLVED)
    }
    classes = settings.get("classes")
    detail = {
        "id": run.id,
        "name": run.name,
        "status": run.as_json(),
        "settings": settings,
        "changed": changed,
        "choices": read_choices(events),
        "columns": columns.names,
        "rows": rows,
        "sampled": sample is not None,
        "previews": list(run.previews),
        "channels": list(numbered_files(run.path, CHANNELS)),
        "denoising": list(numbered_files(run.path, "denoising")),
        "checkpoints": checkpoint_steps(run.path),
        "best": run.status.best_step if run.status else None,
        "ema": _ema(run.path, settings),
        "classes": [sanitize(str(name)) for name in classes] if isinstance(classes, list) else [],
        "conditions": conditions,
        "evaluations": run.unchanged("evaluations", lambda: _evaluations(run.path)),
        "counts": {kind: sum(row.get("kind") == kind for row in events) for kind in ("step_refused", "rolled_back")},
        "findings": read_findings(run.path, result),
        "data": run.unchanged("data.json", lambda: read_data_report(run.path, events)),
        "contact_sheet": stat_of(run.path / "contact-sheet.png") is not None,
        "commands": run_commands(run.path),
    }
    return dict(json_values(detail))


def _conditions(run: Path) -> list[dict[str, Any]]:
    """Return name, kind, categories and ranges of each condition of a run besides the class, for its field."""
    found = []
    for one in conditions_of(run).columns:
        size = len(one.statistics) // 4
        low, high = one.statistics[2 * size : 3 * size], one.statistics[3 * size :]
        names = [] if one.kind == TEXT else list(one.categories)  # of a text its merges, which no field shows
        colours = [f"#{bytes(each).hex()}" for each in category_colours(names)] if one.kind == "mask" else []
        facts = {"name": one.name, "kind": one.kind, "categories": names, "colours": colours}
        found.append({**facts, "low": low, "high": high, "image": one.kind in IMAGE_KINDS})
    return found


def new_events(run: RunEntry, start: int) -> dict[str, Any]:
    """Return the events after a byte offset, with cause and remedy where they are known.

    `reset`: events before them were undone by a resume, or the file is another one, so these are all there are.
    """
    rows, end = _event_rows(run.path, start)
    # A resume undoes events of steps that are trained again, and the page may show some of them.
    reset = end < start or any(row.get("kind") in SESSION_STARTS for row in rows)
    if reset and start:
        rows, end = _event_rows(run.path, 0)
    shown = drop_undone_events(rows)[-_MOST_EVENTS:]
    return {"events": event_rows(shown), "offset": end, "reset": reset}


def _event_rows(run: Path, start: int) -> tuple[list[Row], int]:
    """Return the rows of events.jsonl from a byte offset on, and the offset after the last whole line."""
    try:
        with open_file(run / "events.jsonl", "rb", run) as file:
            size = os.fstat(file.fileno()).st_size
            first = max(start, size - _EVENT_BYTES)
            data = pread(file.fileno(), max(0, size - first), first)
    except OSError:
        return [], 0
    # The last line may still be written; it is read the next time.
    whole = data.rfind(b"\n") + 1
    return parse_lines(data[:whole].split(b"\n"))[0], min(first, size) + whole


@cache
def _defaults() -> dict[str, Any]:
    return plain_settings(tomllib.loads(to_toml(Config())))


def _ema(run: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the steps of the EMA snapshots and the widths of their averages; None if an EMA cannot be rebuilt."""
    steps = list(numbered_files(run, "averages", ".safetensors"))
    width, second = settings.get("ema.width"), settings.get("ema_snapshots.second")
    return {"snapshots": steps, "widths": [one for one in (width, second) if one]} if len(steps) > 1 else None


def _evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the latest results of `unfog evaluate`, by step. Their pictures are in the report."""
    return [{**one, "copies": [{**copy, "picture": None} for copy in one["copies"]]} for one in read_evaluations(run)]


def read_findings(run: Path, result: Path | None) -> list[dict[str, Any]] | None:
    """Return the findings of the doctor about a run, newest check; None if it was not checked."""
    places = [result] if result is not None else []
    # Where `unfog doctor RUN` writes by itself: doctor/ and the name of the run, with a number behind it.
    beside = [Path("doctor") / name for name in _names(Path("doctor")) if name.startswith(run.name)]
    beside.sort(key=lambda path: stat_of(path / "findings.json") or (0, 0), reverse=True)
    for place in [*places, *beside[:_DOCTOR_FOLDERS]]:
        stored = read_json(place / "findings.json", place)
        if not isinstance(stored, Mapping) or not isinstance(stored.get("findings"), list):
            continue
        if place == result or stored.get("title") == f"Checks of {run}":
            return [_finding(one, run) for one in stored["findings"][:_FINDINGS] if isinstance(one, Mapping)]
    return None


def _finding(one: Mapping[str, Any], run: Path) -> dict[str, Any]:
    texts = {name: str(one.get(name, ""))[:4000] for name in ("code", "severity", "evidence", "remedy")}
    settings, command = remedy_settings(texts["remedy"]), None
    if settings is not None:
        with suppress(RequestError):
            words = setting_words({"settings": settings}, ResumeRequest)
            command = command_text(["resume", str(run), *words])
    found = {"id": texts["code"], "severity": texts["severity"], "text": texts["evidence"], "remedy": texts["remedy"]}
    return {**found, "command": command}


def _names(folder: Path) -> list[str]:
    try:
        return [] if os.path.islink(folder) else os.listdir(folder)
    except OSError:
        return []
