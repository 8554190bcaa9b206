"""The pulse of a run: a heartbeat file for those who watch from outside, and two files by which they ask for something.

`RUN/heartbeat.json` says when, where and at what the run is; `touch RUN/SAVE` asks for a checkpoint, `touch RUN/STOP`
for the end. A thread does both, so that they go on while the main thread waits for a device or for a disk.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from unfog.process.signals import StopSignals
from unfog.reporting.progress import say

HEARTBEAT_FILE, SAVE_FILE, STOP_FILE = "heartbeat.json", "SAVE", "STOP"
_POLL_INTERVAL = 1.0  # seconds between two looks for the files
MAX_MISSED = 3  # heartbeats that a living run may miss
FILE_BYTES = 512  # bytes of the file, whatever it says, so that it can be written over where it lies


class Heartbeat:
    """Keeps `folder`'s heartbeat going inside the `with`, every `interval` seconds; nothing that it meets stops a run.

    `step`, `steps` and `doing` ("training", "saving", …) are for the session to set; a change of `doing` is told within
    a second. `silent`: nothing is written, as the folder is no run yet. `save_requested`: somebody asks for a
    checkpoint, until `saved` is called. A request to stop goes to `stop`.
    """

    def __init__(self, folder: Path, stop: StopSignals, interval: float = 5.0, silent: bool = False):
        self.step = self.steps = 0
        self.activity, self.save_requested = "starting", False
        self.silent, self.moved = silent, False
        self._identity = folder_identity(folder)
        self._folder, self._stop, self._interval = folder, stop, interval
        self._told = ""  # what was being done at the last heartbeat
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._lock = threading.Lock()  # of SAVE: seeing it and removing it do not overlap
        self._unmoved: dict[str, int] = {}  # requests that were met but could not be removed: name, time of writing

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """What the heartbeat says meanwhile."""
        before, self.activity = self.activity, what
        try:
            yield
        finally:
            self.activity = before

    def save_started(self) -> None:
        """The one that was asked for is on its way: the request counts no more, and stays until it is `saved`."""
        with self._lock:
            if self.save_requested and (written := self._asked(SAVE_FILE)) is not None:
                self._unmoved[SAVE_FILE] = written
            self.save_requested = False

    def save_finished(self) -> None:
        """A checkpoint is there: take the request away that it meets."""
        with self._lock, suppress(OSError):
            if self._unmoved.get(SAVE_FILE) == os.lstat(self._folder / SAVE_FILE).st_mtime_ns:
                os.unlink(self._folder / SAVE_FILE)

    def end(self, how: str) -> None:
        """Tell how it ended: "finished", "stopped", "failed: …"; no heartbeat follows this one."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(2.0)
        if not self._thread.is_alive():  # else it hangs in a write, as this would
            self.activity = how
            self._beat()

    def __enter__(self) -> Heartbeat:
        for name in (SAVE_FILE, STOP_FILE):
            if self._take(name):
                say(f"{self._folder / name} was there before this start, and is not obeyed")
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.end("ended" if kind is None else f"failed: {kind.__name__}")
        else:
            self.end("interrupted")

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._over.wait(min(_POLL_INTERVAL, self._interval)):
            with self._lock:
                self.save_requested |= self._asked(SAVE_FILE) is not None
            self.moved = folder_identity(self._folder) != self._identity
            if self._take(STOP_FILE):
                self._stop.request("STOP file")
            if self.activity != self._told or time.monotonic() - beaten >= self._interval:
                beaten = time.monotonic()
                self._beat()

    def _asked(self, name: str) -> int | None:
        """When a request was written, by the file system's clock; None if there is none that is not met."""
        try:
            written = os.lstat(self._folder / name).st_mtime_ns
        except OSError:
            return None
        return None if written == self._unmoved.get(name) else written

    def _take(self, name: str) -> bool:
        """Whether there was a request; if so it is gone now, or at least remembered as met."""
        written = self._asked(name)
        if written is None:
            return False
        try:
            os.unlink(self._folder / name)
        except FileNotFoundError:
            pass  # whoever asked has taken it back just now
        except OSError:
            self._unmoved[name] = written
        return True

    def _beat(self) -> None:
        if self.silent:
            return
        self._told = self.activity
        heartbeat = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": self.step,
            "steps": self.steps,
            "doing": self._told[:240],
            "next": None if self._over.is_set() else self._interval,
        }
        data = json.dumps(heartbeat).encode().ljust(FILE_BYTES - 1) + b"\n"
        path = self._folder / HEARTBEAT_FILE
        partial = path.with_name(f"{HEARTBEAT_FILE}.partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            # A full disk takes no new file, but this one has its place there; and then more than ever it must be told
            # that the run waits. A reader who comes in the middle of that finds none, and looks again.
            with suppress(OSError), path.open("r+b") as file:
                file.write(data)
                file.truncate()


def read_heartbeat(folder: Path) -> dict[str, Any] | None:
    """A run's heartbeat; None where there is none that can be read.

    Returns:
        What the file holds: `time` (ISO 8601, UTC), `pid`, `host`, `step`, `steps`, `doing`, `next` (seconds until the
        next one was due, None for the last of a session). And `age` in seconds, and `alive`: a next one is due and not
        long overdue, and its process is there as far as can be told. A session that ended says how in `doing`; one
        that was killed just stops.
    """
    try:
        beat = json.loads((folder / HEARTBEAT_FILE).read_bytes())
        age = (datetime.now(UTC) - datetime.fromisoformat(beat["time"])).total_seconds()
        alive = beat["next"] is not None and age <= MAX_MISSED * beat["next"]
        alive = alive and not (beat["host"] == socket.gethostname() and _is_gone(int(beat["pid"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return {**beat, "age": max(0.0, age), "alive": alive}


def _is_gone(pid: int) -> bool:
    """Whether no process of this machine has that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is another user's, or a number that none has
        return False
    return False


def folder_identity(folder: Path) -> tuple[int, int] | None:
    """What stays the same when a folder is renamed, and differs if another takes its place; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
