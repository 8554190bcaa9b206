"""Locks on folders, among processes of one machine or of several that share a disk; and folders written as a whole."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unfog.safe_files import move, open_file, remove, remove_tree

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
    file, ours = _locked(path)
    try:
        yield ours
    finally:
        if file is not None:
            if is_at(file.fileno(), path):  # the folder may have been moved or created anew, with another's lock in it
                with suppress(OSError):
                    remove(path, folder)
            file.close()


@contextmanager
def lock_alone(path: Path) -> Iterator[bool]:
    """Lock a file, made if it is missing, against all that `lock_shared` has locked it for.

    Yields False if another process has locked it, or if locks are not supported and nobody can tell.
    """
    if sys.platform == "win32":
        yield True  # no file that is open can be removed there
        return
    try:
        file, ours = _locked(path)
    except BlockingIOError:
        file, ours = None, False
    try:
        yield ours
    finally:
        if file is not None:
            file.close()


def lock_shared(path: Path) -> int:
    """Lock a file, made if it is missing, together with others. Return the descriptor that holds the lock.

    OSError if it cannot be locked, or if its folder is gone.
    """
    for _ in range(_TRIES):
        try:
            file = open_file(path, "a+b", path.parent)
        except PermissionError:  # of another user
            file = open_file(path, "rb", path.parent)
        with file:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_SH)
            if is_at(file.fileno(), path):  # or it was removed while this process waited
                return os.dup(file.fileno())  # of one open file, so the lock is held until both are closed
    raise FileNotFoundError(path)


def _locked(path: Path) -> tuple[BinaryIO | None, bool]:
    """Return (the open file, None if it cannot be opened; True if it is locked). OSError if a link or pipe is there."""
    import fcntl

    for _ in range(_TRIES):
        try:
            file = open_file(path, "a+b", path.parent)
        except FileNotFoundError:
            raise
        except OSError:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise
            return None, False
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            return file, False
        if is_at(file.fileno(), path):
            return file, True
        file.close()  # its owner has removed the file since it was opened
    return None, False


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the open file is the one at that path now."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder`, which takes its place at the end of the `with`; nothing stays after an exception.

    OSError if something other than an empty folder is there, or another process is writing it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir():  # a link to an empty folder cannot be replaced, and that folder can
        folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    if not partial.is_dir() or partial.is_symlink():
        remove_tree(partial, folder.parent)
        partial.mkdir(exist_ok=True)
    with _alone(partial, folder):
        for name in os.listdir(partial):  # of a process that was killed
            remove_tree(partial / name, folder.parent)
        try:
            yield partial
            move(partial, folder, folder.parent)
        except BaseException:
            remove_tree(partial, folder.parent)
            raise


@contextmanager
def _alone(partial: Path, folder: Path) -> Iterator[None]:
    """Lock the folder beside `folder` that one process writes. OSError if another process does."""
    if sys.platform == "win32":
        yield
        return
    import fcntl  # Windows has none

    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):  # any other is of a file system without locks
                raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None
        yield
    finally:
        os.close(descriptor)
