"""`unfog watch`: show state, progress and charts of a run in the terminal, refreshed until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unfog.config.requests.runs import WatchRequest
from unfog.process.run_place import folder_identity
from unfog.process.run_screen import screen_lines
from unfog.reporting.progress import print_result
from unfog.text import sanitize

_PLAIN = (80, 40)  # columns and lines if there is no terminal


def main(request: WatchRequest) -> int:
    """Show the run until q or Ctrl-C is pressed, and return the exit status."""
    console = Console(highlight=False)
    unicode = _can_print("⣿┤")
    if request.once or not console.is_terminal or console.is_dumb_terminal:
        width, height = (console.width, console.height) if console.is_terminal else _PLAIN
        print_result("\n".join(screen_lines(request.run, width, height, unicode)))
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
                lines, place = screen_lines(request.run, console.width, console.height, unicode, "q quits"), now
            else:
                lines[:1] = [f"{sanitize(request.run.name)}, its folder cannot be reached or was moved, q quits"]
            text = Text("\n".join(lines[: console.height]), no_wrap=True, overflow="crop")
            text.highlight_regex("[\u2800-\u28ff]+", "cyan")
            live.update(text, refresh=True)
            # The wait for the next frame, which a key ends at once.
            key = pressed(request.interval)
    return 0


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
