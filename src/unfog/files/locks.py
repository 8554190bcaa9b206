"""Locks on files and folders, which are never waited for without a limit: flock, and the mark of the owner.

A lock by flock is believed only if a second one is refused. A mark names the process that owns a folder, so that others
find out whether it is gone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from unfog.files.safe_files import open_file, read_file, remove

try:
    import fcntl as _fcntl  # noqa: F401

    _HAS_FLOCK = True
except ImportError:  # Windows
    _HAS_FLOCK = False

LOCK = ".lock"  # file in a locked folder; one that a killed process left behind locks nothing
MIRROR_MARK = ".mirror"  # file in a mirror of a run that names the run

_TRIES = 100
_BRIEF_TRIES = 5  # for a lock that is only an aid
_PAUSE = 0.05  # seconds between two of them
_SAY_AFTER, _GIVE_UP_AFTER = 10.0, 60.0  # seconds without an answer to flock
_BRIEF_WAIT = 2.0  # the same, for a lock that is only an aid

_silent_for: dict[int, float] = {}  # device of a file system -> seconds that flock was waited for in vain
OWNER = r"[0-9a-f]{8}-[0-9]+-[0-9]+-[0-9]+-[0-9a-f]{16}-[\w.-]{1,40}"  # pattern of `str(Owner)`
REFRESH = 5.0  # seconds between two refreshes of a mark
OVERDUE = 3 * REFRESH  # seconds after which an owner on another machine is taken for gone
MARK_BYTES = 256  # fixed, so that a full disk can take a new mark in place of an old one
_SETTLE = 0.5  # seconds after which a mark is read back, where nothing else decides between two processes


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
    if not _HAS_FLOCK:
        yield True  # Windows, where no file that is open can be removed
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
            if _HAS_FLOCK:
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


@dataclass(frozen=True)
class Owner:
    """The process that owns a file or folder, in a form that processes on this and other machines can judge."""

    kernel: str
    """Digest of the boot of the machine; of its name where that is unknown."""
    space: int
    """Namespace of process numbers; 0 if that is unknown."""
    pid: int
    start: int
    """Start of the process in clock ticks since the boot; 0 if that is unknown."""
    random: str
    host: str

    @classmethod
    def this_process(cls) -> Owner:
        """Return a new owner of this process, which differs from every other one."""
        host, boot, space = socket.gethostname(), socket.gethostname(), 0
        with suppress(OSError, ValueError):
            boot = read_file(Path("/proc/sys/kernel/random/boot_id"), Path("/proc"), MARK_BYTES).decode()
            space = os.stat("/proc/self/ns/pid").st_ino
        kernel = hashlib.sha256(boot.encode("utf-8", "replace")).hexdigest()[:8]
        return cls(kernel, space, os.getpid(), started_at(os.getpid()) or 0, secrets.token_hex(8), _plain(host))

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner of `str(owner)`; None if the text is something else."""
        if not re.fullmatch(OWNER, text, re.ASCII) or len(text) > MARK_BYTES:
            return None
        kernel, space, pid, start, random, host = text.split("-", 5)
        return cls(kernel, int(space), int(pid), int(start), random, host)

    def __str__(self) -> str:
        return f"{self.kernel}-{self.space}-{self.pid}-{self.start}-{self.random}-{self.host}"

    def is_named(self, pid: object, host: str) -> bool:
        """Return True if this is the process of that number and host."""
        return self.pid == pid and self.host == _plain(host)

    def is_gone(self) -> bool | None:
        """Return whether the process has ended; None if that cannot be known here, as on another machine."""
        here = Owner.this_process()
        if (self.kernel, self.space) != (here.kernel, here.space) or sys.platform == "win32":
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # it is another user's
        started = started_at(self.pid)
        # The number of a process that has ended is given to another one sooner or later.
        return started != self.start if started is not None and self.start else None


def _plain(host: str) -> str:
    """Return the name of a machine as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", host)[:40] or "_"


def started_at(pid: int) -> int | None:
    """Return the start of a process, -1 if it has ended and its parent has not noticed yet; None if unknown."""
    with suppress(OSError, ValueError, IndexError):
        fields = read_file(Path(f"/proc/{pid}/stat"), Path("/proc"), 2**16).rpartition(b")")[2].split()
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    return None


class OwnedError(BlockingIOError):
    """A live process owns what this one wants to lock. `owner` is None if only flock refuses."""

    def __init__(self, path: Path, owner: Owner | None = None):
        super().__init__(errno.EWOULDBLOCK, "another process has locked it", str(path))
        self.owner = owner


def read_mark(path: Path) -> tuple[Owner | None, int]:
    """Return the owner that a lock file is marked with, None without one; and the device that it has seen it on."""
    with suppress(OSError, ValueError):
        text, _, device = read_file(path, path.parent, MARK_BYTES).decode().strip().partition(" ")
        return Owner.parse(text), int(device or -1)
    return None, -1


def falls_silent(path: Path, owner: Owner) -> bool:
    """Watch the mark of an owner on another machine: False once it is refreshed, True if that is overdue."""
    first = changed(path)
    left = OVERDUE - (now_at(path.parent) - first)
    if left > 0:
        notify(
            f"watching for up to {left:.0f} s whether process {owner.pid} on {owner.host} still works in {path.parent}"
        )
    end = time.monotonic() + min(left, OVERDUE)
    while time.monotonic() < end:
        time.sleep(0.1)
        if changed(path) != first:
            return False
    return True


def changed(path: Path) -> float:
    """Return when a file was changed last, asking the server of a network file system anew; 0 if it is gone."""
    with suppress(OSError), open_file(path, "rb", path.parent) as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def now_at(folder: Path) -> float:
    """Return the time by the clock of a folder's file system."""
    probe = folder / f"{LOCK}.{secrets.token_hex(8)}"
    with suppress(OSError):
        try:
            with open_file(probe, "xb", folder) as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            remove(probe, folder)
    return time.time()


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
    if not _HAS_FLOCK:  # the heartbeat of a run shows that another process trains in it
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
