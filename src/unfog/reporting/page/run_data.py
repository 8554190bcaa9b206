"""Read from a run folder for the page: settings, events with causes and remedies, evaluations, data report and choices.

A run folder may be damaged, or come from a stranger: what cannot be read is left out, lengths are bounded, and texts
stay texts.
"""

from __future__ import annotations

import base64
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from unfog.files.safe_files import LARGEST_TEXT, list_folder, read_file
from unfog.files.seals import MACHINE_KEY, is_sealed, stored_key
from unfog.reporting.charts import as_file, curve_chart
from unfog.reporting.records import LARGEST, Row, finite_number, flatten
from unfog.text import format_bytes, without_secrets

_TROUBLES = (
    *("warning", "overfitting", "step_refused", "rolled_back", "out_of_memory", "passed_over", "quarantined"),
    *("disk_full", "not_removed", "averages_left_out", "sink_failed", "failed"),
)
_EVALUATIONS = 20  # latest evaluations, at most
_LARGEST_EVALUATION = 10 * 2**20  # bytes of a file; those that Unfog writes have a few thousand
_LARGEST_REPORT = 64 * 2**20  # bytes of data.json, which names every file
_CAPTIONS = "caption files"  # their key in data.json, `data.data_report.CAPTION_FILES`
_DEEPEST = 8  # lists in lists that are written out
_LONGEST = 2000  # characters of a field of an event
_OBEYS = ("value", "low", "high", "n", "real", "real_low", "real_high", "shuffled")
_TRUTH = ("value", "low", "high", "mean", "given", "shuffled", "n", "draws")
_TRUTH_HEADS = ("condition", "measure", "one draw", "95% interval", "mean of draws", "given", "shuffled", "n")
_OBEYS_TEXTS = ("condition", "measure", "obeyed")
_OBEYS_HEADS = ("condition", "measure", "samples", "95% interval", "real images", "shuffled", "n", "obeyed")
_WORTH_HEADS = ("condition", "shuffled", "95% interval", "not given", "95% interval")
_WORTH = ("loss", "n", "shuffled", "shuffled_low", "shuffled_high", "none", "none_low", "none_high")
_NUMBERS = ("value", "low", "high", "n", "n_reference", "real", "real_low", "real_high")
_LINES = ("x", "generated", "real", "low", "high")  # of a curve of an evaluation
_MOST_CHARTS = 4  # of spectra, and of histograms, of an evaluation
_LONGEST_CURVE = 10_000
_Event = Mapping[str, Any]


def read_settings(path: Path) -> dict[str, str]:
    """Return config.toml as dotted name -> text, without secrets; a file that is not TOML gives the reason."""
    if not os.path.exists(path):
        return {}
    try:
        values = flatten(tomllib.loads(read_file(path, path.parent, LARGEST_TEXT).decode("utf-8-sig")))
        # Numbers hold no secrets.
        return {
            name: plain_text(value) if isinstance(value, int | float) else without_secrets(plain_text(value))
            for name, value in values
        }
    except (OSError, ValueError, RecursionError) as error:
        return {"config.toml": f"cannot be read: {error}"}


def read_choices(events: Sequence[Row]) -> list[dict[str, str]]:
    """Return the settings that were chosen automatically: setting, value, reason."""
    names = {"setting": "name", "value": "value", "reason": "reason"}
    chosen = [event for event in events if event.get("kind") == "choice"]
    return [{key: plain_text(event.get(name, "")) for key, name in names.items()} for event in chosen]


def event_rows(events: Sequence[Row]) -> list[dict[str, Any]]:
    """Return events for the page: time, step, kind, details as text, trouble, cause and remedy."""
    rows = []
    for event in events:
        cause, remedy = _explain_event(
            {key: value if _is_plain(value) else plain_text(value) for key, value in event.items()}
        )
        fields = {key: value for key, value in event.items() if key not in ("time", "step", "kind")}
        step = finite_number(event.get("step"))
        rows.append(
            {
                "time": str(event.get("time", ""))[:24],
                "step": None if math.isnan(step) else step,
                "kind": plain_text(event.get("kind", ""))[:60],
                "details": " · ".join(f"{key} {plain_text(value)}" for key, value in fields.items())[:_LONGEST],
                "trouble": event.get("kind") in _TROUBLES,
                "cause": cause[:_LONGEST],
                "remedy": remedy,
            }
        )
    return rows


