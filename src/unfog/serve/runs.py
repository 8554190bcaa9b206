"""The runs of a folder by number: their states, sizes of their records, and the numbers of their previews.

A page names a run by a number from this list, and never by a path.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from unfog.files.safe_files import disk_usage
from unfog.process.console_log import LOG_FILE
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_place import PATIENCE, folder_identity
from unfog.process.run_status import RunStatus, best_metric, find_runs
from unfog.reporting.records import ALIVE, Row, read_events, read_metrics
from unfog.serve.metric_columns import LONG, MetricColumns, Sample, Thinner, read_sample
from unfog.serve.run_files import checkpoint_steps, machine_use, numbered_files, read_settings, saved_values, stat_of
from unfog.text import sanitize
from unfog.training.settings import Evaluate

T = TypeVar("T")

_LAST_METRICS, _LAST_EVENTS = 2**14, 2**20  # bytes from the end of a record that give the state of a run
_IDLE_TICKS = 5  # ticks between two looks at a run that does not run
_RESCAN_SECONDS, _SIZE_SECONDS = 3.0, 60.0  # between two searches for runs, and two sums of the disk space of one
_MOST_MEMORY = 2**29  # bytes of columns; those that were not used for longest go first
_RECORDS = ("metrics.jsonl", "events.jsonl", LOG_FILE, "heartbeat.json", "config.toml")


def number_of(text: str) -> int:
    """Return a number for a name: the same in each session, so that an address of the page stays right."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:6])


