"""Status of a run, read from its small files alone: state, step, time left, best metric, disk space and age."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from unfog.files.locks import MIRROR_MARK
from unfog.files.safe_files import disk_usage, read_file
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import format_duration
from unfog.reporting.records import (
    ALIVE,
    EXPORTED,
    MIRROR,
    SESSION_ENDS,
    STATES,
    UNBEGUN,
    WAITING,
    Row,
    drop_undone_events,
    finite_column,
    finite_number,
    read_events,
    read_metrics,
    run_state,
)
from unfog.text import sanitize
from unfog.training.settings import Evaluate

# Beginning of the name of a checkpoint that was set aside, as it could not be read.
_BROKEN = ".broken-"
_LAST_METRICS, _LAST_EVENTS = 2**26, 2**20  # bytes read from the end; a run of 10,000 logs has 10 MB of metrics
_LARGEST_CONFIG, _LARGEST_MANIFEST = 2**20, 2**24
_EXPORTED_FILES = {"ema.safetensors"}  # of the checkpoint in an export: nothing that training could go on from
_MOST_ENTRIES = 100_000  # of a folder that is searched for runs
_PACE_LINES = 20  # lines of metrics whose pace gives the time left
_LONGEST = 60  # characters of a reason
# Numbers of a run for Prometheus: field of `RunStatus.as_json`, name, and help.
_GAUGES = (
    ("step", "unfog_run_step", "Optimizer steps done"),
    ("steps", "unfog_run_steps", "Optimizer steps in all"),
    ("seconds_left", "unfog_run_seconds_left", "Seconds until the end, while it trains"),
    ("best", "unfog_run_best", "Best value of the metric that chooses checkpoints"),
    ("bytes", "unfog_run_disk_bytes", "Disk space of the run folder"),
    ("age_seconds", "unfog_run_age_seconds", "Seconds since the run last wrote"),
    (
        "mirror_age_seconds",
        "unfog_run_mirror_age_seconds",
        "Seconds since the last copy to its mirror, in training",
    ),
)


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, as `unfog runs` lists it. None and nan stand for what is not recorded."""

    path: Path
    state: str
    """Running, standing still, finished, stopped, killed, failed, exported, mirror or not begun."""
    detail: str
    """Activity of a running run, reason why it stands still or has failed, or end of the run that a mirror has."""
    step: int
    steps: int
    """0 if the length is not recorded."""
    seconds_left: float
    metric: str
    """Metric by which the best checkpoint is chosen."""
    best: float
    best_step: int | None
    age: float
    """Seconds since the run last wrote."""
    mirror_age: float = math.nan
    """Seconds since the last whole copy to its mirror, while it trains."""

    @classmethod
    def read(
        cls,
        path: Path,
        metrics: Sequence[Row] | None = None,
        events: Sequence[Row] | None = None,
        metric: str | None = None,
    ) -> RunStatus:
        """Read the status of a run folder. Whatever is missing or damaged is left out.

        `metrics` and `events` are the last rows of its records, and `metric` is that of `best_metric`, where they were
        read before.
        """
        beat = Heartbeat.read(path) or {}
        events = _rows(read_events, path / "events.jsonl", _LAST_EVENTS) if events is None else events
        metrics = _rows(read_metrics, path / "metrics.jsonl", _LAST_METRICS) if metrics is None else metrics
        state, detail = run_state(drop_undone_events(events), beat)
        rows = [*metrics[-1:], beat] if state in ALIVE else [*metrics[-1:], *events[-1:], beat]
        step = max((int(step) for row in rows if (step := finite_number(row.get("step"))) > 0), default=0)
        lengths = [finite_number(row.get("steps")) for row in (*events, beat)]
        steps = next((int(count) for count in reversed(lengths) if count > 0), 0)
        # A heartbeat may be there all the same, of a resume that was refused.
        if not events and state not in ALIVE and (exported := _exported_step(path)) is not None:
            state, detail, step = EXPORTED, "", exported
        if state not in ALIVE and _is_mirror(path, beat):
            state, detail = MIRROR, state if state in SESSION_ENDS else ""
        metric = best_metric(path / "config.toml") if metric is None else metric
        best, best_step = _best(metrics, metric)
        trains = state == "running" and bool(steps) and detail not in WAITING.values()
        left = _seconds_left(metrics, steps - step) if trains else math.nan
        mirrored = _mirror_age(path, events) if state in ALIVE else math.nan
        detail = sanitize(" ".join(detail.split()))
        return cls(path, state, detail, step, steps, left, metric, best, best_step, _age(path), mirrored)

    @property
    def needs_no_training(self) -> bool:
        """True if no training is left to do: the run is finished, an export, or the mirror of a finished run."""
        return self.state in ("finished", EXPORTED) or (self.state, self.detail) == (MIRROR, "finished")

    @property
    def waits_for(self) -> str:
        """Name in `WAITING` of what a running run waits for; "" if it trains."""
        return next((name for name, doing in WAITING.items() if self.state == "running" and self.detail == doing), "")

    @property
    def state_text(self) -> str:
        """State with its details, in a few words: "running, 52 s left"."""
        if self.state == "running":
            doing = [] if self.detail in ("", "training") else [self.detail]
            left = [f"{format_duration(self.seconds_left)} left"] if math.isfinite(self.seconds_left) else []
            return ", ".join(["running", *doing, *left])
        reason = self.detail if self.state in ("failed", "standing still", MIRROR) else ""
        short = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST].rstrip()} …"
        return f"{self.state}: {short}" if short else self.state

    @property
    def headline(self) -> tuple[str, str]:
        """State and details of a run that has not recorded its end, for its report: "running", "60/150, 52 s left"."""
        return self.state, self.step_text + self.state_text.removeprefix(self.state)

    @property
    def step_text(self) -> str:
        return f"{self.step:,}/{self.steps:,}" if self.steps else f"{self.step:,}"

    @property
    def best_text(self) -> str:
        return "–" if math.isnan(self.best) else f"{self.metric} {self.best:.4g}"

    @property
    def higher_is_better(self) -> bool:
        return self.metric in Evaluate.HIGHER

    def as_json(self, bytes_on_disk: int | None = None) -> dict[str, Any]:
        """Return plain values, None for what is not recorded. Sums the disk space, which looks at every file, unless
        it is given.
        """
        return {
            "run": str(self.path),
            "state": self.state,
            "detail": self.detail,
            "step": self.step,
            "steps": self.steps or None,
            "seconds_left": _or_null(self.seconds_left),
            "metric": self.metric,
            "best": _or_null(self.best),
            "best_step": self.best_step,
            "bytes": disk_usage(self.path) if bytes_on_disk is None else bytes_on_disk,
            "age_seconds": _or_null(self.age),
            "waits_for": self.waits_for or None,
            "mirror_age_seconds": _or_null(self.mirror_age),
            "broken_checkpoints": [str(path) for path in broken_checkpoints(self.path)],
        }