def read_data_report(folder: Path, events: Sequence[Row]) -> dict[str, Any]:
    """Return the data report without its list of files; where data.json is missing, what the event of it says."""
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(read_file(folder / "data.json", folder, _LARGEST_REPORT))
        if isinstance(stored, dict):
            counts = stored.get("class_counts")
            known = counts if isinstance(counts, dict) else {}
            classes = {str(name): int(n) for name, n in known.items() if finite_number(n) >= 0}
            skipped = [
                one for one in _lists(stored.get("files")) if one.get("status") not in ("used", "held out", None)
            ]
            named = [f"{plain_text(one.get('name'))}: {plain_text(one.get('reason'))}"[:_LONGEST] for one in skipped]
            leave = ("files", "class_counts", "known_counts", "read", "unlisted")
            if isinstance(columns := stored.get("columns"), dict):  # with digests, which tell people nothing
                kinds = _column_kinds(folder)
                stored["columns"] = [f"{name} ({kinds[name]})" if name in kinds else name for name in columns]
            if isinstance(ignored := stored.get("ignored"), dict) and _CAPTIONS in ignored:
                stored["captions"] = ignored.pop(_CAPTIONS)  # on disk among the files that are not images
            rest = {key: plain_text(value)[:_LONGEST] for key, value in stored.items() if key not in leave}
            rest = {key: text for key, text in rest.items() if text and (key, text) != ("unused_pages", "0")}
            return {"fields": rest, "classes": classes, "skipped": named[:100], "skipped_count": len(named)}
    rows = [event for event in events if event.get("kind") == "data"]
    fields = {
        key: plain_text(v) for key, v in (rows[-1] if rows else {}).items() if key not in ("time", "step", "kind")
    }
    return {"fields": fields, "classes": {}, "skipped": [], "skipped_count": 0}


def _column_kinds(folder: Path) -> dict[str, str]:
    """Return the kind of each column of a run's images by its name, such as "number"; {} if they cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        stored = tomllib.loads(read_file(folder / "config.toml", folder, LARGEST_TEXT).decode("utf-8-sig"))
        return {plain_text(one.get("name")): plain_text(one.get("kind")) for one in _lists(stored.get("columns"))}
    return {}


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the latest results of `unfog evaluate`, by step. A copy's `picture` is a path in the run, or None.

    `here` is True for those that this machine has measured: others came with the run, which may be a stranger's.
    """
    found = []
    there = list[Path]()
    with suppress(OSError):
        there = list_folder(run / "evaluations", run)
    files = [path for path in there if path.suffix == ".json"]
    key = stored_key(MACHINE_KEY)[0] if files else None
    for path in files:
        # People edit such files: damaged ones are left out.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            stored = json.loads(read_file(path, run, _LARGEST_EVALUATION))
            found.append((path.stat().st_mtime, _evaluation(path, stored, is_sealed(key, path.name, stored))))
    return sorted((one for _, one in sorted(found, key=itemgetter(0))[-_EVALUATIONS:]), key=itemgetter("step"))


def _evaluation(path: Path, stored: Mapping[str, Any], here: bool) -> dict[str, Any]:
    measured = []
    for one in [one for one in stored["measured"] if isinstance(one, dict)]:
        found = _numbers_and_texts(one, _NUMBERS, ("features", "resize", "note"))
        measured.append({"metric": str(one["metric"]), **found})
    copies = []
    for one in stored["copies"]:
        name = Path(str(one.get("picture", "")))
        # A run folder may come from a stranger: only an image beside the file is shown.
        inside = not name.is_absolute() and ".." not in name.parts and name.suffix == ".png"
        texts = {key: plain_text(one.get(key) or "") for key in ("by", "evidence", "severity", "remedy")}
        copies.append({**texts, "picture": path.parent / name if inside else None})
    return {
        "step": int(stored["step"]),
        "here": here,
        "verdict": str(stored.get("verdict", "")),
        "drawn": {str(name): plain_text(value) for name, value in stored["drawn"].items()},
        "measured": measured,
        "copies": copies,
        "charts": _charts(stored.get("curves"), measured),
        "tables": [*_condition_tables(stored)],
    }