@dataclass
class RunEntry:
    """A run of the list, with what was read of it."""

    id: int
    path: Path
    name: str
    status: RunStatus | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of metrics.jsonl, events.jsonl and console.log."""
    previews: tuple[int, ...] = ()
    """Steps of the sample grids, in order."""
    disk: int | None = None
    columns: MetricColumns = field(init=False)
    thinner: Thinner = field(init=False)
    kept: dict[str, tuple[object, Any]] = field(default_factory=dict)
    """What was read of files that seldom change, by their names: state of the file, and the result."""
    used: float = 0.0
    away_since: float | None = None
    """Time (`time.monotonic`) since which its folder cannot be reached; None while it can be."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the columns are read."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request reads the record."""
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _stamp: tuple[object, ...] = ()
    _events: tuple[object, list[Row]] = (None, [])
    _metric: tuple[object, str] = (None, Evaluate.best)
    _samples: object = None
    _summed: float = -math.inf

    def __post_init__(self) -> None:
        # Texts: each is looked at in every tick, and a Path takes longer to make than a file to look at.
        self._identity = folder_identity(self.path)
        self._record_files = [os.path.join(self.path, name) for name in _RECORDS]
        self._samples_folder = os.path.join(self.path, "samples")
        self.drop_columns()

    def drop_columns(self) -> None:
        """Free the memory of the columns; they are read again when they are asked for."""
        self.columns = MetricColumns(self.path / "metrics.jsonl")
        self.thinner = Thinner(self.columns)
        self._read_whole = False

    def read_columns(self) -> None:
        """Read the lines that are new. Its `lock` is to be held."""
        self.columns.update()
        self._read_whole = True
        self.kept.pop("metrics.jsonl", None)  # the sample

    def sample(self) -> Sample | None:
        """Return lines at even distances of a long record that has not been read yet, else None."""
        if self._read_whole or self.sizes.get("metrics.jsonl", 0) < LONG:
            return None
        try:
            return self.unchanged("metrics.jsonl", lambda: read_sample(self.path / "metrics.jsonl"))
        except OSError:
            return None

    @property
    def memory(self) -> int:
        """Bytes of the columns, and of what was made of them."""
        return self.columns.memory + self.thinner.memory

    def unchanged(self, name: str, read: Callable[[], T]) -> T:
        """Return `read()` of a file or folder of the run, or what it returned before if that has not changed since."""
        found = stat_of(os.path.join(self.path, name))
        if found is None:
            return read()
        if self.kept.get(name, (None, None))[0] != found:
            self.kept[name] = found, read()
        value: T = self.kept[name][1]
        return value

    def is_out_of_reach(self) -> bool:
        """Return True if its folder cannot be looked at, or another one is at its path; False if it was removed."""
        try:
            with os.scandir(self.path) as entries:  # which no cache of the system answers
                next(entries, None)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return folder_identity(self.path) != self._identity

    def set_away(self, away: bool) -> bool:
        """Note whether the folder can be reached. Return True if that has changed."""
        if away == (self.away_since is not None):
            return False
        self.away_since = time.monotonic() if away else None
        if away and self.status is not None:
            reason = "its disk or mount cannot be reached"
            self.status = replace(self.status, state="unreadable", detail=reason)
        if not away:
            self._identity, self._stamp = folder_identity(self.path), ()  # the disk may number its files anew
        return True

    def refresh(self) -> bool:
        """Read what has changed. Return True if anything has. One thread at a time reads; others wait for it."""
        with self._reading:
            if self.away_since is not None:
                return False
            try:
                return self._refresh()
            except Exception as error:  # what nobody foresaw in one run must not hide all others
                reason = sanitize(f"{type(error).__name__}: {error}")
                self.status = RunStatus(
                    self.path, "unreadable", reason, 0, 0, math.nan, Evaluate.best, math.nan, None, math.nan
                )
                return False

    def _refresh(self) -> bool:
        found = dict(zip(_RECORDS, map(stat_of, self._record_files)))
        if found["config.toml"] is None and self.status is not None and self.is_out_of_reach():
            return self.set_away(True)
        samples = stat_of(self._samples_folder)
        # No file changes when a process is killed or suspended.
        beat = (Heartbeat.read(self.path) or {}) if self.running else {}
        stamp = (*found.values(), samples, beat.get("alive"), beat.get("still"))
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.sizes = {name: (found[name] or (0, 0))[1] for name in _RECORDS[:3]}
        if samples != self._samples:
            self._samples, self.previews = samples, numbered_files(self.path, "samples")
        if self._events[0] != found["events.jsonl"]:
            self._events = found["events.jsonl"], _tail_of(read_events, self.path / "events.jsonl", _LAST_EVENTS)
        metrics = _tail_of(read_metrics, self.path / "metrics.jsonl", _LAST_METRICS)
        if self._metric[0] != found["config.toml"]:
            self._metric = found["config.toml"], best_metric(self.path / "config.toml")
        now = RunStatus.read(self.path, metrics, self._events[1], self._metric[1])
        self.status = self._with_best(now)
        return True

    def _with_best(self, now: RunStatus) -> RunStatus:
        """Take a better value from before the tail that was read: the best so far, or that of a checkpoint."""
        before = self.status
        candidates = [(now.best, now.best_step)]
        if before is not None and before.metric == now.metric and (before.best_step or 0) <= now.step:
            candidates.append((before.best, before.best_step))
        else:
            candidates += saved_values(self.path, now.metric)
        known = [one for one in candidates if math.isfinite(one[0])]
        if not any(step for _, step in known):  # only before training
            return now
        best, step = (max if now.higher_is_better else min)(known, key=lambda one: one[0])
        return replace(now, best=best, best_step=step)

    @property
    def events(self) -> list[Row]:
        """The last rows of events.jsonl, read when it changed."""
        return self._events[1]

    @property
    def running(self) -> bool:
        """True while its process exists, even if that stands still."""
        return self.status is not None and self.status.state in ALIVE

    def sum_disk(self) -> bool:
        """Sum the disk space anew if that is due. Return True if it has changed."""
        if time.monotonic() - self._summed < (_SIZE_SECONDS if self.running or self.disk is None else math.inf):
            return False
        before, self.disk = self.disk, disk_usage(self.path)
        self._summed = time.monotonic()
        return self.disk != before

    @property
    def can_draw(self) -> bool:
        """True if a whole checkpoint is there, and not one of an autoencoder."""
        return bool(checkpoint_steps(self.path)) and not read_settings(self.path).get("autoencoder.factor")

    def as_json(self) -> dict[str, Any]:
        """Return the row of the list: number, name and status of the run, and the bytes of its files. No paths."""
        if self.status is None:
            self.refresh()
        assert self.status is not None
        row = self.status.as_json(bytes_on_disk=self.disk or 0)
        row.pop("run"), row.pop("broken_checkpoints"), row.pop("age_seconds")
        written = [found[0] for found in map(stat_of, self._record_files) if found is not None]
        age = max(0.0, time.time() - max(written) / 1e9) if written else None
        row |= {"bytes": self.disk, "age": age, "higher": self.status.higher_is_better}
        row |= {name.partition(".")[0]: size for name, size in self.sizes.items()}
        return {"id": self.id, "name": self.name, **row, **(machine_use(self.path) if self.running else {})}


def list_rows(runs: Iterable[RunEntry]) -> list[dict[str, Any]]:
    """Return the rows of the runs: first that of the newest one that can draw, which Draw opens; then by age."""
    rows = [(run, run.as_json()) for run in runs]
    rows.sort(key=lambda pair: math.inf if pair[1]["age"] is None else pair[1]["age"])
    opened = next((run for run, _ in rows if run.can_draw), None)
    return [row for _, row in sorted(rows, key=lambda pair: pair[0] is not opened)]


class RunList:
    """All runs in a folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[int, RunEntry] = {}
        self._identity = folder_identity(folder)
        self._lock = threading.RLock()
        self._ticks, self._scanned = 0, -math.inf

    def __getitem__(self, number: int) -> RunEntry:
        """Return a run by its number. KeyError if it is not in the list."""
        return self._entries[number]

    def __iter__(self) -> Iterator[RunEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def scan(self, seldom: bool = False) -> bool:
        """Search the folder; `seldom`: at most every three seconds. Return True if runs have come or gone.

        Runs whose disk or mount is gone stay in the list for ten minutes.
        """
        with self._lock:
            if seldom and time.monotonic() - self._scanned < _RESCAN_SECONDS:
                return False
            self._scanned = time.monotonic()
            try:
                paths = [path for path in find_runs(self.folder) if _is_inside(path, self.folder)]
            except OSError:  # not made yet, or gone
                paths = []
            known = {entry.path: entry for entry in self}
            away = self._out_of_reach(known, paths)
            numbers = {entry.id for entry in away}
            changed = [entry.set_away(entry.id in numbers) for entry in known.values()]
            kept = [entry for entry in away if time.monotonic() - (entry.away_since or 0) < PATIENCE]
            found = [known.get(path) or self._entry(path) for path in paths]
            before = self._entries.keys()
            self._entries = {entry.id: entry for entry in sorted([*found, *kept], key=lambda one: one.path)}
            return before != self._entries.keys() or any(changed)

    def _out_of_reach(self, known: Mapping[Path, RunEntry], paths: Sequence[Path]) -> list[RunEntry]:
        """Return the known runs that were not found, as they, or the folder of all, cannot be reached."""
        there, now = set(paths), folder_identity(self.folder)
        missing = [entry for path, entry in known.items() if path not in there]
        if now != self._identity and missing and len(missing) == len(known):
            return missing
        self._identity = now
        return [entry for entry in missing if entry.is_out_of_reach()]

    def tick(self, everything: bool = False) -> list[RunEntry]:
        """Look at the runs once, at those that do not run more seldom. Return those that have changed."""
        with self._lock:
            self._ticks += 1
            turn = self._ticks % _IDLE_TICKS
            # A fifth of the idle runs in each tick, so that a folder of hundreds costs evenly and not in bursts.
            due = [one for i, one in enumerate(self) if everything or one.running or i % _IDLE_TICKS == turn]
            changed = [one for one in due if one.refresh()]
            summed = next((one for one in due if one.sum_disk()), None)  # one a tick: it looks at every file
            return changed + ([summed] if summed is not None and summed not in changed else [])

    def read_columns(self, entry: RunEntry) -> MetricColumns:
        """Return the columns of a run, up to date. Drops those of other runs where memory is short.

        Its `lock` is to be held.
        """
        entry.used = time.monotonic()
        entry.read_columns()
        by_use = sorted((one for one in self if one is not entry), key=lambda one: one.used)
        total = sum(one.memory for one in self)
        for one in by_use:
            if total > _MOST_MEMORY:
                total -= one.memory
                one.drop_columns()
        return entry.columns

    def _entry(self, path: Path) -> RunEntry:
        name = path.relative_to(self.folder).as_posix() if path != self.folder else path.resolve().name
        number = number_of(name)
        while number in self._entries:  # 48 bits: once in a lifetime
            number += 1
        return RunEntry(number, path, sanitize(name))


def _is_inside(path: Path, folder: Path) -> bool:
    """Return False for a link that leads out of the folder."""
    if not any(os.path.islink(one) for one in (path, path.parent) if one != folder):
        return True
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def _tail_of(read: Callable[[Path, int], list[Row]], path: Path, last: int) -> list[Row]:
    try:
        return read(path, last)
    except OSError:
        return []
