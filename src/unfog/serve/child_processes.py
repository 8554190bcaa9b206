"""Child processes of the server: `unfog` commands that the page starts. Their output is kept up to a limit.

Each is a process group of its own, and writes to a file without a name. So a run goes on when the page or the server
ends; other commands are ended with the server.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from unfog.custom.consent import STARTED_BY
from unfog.errors import RequestError
from unfog.files.positions import pread
from unfog.process.child import child_environment, hide_secrets, python_command
from unfog.text import without_secrets

_SHOWN_BYTES = 2**16  # of the output, from its end
_MOST_BYTES = 2**24  # of the output; it is cut to nothing then
_MOST_RUNNING, _MOST_KEPT = 8, 50
_END_SECONDS = 5.0  # in which an ended child may clean up


@dataclass
class ChildProcess:
    """A child process, running or ended."""

    id: int
    words: tuple[str, ...]
    """Words after `unfog`."""
    outlives: bool
    """It trains, so it goes on without the server."""
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    result: Path | None = None
    """Folder that it writes to."""
    subject: int | None = None
    """Number of the run that it is about."""
    began: float = field(default_factory=time.time)
    _seen: tuple[object, ...] = ()

    @property
    def command(self) -> str:
        """The command as a person can copy it into a shell."""
        return command_text(self.words)

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self.process.poll()

    def size(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    @property
    def written(self) -> float:
        """Time of the last output, in seconds since the epoch."""
        return os.fstat(self.output.fileno()).st_mtime

    def text(self) -> str:
        """Return the end of the output."""
        size = self.size()
        data = pread(self.output.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
        return without_secrets(data.decode("utf-8", "replace"))

    def summary(self) -> dict[str, Any]:
        """Return the fields of its event."""
        running = {"running": self.status is None, "status": self.status}
        return {"id": self.id, "command": self.command, "run": self.subject, **running}

    def has_changed(self) -> bool:
        """Return True if it has written or ended since the last call. Cuts an output that is too long."""
        size = self.size()
        if size > _MOST_BYTES:
            with suppress(OSError):
                os.ftruncate(self.output.fileno(), 0)  # the child appends, and goes on at the new end
        before, self._seen = self._seen, (size, self.status)
        return before != self._seen

    def stop(self) -> None:
        """Ask it to end, as Ctrl-C does: training saves first."""
        if self.status is None:
            self.process.send_signal(signal.SIGTERM)


class ChildProcesses:
    """The child processes of this server by number. Safe to use from several threads.

    `publish` is called with the summary of a task that has changed.
    """

    def __init__(self, publish: Callable[[dict[str, Any]], None]) -> None:
        self._tasks: dict[int, ChildProcess] = {}
        self._publish, self._lock = publish, threading.Lock()
        self._number = 0

    def __getitem__(self, number: int) -> ChildProcess:
        """Return a task by its number. KeyError if it is unknown."""
        return self._tasks[number]

    def list(self) -> list[ChildProcess]:
        """Return all tasks of this server, the oldest first."""
        return list(self._tasks.values())

    def start(
        self, words: Sequence[str], outlives: bool, result: Path | None = None, subject: int | None = None
    ) -> ChildProcess:
        """Start `unfog` with these words. RequestError if too many children run already."""
        with self._lock:
            running = [task for task in self.list() if task.status is None]
            if len(running) >= _MOST_RUNNING:
                raise RequestError(f"{len(running)} commands of this page are running; wait for one, or stop it")
            try:
                output = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  # open as long as the task is listed
            except OSError as error:
                raise RequestError(
                    f"no temporary file can be made ({error.strerror}); free some space in TMPDIR, or start the server "
                    "with TMPDIR set to another folder"
                ) from None
            shown, secrets = hide_secrets(words)
            process = subprocess.Popen(
                python_command("unfog", *shown),
                env=child_environment(**{STARTED_BY: "page"}, **secrets),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the server's terminal is not meant for it
            )
            self._number += 1
            task = self._tasks[self._number] = ChildProcess(
                self._number, tuple(words), outlives, process, output, result, subject
            )
            ended = [one.id for one in self.list() if one.status is not None]
            for number in ended[: max(0, len(self._tasks) - _MOST_KEPT)]:
                self._tasks.pop(number).output.close()
        self._publish(task.summary())
        return task

    def tick(self) -> None:
        """Publish the tasks that have written or ended."""
        for task in self.list():
            if task.has_changed():
                self._publish(task.summary())

    def close(self) -> None:
        """End the children that do not train."""
        ending = [task for task in self.list() if not task.outlives and task.status is None]
        for task in ending:
            task.stop()
        until = time.monotonic() + _END_SECONDS
        for task in ending:
            try:
                task.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                # It had its seconds; a server that waits on would keep its port.
                task.process.kill()


def command_text(words: Sequence[str]) -> str:
    """Return a command as typed in a shell, without passwords of URLs."""
    return without_secrets(shlex.join(["unfog", *words]))
