"""State of a run folder: at its path, moved or removed, or out of reach together with its disk."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

from unfog.files.safe_files import LARGEST_TEXT, read_file

HEARTBEAT_FILE = "heartbeat.json"
PATIENCE = 600.0  # seconds that a run folder out of reach is waited for

_Identity = tuple[int, int]  # device and number
_State = Literal["here", "moved", "away"]


class RunPlace:
    """A run folder as it was when this was made, held open to find it again after somebody has moved it.

    Not every error means that the folder has moved: a mount that is gone shows another folder or none at its path, and
    may fail with any error. Safe to use from one thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor, self._was_away = -1, False
        self._note()

    def look(self) -> _State:
        """Return "here", "moved" (moved, removed or replaced), or "away" while its disk cannot be reached."""
        state = self._look()
        if state == "here" and self._was_away:
            self._note()  # the descriptor is of the mount that is gone
        self._was_away = state == "away"
        return state

    def _look(self) -> _State:
        now = folder_identity(self.path)
        if now is not None and now == self._identity:
            return "here"
        if self.moved_to() is not None:
            return "moved"
        if now is None:
            return "moved" if self._is_removed() else "away"
        if self._descriptor < 0:  # Windows, which has no such mounts
            return "moved"
        links = self._links()
        if links == 0:  # removed, and another folder took its place
            return "moved"
        # The disk may be back, and number its files anew.
        renumbered = links is None or self._identity is None or now[0] != self._identity[0]
        return "here" if renumbered and self._is_ours() else "away"

    def moved_to(self) -> Path | None:
        """Return the new path of the folder if it was moved, as far as the system knows it."""
        if self._descriptor < 0 or self._identity is None:
            return None
        with suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            if folder_identity(place) == self._identity and folder_identity(self.path) != self._identity:
                return place
        return None

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                os.close(descriptor)

    __del__ = close

    def _note(self) -> None:
        self.close()
        self._identity, self._parent = folder_identity(self.path), folder_identity(self.path.absolute().parent)
        if hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders
            with suppress(OSError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _links(self) -> int | None:
        """Return the number of names of the open folder, 0 once it is removed; None if its disk is dead."""
        try:
            return os.fstat(self._descriptor).st_nlink
        except OSError:
            return None

    def _is_removed(self) -> bool:
        """Return True if the folder that it was in is there, can be read and does not list it."""
        parent = self.path.absolute().parent
        try:
            return folder_identity(parent) == self._parent is not None and self.path.name not in os.listdir(parent)
        except OSError:
            return False

    def _is_ours(self) -> bool:
        """Return True if the folder at the path has the heartbeat of this process."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            beat = json.loads(read_file(self.path / HEARTBEAT_FILE, self.path, LARGEST_TEXT))
            return (beat["pid"], beat["host"]) == (os.getpid(), socket.gethostname())
        return False


def folder_identity(folder: Path) -> _Identity | None:
    """Return device and number of a folder, which renaming it keeps; None if it cannot be looked at."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
