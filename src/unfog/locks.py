"""Whose turn it is in a folder, among the processes of one machine or of several that share a disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
"""File in a folder that somebody is at. One that is left by a process that was killed says nothing."""

_TRIES = 100


@contextmanager
def lock_of(folder: Path) -> Iterator[bool]:
    """Have a folder for this process alone; the system gives the lock back however the process ends.

    The lock is on a file, which is there only meanwhile: of one on a folder of NFS, Linux tells no other machine.

    Yields False where nothing can be locked, as on a file system without locks.

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: the folder is gone.
    """
    if sys.platform == "win32":
        yield True
        return
    path = folder / LOCK
    descriptor, ours = _locked(path)
    try:
        yield ours
    finally:
        if descriptor is not None:
            if _is_at(descriptor, path):  # by now it may be another's: the folder was moved, or made anew
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)


def _locked(path: Path) -> tuple[int | None, bool]:
    """(the open file, None if it cannot be opened for writing; whether it is locked)."""
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
        os.close(descriptor)  # who had it has removed it since it was opened
        descriptor = None
    return None, False


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether that open file is the one at this path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
