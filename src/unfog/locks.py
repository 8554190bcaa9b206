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
            if is_at(descriptor, path):  # the folder may have been moved or created anew, with another's lock in it
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)


@contextmanager
def lock_alone(path: Path) -> Iterator[bool]:
    """Lock a file, made if it is missing, against all that `lock_shared` has locked it for.

    Yields False if another process has locked it, or if locks are not supported and nobody can tell.
    """
    if sys.platform == "win32":
        yield True  # no file that is open can be removed there
        return
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def lock_shared(path: Path) -> int:
    """Lock a file, made if it is missing, together with others. Return the descriptor that holds the lock.

    OSError if it cannot be locked, or if its folder is gone.
    """
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except PermissionError:  # of another user
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # it was removed while this process waited
    raise FileNotFoundError(path)


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
        if is_at(descriptor, path):
            return descriptor, True
        os.close(descriptor)  # its owner has removed the file since it was opened
        descriptor = None
    return None, False


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the open file is the one at that path now."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
