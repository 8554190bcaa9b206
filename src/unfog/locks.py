"""Locks on folders, among the processes of one machine or of several that share a disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"  # file in a locked folder; one that a killed process left behind locks nothing

_TRIES = 100


@contextmanager
def lock_of(folder: Path) -> Iterator[bool]:
    """Lock a folder for this process; the system releases the lock however the process ends.

    Yields False where locks are not supported, such as on some network file systems. BlockingIOError if another process
    has locked it.
    """
    # The lock is on a file in it: a lock on a folder of NFS is not seen by other machines.
    if sys.platform == "win32":
        yield True
        return
    path = folder / LOCK
    descriptor, ours = _locked(path)
    try:
        yield ours
    finally:
        if descriptor is not None:
            if _is_at(descriptor, path):  # the folder may have been moved or created anew, with another's lock in it
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)


def _locked(path: Path) -> tuple[int | None, bool]:
    """Return (descriptor, None if it cannot be opened; True if it is locked)."""
    import fcntl

    descriptor = None
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            if descriptor is not None:
                os.close(descriptor)
            raise
        except OSError:
            return descriptor, False
        if _is_at(descriptor, path):
            return descriptor, True
        os.close(descriptor)  # its owner has removed the file since it was opened
        descriptor = None
    return None, False


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
