"""`unfog watch`: show state, progress and charts of a run in the terminal, refreshed until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.text import Text

from unfog.config.requests.runs import WatchRequest
from unfog.process.run_place import folder_identity
from unfog.process.run_status import RunStatus
from unfog.reporting.charts import Floats
from unfog.reporting.progress import format_duration, format_number, print_result
from unfog.reporting.records import SMOOTHED_FROM, Row, finite_column, read_metrics, smoothed
from unfog.text import sanitize

# Bit of each dot of a Braille character, by row and column.
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_MARGIN = 9  # columns of the numbers on the left

_LAST = 2**22  # bytes of metrics.jsonl that the charts show: several thousand lines
_CHARTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4g}"),
    ("held-out loss", "held_out_loss", lambda value: f"{value:.4g}"),
    ("images/s", "images_per_second", format_number),
    ("learning rate", "lr", lambda value: f"{value:.3g}"),
)
_FROM_ZERO = ("images_per_second", "lr")
_SIDE_BY_SIDE = 100  # columns from which two charts stand beside each other
_PLAIN = (80, 40)  # columns and lines if there is no terminal


def main(request: WatchRequest) -> int:
    """Show the run until q or Ctrl-C is pressed, and return the exit status."""
    console = Console(highlight=False)
    unicode = _can_print("⣿┤")
    if request.once or not console.is_terminal or console.is_dumb_terminal:
        width, height = (console.width, console.height) if console.is_terminal else _PLAIN
        print_result("\n".join(_frame(request.run, width, height, unicode)))
        return 0
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        key, lines, place = "", list[str](), folder_identity(request.run)
        while key not in ("q", "Q"):
            now = folder_identity(request.run)
            # A mount that is gone shows another folder, or none, at its path.
            if now is not None and (now == place or os.path.isfile(request.run / "config.toml")):
                lines, place = _frame(request.run, console.width, console.height, unicode, "q quits"), now
            else:
                lines[:1] = [f"{sanitize(request.run.name)}, its folder cannot be reached or was moved, q quits"]
            text = Text("\n".join(lines[: console.height]), no_wrap=True, overflow="crop")
            text.highlight_regex("[\u2800-\u28ff]+", "cyan")
            live.update(text, refresh=True)
            # The wait for the next frame, which a key ends at once.
            key = pressed(request.interval)
    return 0


def _frame(run: Path, width: int, height: int, unicode: bool = True, note: str = "") -> list[str]:
    """Return the lines of one frame: state and progress, then the charts in the space that is left."""
    try:
        metrics = read_metrics(run / "metrics.jsonl", _LAST)
    except OSError:
        metrics = []
    status = RunStatus.read(run, metrics)
    head = ", ".join(filter(None, [sanitize(run.resolve().name), status.state_text, f"step {status.step_text}", note]))
    seen = f"last written {format_duration(status.age)} ago"
    lines = [head[:width], "  ".join(filter(None, [_bar(status, unicode), seen]))[:width], ""]
    across = 2 if width >= _SIDE_BY_SIDE else 1
    rows = len(_CHARTS) // across
    each = max(4, min(16, (height - len(lines)) // rows - 1))
    wide = (width - 2 * (across - 1)) // across
    charts = [_chart(metrics, *chart, _Space(wide, each, unicode)) for chart in _CHARTS]
    for i in range(0, len(charts), across):
        lines += ["  ".join(line.ljust(wide) for line in parts).rstrip() for parts in zip(*charts[i : i + across])]
    return lines


class _Space(NamedTuple):
    """Columns and lines for a chart, and whether the terminal has Unicode."""

    width: int
    height: int
    unicode: bool = True


def _chart(metrics: Sequence[Row], title: str, name: str, shown: Callable[[float], str], space: _Space) -> list[str]:
    steps, values = finite_column(metrics, name)
    smooth = name == "loss" and len(values) >= SMOOTHED_FROM
    values = smoothed(values) if smooth else values
    latest = f" {shown(float(values[-1]))}{' (smoothed)' if smooth else ''}" if len(values) else ""
    return [f"{title}{latest}"[: space.width], *_text_chart(steps, values, space, name in _FROM_ZERO)]


def _bar(status: RunStatus, unicode: bool) -> str:
    if not status.steps:
        return ""
    share = min(1.0, status.step / status.steps)
    full = round(24 * share)
    return ("█" if unicode else "#") * full + ("░" if unicode else "-") * (24 - full) + f" {share:.0%}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key and returns it, or "" after that time."""
    if sys.platform == "win32" or not sys.stdin.isatty():  # Ctrl-C alone ends it there
        yield _sleep
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 1).decode("ascii", "replace") if ready else ""

    try:
        tty.setcbreak(keyboard)  # single keys, unechoed; Ctrl-C still interrupts
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _text_chart(steps: Floats, values: Floats, space: _Space, from_zero: bool = False) -> list[str]:
    """Return the lines that fill a space: the values over steps, with their extremes on the axes.

    Of values that share a column the mean is drawn. Without values, the first line says so.
    """
    width, height, unicode = space
    if not len(values):
        return ["  no values yet", *[""] * (height - 1)]
    columns, rows = max(4, width - _MARGIN - 2), max(2, height - 1)
    dots = (2, 4) if unicode else (1, 1)
    canvas = np.zeros((rows * dots[1], columns * dots[0]), bool)
    x = _scaled(steps, float(steps.min()), float(steps.max()), canvas.shape[1])
    if len(x) > canvas.shape[1]:
        x, values = _column_means(x, values)
    # Speed and rate begin at zero, or a change of a percent would look like a collapse.
    low, high = min(float(values.min()), 0.0 if from_zero else np.inf), float(values.max())
    y = canvas.shape[0] - 1 - _scaled(values, low, high, canvas.shape[0])
    _draw_line(canvas, x, y)
    marks = [""] * rows
    marks[0], marks[-1] = _number(high), _number(low) if high > low else ""
    edge = "┤" if unicode else "|"
    lines = [f"{mark:>{_MARGIN}} {edge}{line}" for mark, line in zip(marks, _characters(canvas, dots))]
    first, last = f"{steps.min():,.0f}", f"{steps.max():,.0f}"
    axis = f"{first}{last:>{max(1, columns - len(first))}}" if last != first else f"step {last}"
    return [line.rstrip() for line in (*lines, " " * (_MARGIN + 2) + axis)]


