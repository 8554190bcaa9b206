"""Reads and writes at a place in a file, whatever its position: by the system, or where it has no such call by a lock.

Windows has no pread. There the position is moved under a lock of this process, and put back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# To open a file for `pread`. A pipe would wait for its writer, and Windows would translate the ends of lines.
READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))

_lock = threading.Lock()


def pread(file: int, count: int, offset: int) -> bytes:
    """Return at most `count` bytes from `offset` on of an open descriptor."""
    if hasattr(os, "pread"):
        return os.pread(file, count, offset)
    with _moved_to(file, offset):
        return os.read(file, count)


def pread_into(file: int, target: memoryview, offset: int) -> int:
    """Fill the bytes of `target` from `offset` on as far as the system does at once. Returns how many it read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [target], offset)
    data = pread(file, len(target), offset)
    target[: len(data)] = data
    return len(data)


def fill(file: int, target: memoryview, offset: int) -> bool:
    """Fill all bytes of `target` from `offset` on. Returns False if the file ends before."""
    done = 0
    while done < len(target):
        if not (part := pread_into(file, target[done:], offset + done)):
            return False
        done += part
    return True


def pwrite(file: int, data: Any, offset: int) -> int:
    """Write bytes at `offset` of an open descriptor. Returns how many were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    with _moved_to(file, offset):
        return os.write(file, data)


@contextmanager
def _moved_to(file: int, offset: int) -> Iterator[None]:
    with _lock:
        before = os.lseek(file, 0, os.SEEK_CUR)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            yield
        finally:
            os.lseek(file, before, os.SEEK_SET)
