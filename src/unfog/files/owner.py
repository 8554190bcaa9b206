"""Owner of a lock or folder: its process, the mark that names it, and whether it is gone."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unfog.files.flock import LOCK, notify
from unfog.files.safe_files import open_file, read_file, remove

OWNER = r"[0-9a-f]{8}-[0-9]+-[0-9]+-[0-9]+-[0-9a-f]{16}-[\w.-]{1,40}"  # pattern of `str(Owner)`
REFRESH = 5.0  # seconds between two refreshes of a mark
OVERDUE = 3 * REFRESH  # seconds after which an owner on another machine is taken for gone
MARK_BYTES = 256  # fixed, so that a full disk can take a new mark in place of an old one


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