def _scaled(values: Floats, low: float, high: float, count: int) -> npt.NDArray[np.int64]:
    """Return positions 0 … count - 1; those of equal values are in the middle."""
    if high <= low:
        return np.full(len(values), count // 2)
    # Divided first: the range of two numbers may overflow, a share of it does not.
    share = values / (high - low) - low / (high - low)
    return np.asarray(np.rint(share.clip(0, 1) * (count - 1)), np.int64)


def _column_means(x: npt.NDArray[np.int64], values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    columns, column = np.unique(x, return_inverse=True)
    counts = np.bincount(column)
    # Divided before the sum, which could overflow.
    return columns, np.asarray(np.bincount(column, values / counts[column]), np.float64)


def _draw_line(canvas: npt.NDArray[np.bool_], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> None:
    """Set the dots on the lines from point to point."""
    canvas[y, x] = True
    for i in range(len(x) - 1):
        count = max(abs(int(x[i + 1] - x[i])), abs(int(y[i + 1] - y[i]))) + 1
        along = [np.rint(np.linspace(p[i], p[i + 1], count)).astype(np.int64) for p in (y, x)]
        canvas[along[0], along[1]] = True


def _characters(canvas: npt.NDArray[np.bool_], dots: tuple[int, int]) -> Sequence[str]:
    if dots == (1, 1):
        return ["".join(" *"[int(dot)] for dot in row) for row in canvas]
    cells = canvas.reshape(len(canvas) // 4, 4, -1, 2).transpose(0, 2, 1, 3)
    codes = (cells * _BRAILLE).sum(axis=(2, 3))
    return ["".join(chr(0x2800 + int(code)) if code else " " for code in row) for row in codes]


def _number(value: float) -> str:
    """Return a number in at most nine characters."""
    text = format_number(value) if abs(value) < 1e6 else f"{value:.3g}"
    return text if len(text) <= _MARGIN else f"{value:.2g}"