def prometheus_text(runs: Sequence[RunStatus]) -> str:
    """Return the runs as gauges in the text format of Prometheus, which node_exporter reads from a file.

    What is not recorded is left out. Source: prometheus.io, "Exposition formats", version 0.0.4.
    """
    rows = [(run.as_json(), f'run="{_escaped(str(run.path))}"') for run in runs]
    lines = []
    for key, name, text in _GAUGES:
        lines += [f"# HELP {name} {text}.", f"# TYPE {name} gauge"]
        for row, named in rows:
            if row[key] is not None:
                more = f',metric="{_escaped(row["metric"])}"' if key == "best" else ""
                lines.append(f"{name}{{{named}{more}}} {row[key]}")
    lines += ["# HELP unfog_run_state 1 for the state of the run, else 0.", "# TYPE unfog_run_state gauge"]
    for row, named in rows:
        lines += [f'unfog_run_state{{{named},state="{state}"}} {int(row["state"] == state)}' for state in STATES]
    lines += ["# HELP unfog_run_waiting 1 for what the run waits for, else 0.", "# TYPE unfog_run_waiting gauge"]
    for row, named in rows:
        lines += [f'unfog_run_waiting{{{named},reason="{one}"}} {int(row["waits_for"] == one)}' for one in WAITING]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a quoted value in the format of Prometheus: backslash, double quote and line feed are escaped."""
    return text.encode("utf-8", "replace").decode().replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at `folder`, in it, and in the folders in it, by name. OSError if it cannot be read."""
    if os.path.isfile(RunFolder(folder).config_file):
        return [folder]
    found = []
    for path in _folders(folder):
        if os.path.isfile(RunFolder(path).config_file):
            found.append(path)
        else:
            with suppress(OSError):
                found += [inner for inner in _folders(path) if os.path.isfile(RunFolder(inner).config_file)]
    return found


