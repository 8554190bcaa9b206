"""Heartbeat of a run: a status file for monitoring, and files that request a checkpoint, a preview or the end.

`RUN/heartbeat.json` holds the time, host, step and activity. `touch RUN/SAVE` requests a checkpoint, `touch
RUN/PREVIEW` samples, `touch RUN/STOP` the end. A thread looks for them, also while the main thread waits for a device
or a disk.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from unfog.files.safe_files import LARGEST_TEXT, open_file, read_file, remove, write_atomic
from unfog.process.identity import own_identity, process_state, uptime
from unfog.process.run_place import HEARTBEAT_FILE, RunPlace
from unfog.process.signals import StopSignals
from unfog.reporting.progress import say

# Names of the files that request something of a running run.
Request = Literal["SAVE", "PREVIEW", "STOP"]
_SAVE_FILE, _PREVIEW_FILE, _STOP_FILE = "SAVE", "PREVIEW", "STOP"
_POLL_INTERVAL = 1.0  # seconds between two checks for requests
_NAP = 0.25  # seconds of sleep at a time, by which a suspension is noticed
_OVERSLEPT = 0.5  # seconds that a thread may wake up too late without one
_MAX_MISSED = 3  # heartbeats that a live run may miss
_MAX_INTERVAL = 600.0  # seconds between two heartbeats; a file that says more is forged
_CLOCK_DIFFERENCE = 300.0  # seconds that the clocks of two machines may differ
_FILE_BYTES = 768  # fixed, so that the file can be overwritten in place when the disk is full


class Heartbeat:
    """A thread that writes the heartbeat file every `interval` seconds inside the `with`. Its errors never stop a run.

    Attributes:
        step, steps, activity: contents of the file, set by the session; a changed activity is written within a second.
        on_activity: called with each new activity.
        silent: nothing is written, as the folder is not a run yet.
        save_requested: RUN/SAVE exists and no checkpoint was started for it.
        preview_requested: RUN/PREVIEW existed and no preview was generated for it.
        moved: the folder was moved, removed or replaced.
        away: the disk of the folder cannot be reached now.
    """

    def __init__(self, folder: Path, stop: StopSignals, interval: float = 5.0, silent: bool = False):
        self.step = self.steps = 0
        self.on_activity: Callable[[str], None] = lambda activity: None
        self._activity, self.save_requested, self.preview_requested = "starting", False, False
        self.silent, self.moved, self.away = silent, False, False
        self._place = RunPlace(folder)
        self._folder, self._stop, self._interval = folder, stop, interval
        self._written_activity = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._lock = threading.Lock()  # so that SAVE is not removed while it is checked
        self._unmoved: dict[str, int] = {}  # requests served but not removable: name -> time of writing
        self._suspended = (0.0, math.inf)  # seconds so far, and when the thread is to wake up

    @property
    def activity(self) -> str:
        return self._activity

    @activity.setter
    def activity(self, what: str) -> None:
        if what != self._activity:
            self._activity = what
            self.on_activity(what)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Set the activity for the duration of the `with`."""
        before, self.activity = self.activity, what
        try:
            yield
        finally:
            self.activity = before

    def suspended(self) -> float:
        """Return for how many seconds the process was suspended so far, by SIGSTOP or with its container, say.

        All of its threads stand still then, and that of the heartbeat wakes up too late.
        """
        before, wakes = self._suspended
        late = time.monotonic() - wakes  # the caller may look before the thread of the heartbeat has woken up
        return before + (late if late > _OVERSLEPT else 0.0)

    def begin(self) -> None:
        """End the silence: the folder is a run from here on. Write the first heartbeat at once.

        Without one, a run that is suspended now would pass for a killed one.
        """
        self.silent = False
        self._beat()

    def save_started(self) -> None:
        """Clear the request: a checkpoint for it is being written. RUN/SAVE stays until `save_finished`."""
        with self._lock:
            if self.save_requested and (written := self._unserved(_SAVE_FILE)) is not None:
                self._unmoved[_SAVE_FILE] = written
            self.save_requested = False

    def save_finished(self) -> None:
        """Remove RUN/SAVE if the checkpoint now on disk was started for it."""
        with self._lock, suppress(OSError):
            if self._unmoved.get(_SAVE_FILE) == os.lstat(self._folder / _SAVE_FILE).st_mtime_ns:
                remove(self._folder / _SAVE_FILE, self._folder)

    def end(self, how: str) -> None:
        """Write the last heartbeat, with "finished", "stopped" or "failed: …" as its activity."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(2.0)
        if not self._thread.is_alive():  # else it hangs in a write, and so would this thread
            self.activity = how
            self._beat()

    def __enter__(self) -> Heartbeat:
        for name in (_SAVE_FILE, _PREVIEW_FILE, _STOP_FILE):
            if self._take(name):
                say(f"{self._folder / name} existed before this start and is ignored")
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.end("ended" if kind is None else f"failed: {kind.__name__}")
        else:
            self.end("interrupted")

    def _run(self) -> None:
        written = time.monotonic()
        # Requests are looked for more often than the file is written, as a person waits for them.
        while not self._sleep(min(_POLL_INTERVAL, self._interval)):
            with self._lock:
                self.save_requested |= self._unserved(_SAVE_FILE) is not None
            state = self._place.look()
            self.moved, self.away = state == "moved", state == "away"
            if self._take(_PREVIEW_FILE):  # not `|=`, which would undo that the session clears it meanwhile
                self.preview_requested = True
            if self._take(_STOP_FILE):
                self._stop.request("STOP file")
            if self.activity != self._written_activity or time.monotonic() - written >= self._interval:
                written = time.monotonic()
                self._beat()

    def _sleep(self, seconds: float) -> bool:
        """Sleep, and count how much too late it wakes up. Return True once all is over."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._suspended = (self._suspended[0], time.monotonic() + min(_NAP, left))
            over = self._over.wait(min(_NAP, left))
            self._suspended = (self.suspended(), math.inf)
            if over:
                return True
        return False

    def _unserved(self, name: str) -> int | None:
        """Return when a request was written, by the file system's clock; None if there is no unserved one."""
        try:
            written = os.lstat(self._folder / name).st_mtime_ns
        except OSError:
            return None
        return None if written == self._unmoved.get(name) else written

    def _take(self, name: str) -> bool:
        """Return True if there was a request, and remove it, or remember it as served."""
        written = self._unserved(name)
        if written is None:
            return False
        try:
            remove(self._folder / name, self._folder)
        except OSError:
            self._unmoved[name] = written
        return True

    def _beat(self) -> None:
        if self.silent or self.away:  # an unmounted folder may show another one at its path
            return
        self._written_activity = self.activity
        heartbeat = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": self.step,
            "steps": self.steps,
            "doing": self._written_activity[:240],
            "next": None if self._over.is_set() else self._interval,
            **own_identity(),
        }
        data = json.dumps(heartbeat).encode().ljust(_FILE_BYTES - 1) + b"\n"
        path = self._folder / HEARTBEAT_FILE
        try:
            write_atomic(path, data, self._folder, durable=False)
        except OSError:
            # A full disk takes no new file, but the old one has its space, and monitoring must see that the run waits.
            # A reader that comes in the middle of the write finds invalid JSON, and reads again.
            with suppress(OSError), open_file(path, "r+b", self._folder) as file:
                file.write(data)
                file.truncate()

    @staticmethod
    def request(folder: Path, name: Request) -> None:
        """Request something of a running run. OSError if it cannot be written, or something else has that name."""
        write_atomic(folder / name, b"", folder, shared=True, durable=False)

    @classmethod
    def read(cls, folder: Path) -> dict[str, Any] | None:
        """Return the heartbeat of a run; None if there is no readable one.

        The keys are those of the file: `time` (ISO 8601, UTC), `pid`, `host`, `step`, `steps`, `doing`, and `next`
        (seconds until the next one was due, None for the last of a session); also `age` in seconds; `alive`: its
        process exists, as far as is known; and `still`: why no heartbeat comes although it does, "" if they come.
        """
        try:
            beat = json.loads(read_file(folder / HEARTBEAT_FILE, folder, LARGEST_TEXT))
            age, alive, still = _judge(beat)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None
        return {**beat, "age": age, "alive": alive, "still": still}


