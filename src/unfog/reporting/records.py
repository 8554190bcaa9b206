"""Record of a run: metrics.jsonl and events.jsonl, one JSON object a line, flushed at once.

A process may be killed in the middle of a line. So a line that does not parse is skipped when reading, and removed
from the end of the file when it is opened again. Lines that the disk refuses wait in memory and are written in order.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unfog.files.safe_files import open_file, read_file

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]

SESSION_STARTS = ("started", "resumed")
SESSION_ENDS = ("finished", "stopped", "failed")
ALIVE = ("running", "standing still")  # states of a run whose process exists
NOT_BEGUN = "not begun"
EXPORTED = "exported"  # weights of another run, which train no further
MIRROR = "mirror"  # copy of a run, which trains elsewhere
STATES = (*ALIVE, *SESSION_ENDS, "killed", NOT_BEGUN, EXPORTED, MIRROR)  # of `run_state`, and of copies
# Activities of a running run that goes on only when somebody helps, by what it waits for.
WAITING = {
    "disk": "waiting for disk space",
    "folder": "waiting for the run folder",
    "images": "waiting for images",
}
# Kinds of events.
LENGTH_EVENT = "length"  # the run was planned anew, for its time budget
PAUSE_EVENT = "pause"  # a run with a time budget stood still
# Last heartbeats of a resume that failed before training; they say nothing about the session before.
UNBEGUN = ("failed: RequestError", "failed: Interrupted", "interrupted")

SMOOTHED_FROM = 20  # with fewer points a smoothed line says nothing
LARGEST = 1e100  # beyond it a number is a mistake, and an axis would overflow
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LARGEST_RECORD = 2**30  # bytes; a million lines have fewer


class _JsonLines:
    """An append-only file of JSON objects, flushed per line.

    Opening it repairs what a kill left: from the end back to the last line that stays, `last`, lines that do not
    parse go (`damaged` counts them), as do whole lines that `keep` turns down. What comes before is not looked at, so
    opening a long record takes no longer than a short one.
    """

    def __init__(self, path: Path, keep: Callable[[Row], bool] = lambda row: True) -> None:
        self.damaged, self.last = _repair(path, keep)
        self._pending, self._path = bytearray(), path
        self._file = open_file(path, "ab", path.parent, buffering=0)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line. OSError when the disk refuses; the line is kept and goes first the next time."""
        self._pending += json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        self._flush()

    def sync(self) -> None:
        """Make all lines survive a power cut, not only the end of this process."""
        self._flush()
        with suppress(OSError):  # some file systems cannot synchronise; the lines are written all the same
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write pending lines, if the disk takes them by now, and close."""
        try:
            self._flush()
        finally:
            with suppress(OSError):
                self._file.close()

    def _flush(self) -> None:
        # A write may take a part only, for example on a full disk: the rest stays for the next one.
        opened = False
        while self._pending:
            try:
                del self._pending[: self._file.write(self._pending)]
            except OSError as error:
                # The file of a mount that died stays dead when the mount is back. It is not created: at the place of a
                # mount that is gone, it would be another file.
                if opened or error.errno in _FULL or not os.path.lexists(self._path):
                    raise
                file, self._file, opened = self._file, open_file(self._path, "ab", self._path.parent, buffering=0), True
                with suppress(OSError):
                    file.close()


class Metrics(_JsonLines):
    """metrics.jsonl: a line per log, of numbers and lists of numbers; a non-finite number is written as null.

    null keeps every column numeric for whatever tool reads it. Lines of steps after `start`, the step that a
    run resumes from, are dropped: they will be written again, so an interrupted run ends with the same log.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.dropped: tuple[float, float] | None = None
        """The first and the last step whose lines were dropped."""

        def keep(row: Row) -> bool:  # called from the last line backwards
            if (step := _step(row)) <= start:
                return True
            self.dropped = (step, self.dropped[1] if self.dropped else step)
            return False

        super().__init__(path, keep)

    def write(self, step: int, images: int, seconds: float, values: Mapping[str, object]) -> None:
        """Append a line: `images` seen and `seconds` of wall time spent since step 0, then the values."""
        row = {"step": step, "images": images, "seconds": round(seconds, 3), **values}
        self.append(json_values(row))


