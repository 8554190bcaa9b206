"""Printing: messages, results and progress.

Results (paths, requested numbers) go to stdout, so that they can be piped; messages go to stderr. On a terminal,
progress is live lines at the bottom, and in a notebook below the cell; elsewhere it is plain lines without control
characters, at a rate that a log file bears. Nothing here runs in a thread: a line moves when its work reports.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from unfog.files import locks
from unfog.reporting.notebook import LiveText

_REDRAW = 0.2  # seconds between two drawings of a live line
_BAR = 16  # characters
_MARGIN = 3  # columns at the right that stay free, as the terminal writes "^C" there
_live: Live | None = None  # the only part of the terminal that is drawn over
_shown: list[Progress] = []  # what it shows, one below the other
_rows = 0  # lines that it takes
_listeners: list[Callable[[str], None]] = []  # that messages are passed on to
_cell = LiveText()  # in a notebook, instead of the terminal


def say(text: str, style: str = "") -> None:
    """Print a message to stderr, above a live progress line; on a terminal in a rich `style`."""
    _write_line(text, style)
    for listener in _listeners:
        listener(_printable(text))


@contextmanager
def overheard(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with each message inside the `with`, from the thread that prints it; not with progress."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _write_line(text: str, style: str = "") -> None:
    text = _printable(text)
    with suppress(OSError):  # the terminal or pipe is closed, which must not stop the work
        if _is_terminal():
            console = _live.console if _live else Console(stderr=True)
            # Text as it is: names of files may look like markup, and a path with a line break cannot be copied.
            console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def warn(text: str) -> None:
    say(f"warning: {text}", style="yellow")


locks.listener = warn


def say_from_signal(text: str) -> None:
    """Print a message from a signal handler or any thread, above the live lines."""
    # Not through `sys.stderr`: the signal may have come in the middle of a write there. And not where stderr was closed
    # from the start, as file 2 may be any file then.
    if sys.__stderr__ is None:
        return
    # The next drawing goes up as many lines as the last one took, and must not reach the message.
    erase = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (_rows - 1) if _rows else ""
    with suppress(OSError):  # the terminal may be what has gone
        os.write(2, f"{erase}{text}\n{chr(10) * (_rows - 1)}".encode())


def print_result(text: str) -> None:
    """Print a requested value to stdout."""
    _close_live()  # it begins again, below, when its work reports
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        # The pipe is closed or its disk full. Python would fail again at exit, when it flushes, and change the status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_duration(seconds: float) -> str:
    """Return seconds as text: "8 s", "3 min 20 s", "5 h 02 min", "2 d 04 h"; "?" when not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def align_columns(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return rows of cells as lines of text whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(align(cell, width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def format_number(value: float) -> str:
    """Return a number with three significant digits, and all digits before the point: "0.0123", "4.57", "5,210"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Rate:
    """Smoothed rate of some work, for the time left.

    Work and time are averaged with the same exponential window, so pauses (previews, evaluation) count. The
    window is a quarter of the time so far, at least 15 seconds: soon right, later steady.
    """

    def __init__(self, done: int, now: float) -> None:
        self._started = self._now = now
        self._done = done
        self._work = self._time = 0.0

    def update(self, done: int, now: float) -> None:
        """Note that `done` units are done at the time `now`, in seconds."""
        passed = now - self._now
        window = max(15.0, (now - self._started) / 4)
        decay = math.exp(-passed / window)
        self._work = decay * self._work + max(0, done - self._done)
        self._time = decay * self._time + passed
        self._done, self._now = done, now

    @property
    def rate(self) -> float:
        """Units a second; nan before anything is done."""
        return self._work / self._time if self._work > 0 and self._time > 0 else math.nan


class Progress:
    """Progress of `total` units of some work, from `start`, as a context manager.

    Appears after `delay` seconds, so short work leaves no trace. `total` None: no end is known. May be nested; on a
    terminal each has its line, and the lines `below` it.
    """

    def __init__(
        self, title: str, total: int | None, start: int = 0, delay: float = 2.0, below: Sequence[str] = ()
    ) -> None:
        self.title, self.total = title, total
        self._done, self._note, self._activity = start, "", ""
        self._delay, self._below = delay, below
        self._closed = False
        self.restart()

    def restart(self) -> None:
        """Estimate the time left from now on."""
        self._started = self._drawn = time.monotonic()
        self._first, self._pace = self._done, Rate(self._done, self._started)
        self._printed: tuple[int, str] | None = None  # what the last plain line said

    def update(self, done: int, note: str = "") -> None:
        """`done` units of the total are done; `note`, kept until the next one, goes on the line. Cheap."""
        now = time.monotonic()
        self._done, self._note = done, note or self._note
        if now > self._started:
            self._pace.update(done, now)
        if now - self._started < self._delay:
            return
        if _is_live():
            if self not in _shown or now - self._drawn >= _REDRAW:
                self._draw()
        elif self._printed is None or now - self._drawn >= _plain_interval(now - self._started):
            self._print(now)

    def set(self, done: int, total: int | None) -> None:
        """Note that `done` units are done, of a total that may be known only now."""
        self.total = total
        self.update(done)

    def advance(self, count: int) -> None:
        """Note that `count` more units are done."""
        self.update(self._done + count)

    def show(self, activity: str) -> None:
        """Name at once, on a terminal, what is being done: the work itself, or what interrupts it."""
        self._activity = activity
        if _is_live() and not self._closed:
            self._draw()

    def time_left(self) -> str:
        """Return "52 s left"; "" at the end, and where end or pace is not known."""
        if not self.total or self._done >= self.total or math.isnan(self._pace.rate):
            return ""
        if self._done - self._first < 2:  # the first step also allocates memory, so its pace is not that of the others
            return ""
        return f"{format_duration((self.total - self._done) / self._pace.rate)} left"

    def close(self) -> None:
        """Take the live line away, or print the last plain line if it was not."""
        self._closed = True
        if self in _shown:
            _shown.remove(self)
            _redraw()
        elif self._printed is not None:
            self._print(time.monotonic())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def live_lines(self, now: float) -> list[Text]:
        """Return the lines that a terminal shows."""
        line = Text(f"{self._activity or self.title} ")
        if self.total:
            full = min(_BAR, _BAR * self._done // self.total)
            line.append("━" * full, "cyan").append("━" * (_BAR - full), "bright_black").append(" ")
        line.append(f"{self.title} " if self._activity else "")
        # The last log has a line of its own if there are several.
        line.append(self._text(now, "" if self._below else self._note, share=True))
        below = (self._note, *self._below) if self._below else ()
        return [line, *(Text(f"  {text}") for text in below)]

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self not in _shown:
            _shown.append(self)
        _redraw()

    def _print(self, now: float) -> None:
        if self._printed == (self._done, self._note):
            return
        self._drawn, self._printed = now, (self._done, self._note)
        _write_line(f"{self.title} {self._text(now, self._note)}")

    def _text(self, now: float, note: str, share: bool = False) -> str:
        of = f"/{self.total:,}" if self.total else ""
        percent = f" {100 * self._done // self.total}%" if share and self.total else ""
        rate = self._pace.rate
        parts = [f"{self._done:,}{of}{percent}", note]
        if not self._note and math.isfinite(rate):
            parts.append(f"{format_number(rate)}/s")
        parts.append(self.time_left())
        parts.append(f"{format_duration(now - self._started)} so far")
        return " · ".join(filter(None, parts))


def _is_live() -> bool:
    return _is_terminal() or LiveText.available()


def _plain_interval(elapsed: float) -> float:
    """Seconds between two plain lines: 5 at first, a minute after an hour, so that a day is 1500 lines."""
    return min(60.0, max(5.0, elapsed / 60))


def _is_terminal() -> bool:
    # A dumb terminal, such as the shell of an editor, shows control sequences as text.
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _printable(text: str) -> str:
    # File names may hold escape sequences, or bytes that no encoding can print.
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _redraw() -> None:
    global _live
    with suppress(OSError):  # as in `say`
        if LiveText.available():
            _cell.show("\n".join(str(line) for one in _shown for line in one.live_lines(time.monotonic())))
        elif not _shown:
            _close_live()
        elif _live is not None:
            _live.refresh()
        else:
            # No refreshing thread: workers are forked, and a fork may not find the terminal's lock taken.
            console = Console(stderr=True)
            _live = Live(_LiveLines(), console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            _live.start(refresh=True)


class _LiveLines:
    """The live lines of all work, each cut off at the edge of the terminal: a wrapped one would stay there."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        global _rows
        lines = [line for one in _shown for line in one.live_lines(time.monotonic())][: console.height]
        for line in lines:
            line.truncate(max(1, options.max_width - _MARGIN), overflow="ellipsis")
        _rows = len(lines)
        yield from lines


@atexit.register
def _close_live() -> None:
    # Shows the cursor of the terminal again.
    global _live, _rows
    if _live is not None:
        _live.stop()
        _live, _rows = None, 0