def _judge(beat: dict[str, Any]) -> tuple[float, bool, str]:
    """Return `age`, `alive` and `still` of a heartbeat."""
    pid, ended = int(beat["pid"]), beat["next"] is None
    longest = 0.0 if ended else _MAX_MISSED * min(beat["next"], _MAX_INTERVAL)
    here = beat["host"] == socket.gethostname()
    state = process_state(pid, beat.get("machine"), beat.get("started")) if here else "unknown"
    if not ended and state in ("there", "suspended"):  # of this machine, whose uptime no clock changes
        age, still = max(0.0, uptime() - float(beat["uptime"])), ""
        if state == "suspended":
            still = f"process {pid} is suspended"
        elif not age <= longest:
            still = f"process {pid} does not answer"
        return age, True, still
    age = (datetime.now(UTC) - datetime.fromisoformat(beat["time"])).total_seconds()
    gone = state == "gone" or (here and _is_gone(pid))
    # One from the future is of a wrong clock, or forged: it would seem alive for ever.
    return max(0.0, age), not (ended or gone) and -_CLOCK_DIFFERENCE <= age <= longest, ""


def _is_gone(pid: int) -> bool:
    if sys.platform == "win32":  # where signal 0 is Ctrl-C
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is another user's, or no valid id
        return False
    return False