class Events(_JsonLines):
    """events.jsonl: a line per event. History: a resume keeps all of it.

    A non-finite number is written as a string ("nan", "inf", "-inf"): here its kind is the news.
    """

    def write(self, kind: str, step: int, fields: Mapping[str, object]) -> None:
        """Append a line stamped with the time (ISO 8601, UTC) and synchronise the file."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.append(json_values({"time": time, "step": step, "kind": kind, **fields}, str))
        self.sync()


def read_metrics(path: Path, last: int | None = None) -> list[Row]:
    """The whole lines of a metrics.jsonl in order, null as nan; [] if there is no file. `last`: bytes to read."""
    rows = []
    for row in _read(path, last):
        with suppress(RecursionError):  # lists in lists in lists
            rows.append(_nan_for_null(row))
    return rows


def read_events(path: Path, last: int | None = None) -> list[Row]:
    """The whole lines of an events.jsonl in order; [] if there is no file. `last`: bytes to read."""
    return list(_read(path, last))


def drop_undone_events(events: Sequence[Row]) -> list[Row]:
    """Leave out the events of steps that a later session trained again, as it resumed from an earlier checkpoint."""
    kept, begun = list[Row](), math.inf
    for row in reversed(events):
        step = finite_number(row.get("step"))
        if not step > begun:
            kept.append(row)
        if row.get("kind") in SESSION_STARTS and step < begun:
            begun = step
    return kept[::-1]


def run_state(events: Sequence[Row], heartbeat: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the state of a run and details of it, from its last event and the heartbeat of `Heartbeat.read`.

    The state is finished, running, standing still, stopped, killed, failed or not begun.
    """
    sessions = [row for row in events if row.get("kind") in (*SESSION_STARTS, *SESSION_ENDS)]
    last, beat = sessions[-1] if sessions else {}, heartbeat or {}
    if beat.get("alive") and beat.get("still"):
        return "standing still", str(beat["still"])
    if beat.get("alive"):
        return "running", str(beat.get("doing", ""))
    if last.get("kind") in SESSION_ENDS:
        reason = str(last.get("reason", ""))
        interrupted = reason.startswith("KeyboardInterrupt")
        return ("stopped", "it was interrupted twice") if interrupted else (str(last["kind"]), reason)
    doing = str(beat.get("doing", ""))
    if last and doing in UNBEGUN:
        return "killed", ""
    if doing in ("finished", "stopped") or doing.startswith("failed"):
        return doing.split(":")[0], doing.partition(": ")[2]
    return ("killed", doing) if last else (NOT_BEGUN, "")


def finite_number(value: object) -> float:
    """A finite number that a chart can hold, or nan: people edit records, and programs write words into them."""
    # A bool is an int in Python, but no number in a record.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of the values of nested tables, such as ("training.batch", 16)."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most so many bytes; {} if it is missing, a link, or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(read_file(path, path.parent, limit))
        if isinstance(value, dict):
            return value
    return {}


def finite_column(metrics: Sequence[Row], name: str) -> tuple[Floats, Floats]:
    """(steps, values) of the lines that hold a finite number of this name."""
    rows = [(finite_number(row.get("step", 0)), finite_number(row.get(name))) for row in metrics]
    points = np.array(rows, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    return points[:, 0], points[:, 1]


def smoothed(values: Floats) -> Floats:
    """Exponential average over a fortieth of the values, but at first over an eighth of those so far."""
    smoothed = np.empty_like(values)
    average = 0.0
    for i, value in enumerate(values):
        # A wider window from the first value on would drag the high losses of the beginning along the whole line.
        average += (value - average) / max(1.0, min(len(values) / 40, (i + 1) / 8))
        smoothed[i] = average
    return smoothed


def _read(path: Path, last: int | None = None) -> Iterator[Row]:
    try:
        with open_file(path, "rb", path.parent) as file:
            size, limit = os.fstat(file.fileno()).st_size, last or _LARGEST_RECORD
            start = max(0, size - limit)
            file.seek(start)
            lines = file.read(min(size, limit)).split(b"\n")  # read() sets aside all that it is asked for
    except FileNotFoundError:
        return
    for line in lines[start > 0 :]:  # the first of a part is cut
        row = _parse(line)
        if row is not None:
            yield row


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the first is also what undecodable bytes raise
        return None
    return row if isinstance(row, dict) else None


def _repair(path: Path, keep: Callable[[Row], bool]) -> tuple[int, Row | None]:
    """Cut the file after the last line that parses and that `keep` accepts.

    Returns the number of lines after it that did not parse, and that line.
    """
    if not os.path.lexists(path) or not path.lstat().st_size:
        return 0, None
    damaged, last = 0, None
    # Mapped instead of read: only the end of a long record is looked at.
    with open_file(path, "r+b", path.parent) as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            size = end = len(content)
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                line = content[start:end]
                row = _parse(line)
                if row is not None and keep(row):
                    last = row
                    break
                damaged += row is None and line != b"\n"
                end = start
        if end < size:
            file.truncate(end)
        elif not line.endswith(b"\n"):
            file.seek(end)
            file.write(b"\n")
    return damaged, last


def _step(row: Row) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else math.inf


def json_values(value: object, non_finite: Callable[[float], object] = lambda number: None) -> Any:
    """Return `value` as JSON can hold it: numpy to Python, paths to text, floats that JSON lacks by `non_finite`."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item, non_finite) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return json_values(value.tolist(), non_finite)
    if isinstance(value, list | tuple):
        return [json_values(item, non_finite) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    return value


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nan_for_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nan_for_null(item) for item in value]
    return math.nan if value is None else value
