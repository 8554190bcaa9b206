"""A terminal that tests run programs in: a pseudo-terminal, whose output an emulator interprets."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

import pyte


class Terminal:
    """A program in a pseudo-terminal, its standard streams all connected to it."""

    def __init__(self, words, columns=80, rows=24, **environment):
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        env = {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        words = [str(word) for word in words]
        # A session of its own, with the terminal as its controlling one, so that ^C is a signal.
        self._process = subprocess.Popen(
            words, stdin=side, stdout=side, stderr=side, env=env, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(side)
        self.frames = []  # the text on the screen, after each change

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._main)

    def press(self, keys):
        os.write(self._main, keys)

    def lines(self):
        """Return all that the terminal shows, and what has scrolled away above."""
        above = [
            "".join(line[i].data for i in range(self._screen.columns)).rstrip() for line in self._screen.history.top
        ]
        return above + [line.rstrip() for line in self._screen.display[: self._screen.cursor.y + 1]]

    def wait_for(self, text, seconds=60):
        """Read until the terminal shows the text."""
        end = time.monotonic() + seconds
        while not any(text in line for line in self.lines()):
            assert self._read(end - time.monotonic()), "\n".join([f"no {text!r} in", *self.lines()])

    def finish(self, seconds=60):
        """Read until the program has ended; return its exit status."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        return self._process.wait(max(0.1, end - time.monotonic()))

    def _read(self, seconds):
        if not select.select([self._main], [], [], max(0, seconds))[0]:
            return False
        try:
            data = os.read(self._main, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self._stream.feed(data)
        self.frames.append(self.lines())
        return bool(data)


def _take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