def _numbers_and_texts(one: Mapping[str, Any], numbers: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """Return these entries of a stored result, which anybody may have edited: finite numbers or None, and texts."""
    found = {name: finite_number(one.get(name)) for name in numbers}
    plain = {name: None if math.isnan(number) else number for name, number in found.items()}
    return {**plain, **{name: plain_text(one.get(name) or "")[:_LONGEST] for name in texts}}


def _condition_tables(stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield title, heads and rows of the tables of conditions: whether samples obey them, and their worth."""
    if rows := [_numbers_and_texts(one, _OBEYS, _OBEYS_TEXTS) for one in _lists(stored.get("obeys"))]:
        cells = [
            (
                *(one["condition"], one["measure"], _short(one["value"]), _between(one["low"], one["high"])),
                f"{_short(one['real'])} ({_between(one['real_low'], one['real_high'])})"
                if one["real"] is not None
                else "–",
                *(_short(one["shuffled"]), _short(one["n"]), one["obeyed"]),
            )
            for one in rows
        ]
        title = f"Samples and what was asked, by a judge: {plain_text(stored.get('judge') or '')[:_LONGEST]}"
        yield {"title": title, "heads": _OBEYS_HEADS, "rows": cells}
    if rows := [_numbers_and_texts(one, _TRUTH, ("condition", "measure")) for one in _lists(stored.get("truth"))]:
        cells = [
            (
                *(one["condition"], one["measure"], _short(one["value"]), _between(one["low"], one["high"])),
                *(_short(one[name]) for name in ("mean", "given", "shuffled", "n")),
            )
            for one in rows
        ]
        title = f"Draws and the held-out images, {_short(rows[0]['draws'])} draws for each"
        yield {"title": title, "heads": _TRUTH_HEADS, "rows": cells}
    if rows := [_numbers_and_texts(one, _WORTH, ("condition",)) for one in _lists(stored.get("worth"))]:
        which = ("shuffled", "none")
        cells = [
            (
                one["condition"],
                *(t for k in which for t in (_short(one[k]), _between(one[f"{k}_low"], one[f"{k}_high"]))),
            )
            for one in rows
        ]
        loss, n = _short(rows[0]["loss"]), _short(rows[0]["n"])
        title = f"Rise of the held-out loss, {loss} of {n} images, with conditions of others or none"
        yield {"title": title, "heads": _WORTH_HEADS, "rows": cells}


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.4g} to {high:.4g}"


def _charts(curves: object, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return title and `data:` URI of the charts of spectra and histograms of channels: of the farthest channels."""
    distances = {one["metric"]: one["value"] or 0.0 for one in measured}

    def distance(curve: Mapping[str, Any]) -> float:
        return float(distances.get(f"{curve['metric']}_{curve['channel']}", 0.0))

    found = list[dict[str, str]]()
    for metric in ("spectrum", "histogram"):
        own = [one for one in _lists(curves) if one.get("metric") == metric and isinstance(one.get("channel"), int)]
        chosen = sorted(own, key=distance, reverse=True)[:_MOST_CHARTS]
        for curve in sorted(chosen, key=itemgetter("channel")):
            lines = {name: [finite_number(x) for x in curve[name][:_LONGEST_CURVE]] for name in _LINES}
            chart = curve_chart({**lines, "metric": metric, "channel": curve["channel"]})
            if chart:
                uri = f"data:image/svg+xml;base64,{base64.b64encode(as_file(chart)).decode()}"
                found.append({"title": f"{metric} of channel {curve['channel']}", "picture": uri})
    return found


def plain_text(value: object, depth: int = 0) -> str:
    """Return any JSON value as a line of text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < LARGEST else "a number of over a hundred digits"
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        return ", ".join(plain_text(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain_text(item, depth + 1)}" for key, item in value.items())
    return str(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    # A whole number may have thousands of digits, which Python refuses to write.
    return isinstance(value, str) or math.isfinite(finite_number(value))


def _lists(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _explain_event(event: _Event) -> tuple[str, str]:
    """Return cause and remedy of an event of events.jsonl; "" for what is not known."""
    explain = _EXPLANATIONS.get(str(event.get("kind")))
    return explain(event) if explain is not None else ("", "")


def _skipped_step(event: _Event) -> tuple[str, str]:
    layer, names = event.get("layer"), event.get("images")
    where = f" in {layer}" if layer else ""
    images = f" from {', '.join(map(str, names[:3]))}" if isinstance(names, list) and names else ""
    cause = f"the gradient was not finite{where}{images}; the weights were left as they were"
    # In 16 bits the range or the rounding is the likely cause, in fp32 an image or the rate.
    if event.get("precision") in ("fp16", "bf16"):
        return cause, "one alone does no harm; if it returns, resume with --precision fp32 or a lower --lr"
    return cause, "one alone does no harm; if it returns, look at the named images, or resume with a lower --lr"


def _rolled_back(event: _Event) -> tuple[str, str]:
    to, lr = event.get("to", "an earlier step"), event.get("lr", "half of it")
    return (
        f"{event.get('reason', 'training diverged')}; the weights of step {to} are back, at the learning rate {lr}",
        "training goes on by itself; if it happens again, start with a lower --lr",
    )


def _out_of_memory(event: _Event) -> tuple[str, str]:
    fewer = f"{event.get('microbatch', 'fewer')} images at a time"
    return (
        f"the device had too little memory; training goes on with {fewer}, at the same batch size",
        "nothing is lost; --microbatch gives this size from the start",
    )


def _failed(event: _Event) -> tuple[str, str]:
    # The reason is that of the error message, which has its own remedy.
    return str(event.get("reason", "")), "mend the cause, then resume the run: it goes on from its newest checkpoint"


def _disk_full(event: _Event) -> tuple[str, str]:
    needed, free = (finite_number(event.get(name)) for name in ("needed", "free"))
    cause = str(event.get("reason") or "the disk is full")
    if needed >= 0:
        cause += f": a checkpoint needs {format_bytes(needed)}, and {format_bytes(free)} are free"
    return cause, "free some space: the run waits, and saves as soon as there is room"


def _reason(remedy: str) -> Callable[[_Event], tuple[str, str]]:
    return lambda event: (str(event.get("reason", "")), remedy)


# Names of kinds as they are on disk, which older runs have as well.
_EXPLANATIONS: dict[str, Callable[[_Event], tuple[str, str]]] = {
    "step_refused": _skipped_step,
    "rolled_back": _rolled_back,
    "out_of_memory": _out_of_memory,
    "failed": _failed,
    "passed_over": _reason("an older checkpoint took its place; check the disk, and run `unfog doctor` on the run"),
    "disk_full": _disk_full,
    "not_removed": _reason("old checkpoints only take up space; permit their removal, or delete them"),
    "averages_left_out": _reason("an EMA of another length is rebuilt from the other snapshots; free some space"),
    "sink_failed": _reason("the record in the run folder is whole; only the copy in the tracker ends here"),
    "quarantined": _reason("another image takes its place; mend or remove the file before the next run"),
    "warning": lambda event: (str(event.get("message", "")), ""),
    "overfitting": lambda event: (
        "the held-out loss rises while the training loss falls",
        "stop here and sample from the best checkpoint, or train with more images, --flip or --augment",
    ),
    "stopped": lambda event: (
        f"{event.get('reason') or 'a stop was requested'}; the run is saved",
        "resume it: it goes on where it stopped",
    ),
    "resumed": lambda event: ("the run was continued from its newest checkpoint", ""),
    "length": _reason(""),
}
