"""Locks by flock: never waited for without a limit, and believed only if a second one is refused."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unfog.files.safe_files import open_file

LOCK = ".lock"  # file in a locked folder; one that a killed process left behind locks nothing

_TRIES = 100
_BRIEF_TRIES = 5  # for a lock that is only an aid
_PAUSE = 0.05  # seconds between two of them
_SAY_AFTER, _GIVE_UP_AFTER = 10.0, 60.0  # seconds without an answer to flock
_BRIEF_WAIT = 2.0  # the same, for a lock that is only an aid

_silent_for: dict[int, float] = {}  # device of a file system -> seconds that flock was waited for in vain


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Prints a warning. Progress lines set it, so that the warning appears above them.
listener: Callable[[str], None] = _write_to_stderr


def notify(text: str) -> None:
    """Print a warning from a module below those that print."""
    listener(text)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the open file is the one at that path now."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def lock_alone(path: Path) -> Iterator[bool]:
    """Lock a file, made if it is missing, against all that `lock_shared` has locked it for.

    Yields False if another process has locked it, or if locks do not work, so that it is unknown.
    """
    if sys.platform == "win32":
        yield True  # no file that is open can be removed there
        return
    try:
        file, _, granted = lock_file(path)
    except BlockingIOError:
        file, granted = None, False
    try:
        yield granted and excludes_others(path)
    finally:
        if file is not None:
            file.close()


def lock_shared(path: Path) -> int:
    """Lock a file, made if it is missing, together with others. Return the descriptor that holds the lock.

    OSError if it cannot be locked within moments, or if its folder is gone.
    """
    for attempt in range(_BRIEF_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        try:
            file = open_file(path, "a+b", path.parent)
        except PermissionError:  # of another user
            file = open_file(path, "rb", path.parent)
        with file:
            if sys.platform != "win32":
                import fcntl

                try:
                    _flock(file, fcntl.LOCK_SH, path, _BRIEF_WAIT)
                except BlockingIOError:
                    continue
            if is_at(file.fileno(), path):  # or it was removed before it was locked
                return os.dup(file.fileno())  # of one open file, so the lock is held until both are closed
    raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(path))


def lock_file(path: Path) -> tuple[BinaryIO | None, bool, bool]:
    """Return (the open file, None if it cannot be opened; True if it was made; True if flock granted the lock).

    BlockingIOError if another process has locked it. OSError if a link or pipe is there.
    """
    import fcntl

    for _ in range(_TRIES):
        try:
            file, made = _opened(path)
        except FileNotFoundError:
            raise
        except OSError:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise
            return None, False, False
        try:
            _flock(file, fcntl.LOCK_EX, path)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            return file, made, False
        except BaseException:
            file.close()
            raise
        if is_at(file.fileno(), path):
            return file, made, True
        file.close()  # its owner has removed the file since it was opened
    return None, False, False


def _opened(path: Path) -> tuple[BinaryIO, bool]:
    """Open a file for a lock. Return it, and True if this process has made it: of several, exactly one does."""
    with suppress(FileExistsError):
        return open_file(path, "xb", path.parent), True
    return open_file(path, "a+b", path.parent), False


def _flock(file: BinaryIO, kind: int, path: Path, limit: float = _GIVE_UP_AFTER) -> None:
    """Lock an open file without waiting for other processes; BlockingIOError if one has locked it.

    OSError if the file system has no locks, or does not answer within `limit` seconds in all.
    """
    import fcntl

    device, begun = os.fstat(file.fileno()).st_dev, time.monotonic()
    left = limit - _silent_for.get(device, 0.0)
    if left <= 0:
        raise OSError(errno.ENOLCK, "the file system does not answer requests for locks", str(path))
    descriptor, outcome = os.dup(file.fileno()), list[BaseException]()

    def ask() -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BaseException as error:
            outcome.append(error)
        finally:
            os.close(descriptor)  # the lock is the open file's, so it stays

    # In a thread, as nothing else ends the wait for a server of NFS that does not answer.
    thread = threading.Thread(target=ask, name="flock", daemon=True)
    thread.start()
    thread.join(min(left, _SAY_AFTER))
    if thread.is_alive() and left > _SAY_AFTER:
        rest = left - _SAY_AFTER
        notify(f"waiting for a lock on {path}: its file system does not answer; going on without locks in {rest:.0f} s")
        thread.join(rest)
    if thread.is_alive():
        _silent_for[device] = _silent_for.get(device, 0.0) + time.monotonic() - begun
        raise OSError(errno.ENOLCK, "the file system does not answer requests for locks", str(path))
    _silent_for.pop(device, None)
    if outcome:
        raise outcome[0]


def excludes_others(path: Path) -> bool:
    """Return True if a second lock on a file that this process has locked is refused, as it must be."""
    import fcntl

    try:
        with open_file(path, "a+b", path.parent) as file:
            _flock(file, fcntl.LOCK_EX, path)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
