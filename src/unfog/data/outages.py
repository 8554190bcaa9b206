"""Outages: the wait for a source that cannot be reached, and the test that separates an outage from a missing image."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from unfog.errors import RunError
from unfog.text import sanitize

T = TypeVar("T")

PATIENCE = 600.0  # seconds that an image is waited for
_RETRY = 1.0  # seconds between two attempts
_REMOVED_AFTER = 60.0  # seconds for which a folder is missing until it counts as removed
_REPORT = 0.5  # seconds between two reports to the thread that needs the images

# Device and number of a folder.
FolderIdentity = tuple[int, int]


class Outage:
    """The time in which the images of a source cannot be reached. Threads that read them wait for its end.

    Attributes:
        on_wait: called about twice a second by the thread that needs the images, with the reason while it waits, and
            once with "" afterwards. What it raises ends the wait.
        patience: seconds that one image is waited for.
        last_read: an image that was read; None before the first. Only what was once reached can be out of reach.
        ended: number of outages that are over.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[str], None] = lambda reason: None
        self.patience = PATIENCE
        self.last_read: int | None = None
        self.ended = 0
        self._lock = threading.Lock()
        self._waiting: dict[int, str] = {}  # thread -> reason
        self._began: float | None = None  # the earliest of the waits, until an image is read
        self._abandoned = 0  # waits of the reading thread that ended with an exception

    @property
    def reason(self) -> str:
        """Reason why images cannot be reached now; "" if they can be."""
        return next(iter(list(self._waiting.values())), "")

    def wait(self, source: str, reason: str, since: float, stopping: threading.Event) -> None:
        """Wait before another attempt at an image that has been waited for `since` this time (`time.monotonic`).

        RunError if that takes longer than `patience`, or nobody needs the image any more.
        """
        with self._lock:
            self._began = since if self._began is None else min(self._began, since)
            self._waiting[threading.get_ident()] = reason
            waited, abandoned = time.monotonic() - self._began, self._abandoned
        if waited > self.patience or stopping.wait(_RETRY) or self._abandoned != abandoned:
            self._waiting.pop(threading.get_ident(), None)
            raise RunError(
                f"the images in {sanitize(source)} cannot be reached: {sanitize(reason)}, after a wait of "
                f"{waited:.0f} s; once they can be read, use `unfog resume` or repeat the command"
            )

    def end(self) -> None:
        """Note that this thread has reached the source."""
        if self._began is None:
            return
        with self._lock:
            self._waiting.pop(threading.get_ident(), None)
            if self._began is not None and not self._waiting:
                self._began = None
                self.ended += 1

    def result(self, task: Future[T]) -> T:
        """Return the result of a task that reads images, and report outages to `on_wait` meanwhile."""
        reported = False
        try:
            while not task.done() and not wait([task], _REPORT).done:
                if reason := self.reason:
                    reported = True
                    self.on_wait(reason)
        except BaseException:
            self._abandoned += 1  # the threads would go on waiting for images that nobody needs
            raise
        if reported:
            self.on_wait("")
        return task.result()


class KnownFolders:
    """Identities of folders when a source was opened.

    A mount that is gone shows another folder, or none, at its path; a folder whose files were removed is still the
    same one.
    """

    def __init__(self, top: str, identities: Mapping[str, FolderIdentity]) -> None:
        """`top` is a path without a slash at its end; the keys of `identities` are paths below it, or itself."""
        self._top, self._identities = top, dict(identities)
        self._missing_since: dict[str, float] = {}

    @classmethod
    def of(cls, folder: str) -> KnownFolders:
        """Return the present state of a folder; without an identity if it cannot be looked at."""
        try:
            return cls(folder, {folder: folder_identity(os.stat(folder))})
        except OSError:
            return cls(folder, {})

    def problem(self, path: str) -> str:
        """Return why the folder of a file cannot be trusted to show that the file is gone; "" if it can be."""
        folder = os.path.dirname(path)
        while True:
            try:
                now = folder_identity(os.stat(folder))
                with os.scandir(folder) as entries:
                    next(entries, None)
            except (FileNotFoundError, NotADirectoryError) as error:
                # A removed folder: the one above it decides. A link whose target is missing is not a removed folder.
                if len(folder) <= len(self._top) or os.path.islink(folder):
                    return f"{folder}: {error.strerror}"
                if self._may_come_back(folder):
                    return f"{folder} is not there"
                folder = os.path.dirname(folder)
                continue
            except OSError as error:
                return f"{folder}: {error.strerror}"
            self._missing_since.pop(folder, None)
            known = self._identities.get(folder, now)
            return "" if now == known else f"{folder} is another folder now"

    def _may_come_back(self, folder: str) -> bool:
        """Return True for a folder that was there at first, and is missing for a short time only."""
        now = time.monotonic()
        return folder in self._identities and now - self._missing_since.setdefault(folder, now) < _REMOVED_AFTER


def folder_identity(status: os.stat_result) -> FolderIdentity:
    """Return device and number of a folder; (0, 0) on file systems that number nothing."""
    return (status.st_dev, status.st_ino) if status.st_ino else (0, 0)
