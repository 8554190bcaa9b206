"""Lock on a folder, held by one process: flock and the mark of its owner."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unfog.files.flock import LOCK, excludes_others, is_at, lock_file
from unfog.files.owner import MARK_BYTES, REFRESH, OwnedError, Owner, falls_silent, read_mark
from unfog.files.safe_files import open_file, remove

_SETTLE = 0.5  # seconds after which a mark is read back, where nothing else decides between two processes


class FolderLock:
    """A lock that this process holds on a folder.

    Attributes:
        supported: flock works here, at least among the processes of this machine.
        before: the process that had the folder before and is gone, if it has left its mark.
        lost: another process has taken the folder over, as this one seemed to be gone; looked at every few seconds.
    """

    def __init__(self, path: Path, file: BinaryIO | None, supported: bool):
        self.supported, self.lost = supported, False
        self.owner = Owner.this_process()
        self._path, self._file, self._over = path, file, threading.Event()
        self.before: Owner | None = None
        self._thread = threading.Thread(target=self._refresh, name="lock", daemon=True)

    def new_owner(self) -> Owner | None:
        """Return the process that has taken the folder over; None while it is this process's."""
        if self._file is None:
            return None
        other, _ = read_mark(self._path)
        # The mark of the one before stays if the disk is full.
        self.lost = other is not None and other not in (self.owner, self.before)
        return other if self.lost else None

    def mark(self, made: bool) -> None:
        """Write the mark of this process. OwnedError if another one has written its own at the same time.

        `made`: this process has made the file, so no other one was there before it.
        """
        if self._file is None:
            return
        self.before, _ = read_mark(self._path)
        # Closed at once, as NFS writes a file when it is closed.
        with suppress(OSError), open_file(self._path, "a+b", self._path.parent) as file:
            file.write(f"{self.owner} {os.fstat(file.fileno()).st_dev}".encode().ljust(MARK_BYTES - 1) + b"\n")
        if not self.supported and not made:
            time.sleep(_SETTLE)
        if (other := self.new_owner()) is not None:
            raise OwnedError(self._path, other)
        self._thread.start()

    def release(self) -> None:
        """End the heartbeat and free the folder for other processes."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        if self._file is None:
            return
        # The folder may have been moved or created anew, with another's lock in it, or been taken over.
        if is_at(self._file.fileno(), self._path) and self.new_owner() is None:
            with suppress(OSError):
                remove(self._path, self._path.parent)
        if not self._thread.is_alive():  # else it hangs in a refresh of this descriptor
            self._file.close()

    def _refresh(self) -> None:
        assert self._file is not None
        while not self._over.wait(REFRESH):
            with suppress(OSError):
                if self.new_owner() is None and os.utime in os.supports_fd:
                    os.utime(self._file.fileno())


@contextmanager
def lock_of(folder: Path) -> Iterator[FolderLock]:
    """Lock a folder for this process, which gives it back however it ends.

    OwnedError, a BlockingIOError, if another process has locked it. An owner on another machine that may have been
    killed is watched for up to 15 seconds. OSError if a link or pipe has the name of the lock.
    """
    # The lock is on a file in it: a lock on a folder of NFS is not seen by other machines.
    path = folder / LOCK
    if sys.platform == "win32":
        yield FolderLock(path, None, True)
        return
    try:
        file, made, granted = lock_file(path)
    except BlockingIOError:
        raise OwnedError(path, read_mark(path)[0]) from None
    lock = FolderLock(path, file, granted and excludes_others(path))
    try:
        if file is not None and not made:
            _check_owner_gone(path, lock.supported)
        lock.mark(made)
    except BaseException:
        if file is not None:
            file.close()  # the file stays, as it is another's
        raise
    try:
        yield lock
    finally:
        lock.release()


def _check_owner_gone(path: Path, supported: bool) -> None:
    """OwnedError if the process that a lock file is marked with may still be at work."""
    owner, device = read_mark(path)
    if owner is None and not supported:  # the process that has just made the file may be about to mark it
        time.sleep(_SETTLE)
        owner, device = read_mark(path)
    if owner is None:
        return
    with suppress(OSError):
        if supported and owner.kernel == Owner.this_process().kernel and device == path.stat().st_dev:
            return  # flock works among the processes of this machine, and would have refused
    gone = owner.is_gone()
    if gone is None:
        gone = falls_silent(path, owner)
    if not gone:
        raise OwnedError(path, owner)