def broken_checkpoints(run: Path) -> tuple[Path, ...]:
    """Return the checkpoints that were set aside in a run. A linked folder of checkpoints is not looked into."""
    return tuple(_in_checkpoints(run, lambda entry: entry.name.startswith(_BROKEN)))


def _in_checkpoints(run: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    """Return the wanted entries of the folder of checkpoints; none of a link, or of a folder that cannot be read."""
    checkpoints = RunFolder(run).checkpoints
    if os.path.islink(checkpoints):
        return []
    with suppress(OSError):
        return _entries(checkpoints, wanted)
    return []


def _entries(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_ENTRIES) if wanted(entry)]
    return [folder / name for name in sorted(names)]


def _folders(folder: Path) -> list[Path]:
    return _entries(folder, _is_folder)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return not entry.name.startswith(".") and entry.is_dir()
    return False


def _rows(read: Callable[[Path, int], list[Row]], path: Path, last: int) -> list[Row]:
    try:
        return read(path, last)
    except OSError:
        return []


def best_metric(path: Path) -> str:
    """Return `evaluate.best` of a config.toml; the default without one."""
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        text = read_file(path, path.parent, _LARGEST_CONFIG).decode()
        # Parsing takes milliseconds, and a list may have hundreds of runs: only a file that names a metric is parsed.
        if any(f"{quote}{name}{quote}" in text for name in Evaluate.DRAWN for quote in "\"'"):
            best = tomllib.loads(text)["evaluate"]["best"]
            if best in Evaluate.DRAWN:
                return str(best)
    return Evaluate.best


def _exported_step(run: Path) -> int | None:
    """Return the step of the weights in an export (`--format run`), which trains no further; None for another run."""
    for place in _in_checkpoints(run, _is_folder):
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError, ArithmeticError):
            manifest = json.loads(read_file(place / "manifest.json", run, _LARGEST_MANIFEST))
            if set(manifest["files"]) == _EXPORTED_FILES:
                return max(0, int(manifest["step"]))
    return None


def _is_mirror(run: Path, beat: Mapping[str, Any]) -> bool:
    """Return whether a folder is a mirror in which no run has gone on: it has the mark, and no session's heartbeat."""
    return os.path.lexists(run / MIRROR_MARK) and (not beat or str(beat.get("doing")) in UNBEGUN)


def _mirror_age(run: Path, events: Sequence[Row]) -> float:
    """Return the seconds since the newest copy to the mirror, or since the first failure if none was made; else nan.

    A resume starts the count again, as a run that stands still copies nothing.
    """
    copies = [row.get("time") for row in events if row.get("kind") in ("mirrored", "resumed")]
    failed = [row.get("time") for row in events if row.get("kind") == "mirror_failed"]
    if not failed and not any(row.get("kind") == "mirrored" for row in events):
        return math.nan  # without a look at the settings
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        # The records of a run that was copied from its mirror have copies, and its settings may have no mirror.
        if not tomllib.loads(read_file(run / "config.toml", run, _LARGEST_CONFIG).decode())["checkpoint"]["mirror"]:
            return math.nan
    for written in copies[-1:] or failed[:1]:
        with suppress(ValueError, TypeError):
            return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(str(written))).total_seconds())
    return math.nan


def _best(metrics: Sequence[Row], metric: str) -> tuple[float, int | None]:
    """Return the best value of a metric and its step; (nan, None) where it was not measured after step 0."""
    steps, values = finite_column(metrics, metric)
    if not steps.any():
        return math.nan, None
    at = values.argmax() if metric in Evaluate.HIGHER else values.argmin()
    return float(values[at]), int(steps[at])


def _seconds_left(metrics: Sequence[Row], steps: int) -> float:
    """Return the time that `steps` more steps take at the pace of the last lines; nan without any."""
    recent = [(finite_number(row.get("step")), finite_number(row.get("seconds"))) for row in metrics[-_PACE_LINES:]]
    known = [(step, seconds) for step, seconds in recent if step >= 0 and seconds >= 0]
    if len(known) < 2:
        known.insert(0, (0.0, 0.0))
    (first, begun), (last, ended) = known[0], known[-1]
    if last < 2:  # the first step also allocates, and says little of the others
        return math.nan
    return max(0, steps) * (ended - begun) / (last - first) if last > first and ended >= begun else math.nan


def _age(run: Path) -> float:
    written = []
    for name in ("heartbeat.json", "events.jsonl", "metrics.jsonl", "config.toml"):
        with suppress(OSError):
            written.append(os.lstat(run / name).st_mtime)
    return max(0.0, time.time() - max(written, default=math.nan))


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
