"""Recorder of a training run: writes the record on disk, the trackers and the progress line."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unfog.callbacks import LogEvent, SampleEvent
from unfog.files.safe_files import make_folder, write_atomic
from unfog.reporting.image_grids import Pixels, encode_png
from unfog.reporting.log_settings import Log, check_installed
from unfog.reporting.progress import Progress, format_duration, format_number, say, warn
from unfog.reporting.records import Events, Metrics
from unfog.reporting.report import write_report
from unfog.reporting.tracker_base import Tracker
from unfog.reporting.trackers import open_tracker
from unfog.text import sanitize

_Value = float | list[float] | npt.NDArray[np.floating] | np.floating

# What the progress line shows of a log, and how.
_NOTES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss", lambda value: f"loss {value:.4g}"),
    ("held_out_loss", lambda value: f"held-out {value:.4g}"),
    ("images_per_second", lambda value: f"{format_number(value)} images/s"),
)

_TREND = 40  # latest logs of the loss that its trend is of
_REPORT_INTERVAL = 5.0  # seconds between two refreshed reports, at least
_FEWEST = 8  # of which there is a trend


class Recorder:
    """Records a run in its folder and shows it; for one rank only. A context manager.

    `total`: the step that the run ends at, None if not known. `start`: the step that it resumes from; 0 for a new run.
    `config`: shown by trackers beside the run. `logged`: the step after which lines of metrics are dropped, because
    they will be written again; None is `start`. `defer_interrupts`: a context in which a stop does not cut off what is
    being written.

    RequestError when the package of a sink is missing. After that, nothing that happens to a sink or to the
    disk stops a run: a sink that raises is dropped with a warning and an event, and lines that the disk
    refuses wait in memory.
    """

    def __init__(
        self,
        run_dir: Path,
        log: Log,
        total: int | None,
        start: int = 0,
        config: Mapping[str, object] | None = None,
        logged: int | None = None,
        defer_interrupts: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        check_installed(log.sinks)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.callbacks: Callable[[LogEvent | SampleEvent], None] = lambda event: None
        self._defer_interrupts = defer_interrupts
        self._events = Events(run_dir / "events.jsonl")
        self._metrics = Metrics(run_dir / "metrics.jsonl", start if logged is None else logged)
        before = (self._metrics.last or {}).get("seconds")
        self._before = before if isinstance(before, int | float) else 0.0
        self._opened = time.monotonic() - self._before
        self._disk_refused = False
        self._images: dict[Path, bytes] = {}  # that the disk has not taken yet
        self._notes: dict[str, str] = {}
        self._step = start
        for file, name in ((self._events, "events.jsonl"), (self._metrics, "metrics.jsonl")):
            if file.damaged:
                self.warn(start, f"{name}: {file.damaged} line(s) cut short by a kill or a power cut removed")
        self._sinks: list[Tracker] = []
        for name in log.sinks:
            self._open(name, start, config or {})
        if self._metrics.dropped is not None:
            self._say_what_trackers_have(*self._metrics.dropped)
        self._refresh = math.inf  # seconds of the run at which the report is written next
        self._losses: deque[float] = deque(maxlen=_TREND)
        places = f"samples {run_dir / 'samples'} · report {run_dir / 'report.html'}"
        self.progress = Progress("step", total, start=start, delay=0.0, below=[places])

    def set_total(self, steps: int) -> None:
        """Show another length of the run from here on."""
        self.progress.total = steps

    def update_progress(self, step: int) -> None:
        """Move the progress line to `step`; cheap enough for every step."""
        self._step = step
        self.progress.update(step)

    def begin_report(self) -> None:
        """Write report.html now, and refresh it at logs: at most a hundredth of the time goes into it."""
        self._refresh = self.seconds
        self._refresh_report()

    def log(self, step: int, images: int, **values: _Value) -> None:
        """Write a line of metrics after `step` steps and `images` images: numbers, and lists of numbers.

        `seconds`, the wall time of the run over all its resumes, is added. Sinks get the numbers, and a list
        as name/0, name/1, ...; one by noise level also as a histogram.
        """
        self._step = step
        self._write(lambda: self._metrics.write(step, images, self.seconds, values))
        scalars = _scalars({"images": images, **values})
        self._each_sink(lambda sink: sink.log_scalars(step, scalars))
        self._each_sink(lambda sink: _log_histograms(sink, step, values))
        for name, text in _NOTES:
            if name in scalars:
                self._notes[name] = text(scalars[name])
        if "loss" in scalars:
            self._losses.append(scalars["loss"])
            self._notes["loss"] += _trend(self._losses)
        self.progress.update(step, ", ".join(self._notes[name] for name, _ in _NOTES if name in self._notes))
        self._refresh_report()
        known = {name: scalars.get(name) for name in ("loss", "held_out_loss", "lr")}
        self.callbacks(LogEvent(step, self.seconds, images, **known, metrics=dict(values)))

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        """Save an image, uint8 [H, W, 3], as RUN/<name>/<step>.png; "samples" are the preview grids."""
        path = self.keep_image(step, name, encode_png(pixels))
        self._each_sink(lambda sink: sink.log_image(step, name, pixels))
        self.callbacks(SampleEvent(step, self.seconds, name, path, pixels))

    def keep_image(self, step: int, name: str, data: bytes) -> Path:
        """Save a PNG as RUN/<name>/<step>.png, for no sink, and return its path."""
        path = self.run_dir / name / f"{step:08d}.png"
        self._images[path] = data
        self._write(self._write_images)
        return path

    def event(self, kind: str, step: int, **fields: object) -> None:
        """Write a line of events and synchronise everything written so far."""
        self._write(lambda: self._events.write(kind, step, fields))
        self.sync()
        self._write(self._write_images)  # those that the disk refused before

    def sync(self) -> None:
        """Synchronise the metrics with the disk, so that they survive a power cut."""
        self._write(self._metrics.sync)

    def warn(self, step: int, message: str) -> None:
        """Print a warning and record it as an event."""
        warn(message)
        self.event("warning", step, message=message)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all its resumes."""
        return time.monotonic() - self._opened

    @property
    def session_seconds(self) -> float:
        """Wall time since this process began or resumed the run."""
        return self.seconds - self._before

    def describe_time(self, saving: float) -> str:
        """Return the time of this session, of which `saving` seconds went into checkpoints, and that of the run."""
        whole = self.seconds
        text = f"{format_duration(self.session_seconds)}, of which checkpoints took {saving:.1f} s"
        return f"{text}; {format_duration(whole)} in all" if self._before else text

    def close(self) -> None:
        """Close the files, the sinks and the progress line."""
        self.progress.close()
        # Before the files: a sink that fails to close is recorded as an event.
        self._each_sink(lambda sink: sink.close())
        self._sinks = []
        self._write(self._metrics.close)
        self._write(self._events.close)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _refresh_report(self) -> None:
        if (started := self.seconds) < self._refresh:
            return
        step, total = f"{self._step:,}", self.progress.total
        parts = [f"{step}/{total:,}" if total else f"step {step}", self.progress.time_left()]
        try:
            with self._defer_interrupts():
                write_report(self.run_dir, ("running", ", ".join(filter(None, parts))))
        except Exception as error:  # the last one, at the end, says so
            self.event("warning", self._step, message=f"the report could not be refreshed: {error}")
        self._refresh = self.seconds + max(_REPORT_INTERVAL, 100 * (self.seconds - started))

    def _open(self, name: str, start: int, config: Mapping[str, object]) -> None:
        try:
            self._sinks.append(open_tracker(name, self.run_dir, start, config))
        except Exception as error:
            self._report_failure(name, error)

    def _say_what_trackers_have(self, first: float, last: float) -> None:
        """Say, for each tracker that keeps earlier records, that the steps after the checkpoint are logged again."""
        for sink in self._sinks:
            if getattr(sink, "again", ""):  # a tracker of one's own may not derive from Tracker
                say(
                    f"  steps {first:,} to {last:,} are logged again: {sink.name} {sink.again}, and lacks what a "
                    "killed process had not written; metrics.jsonl has each once"
                )

    def _each_sink(self, act: Callable[[Tracker], None]) -> None:
        for sink in list(self._sinks):  # a copy, as a sink that fails is removed
            try:
                act(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._report_failure(sink.name, error)

    def _report_failure(self, name: str, error: Exception) -> None:
        reason = sanitize(f"{type(error).__name__}: {' '.join(str(error).split())}")  # in one line
        warn(f"{name} failed and is not used any more ({reason}); the run and its own record continue")
        self.event("sink_failed", self._step, sink=name, reason=reason)

    def _write_images(self) -> None:
        for path, data in list(self._images.items()):
            make_folder(path.parent, self.run_dir)
            write_atomic(path, data, self.run_dir)
            del self._images[path]

    def _write(self, write: Callable[[], None]) -> None:
        """Keep data in memory while the disk refuses it, and warn once."""
        try:
            with self._defer_interrupts():
                write()
        except OSError as error:
            if not self._disk_refused:
                self._disk_refused = True  # first, as the warning is written by this function too
                self.warn(
                    self._step,
                    f"{error.filename or self.run_dir} cannot be written ({error.strerror}): images and lines wait "
                    "in memory until the disk accepts them",
                )


def _trend(losses: Sequence[float]) -> str:
    """Return ", falling", ", rising" or ", steady": the later half against the earlier; "" of few losses, or of NaN."""
    if len(losses) < _FEWEST or not np.isfinite(losses).all():
        return ""
    earlier, later = np.array_split(np.asarray(losses, np.float64), 2)
    difference = float(later.mean() - earlier.mean())
    error = float(np.hypot(earlier.std(ddof=1) / len(earlier) ** 0.5, later.std(ddof=1) / len(later) ** 0.5))
    if not abs(difference) > 2 * error:
        return ", steady"
    return ", falling" if difference < 0 else ", rising"


def _scalars(values: Mapping[str, _Value]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        array = np.asarray(value, np.float64)
        if array.ndim:
            flat.update({f"{name}/{i}": float(item) for i, item in enumerate(array)})
        else:
            flat[name] = float(array)
    return flat


def _log_histograms(sink: Tracker, step: int, values: Mapping[str, _Value]) -> None:
    """Log what was measured by noise level; 0 if nothing was."""
    for name, value in values.items():
        if name.endswith("_by_level"):
            array = np.asarray(value, np.float64)
            sink.log_histogram(step, name, np.where(np.isfinite(array), array, 0).tolist())
