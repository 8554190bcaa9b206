"""Reads and writes at a place in a file, whatever its position: by the system, or where it has no such call by a lock.

Windows has no pread. There the position is moved under a lock of this process, and put back.
"""

from __future__ import annotations

import os
import threading
from typing import Any

# To open a file for `pread`. A pipe would wait for its writer, and Windows would translate the ends of lines.
READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))

_lock = threading.Lock()


def pread(file: int, count: int, offset: int) -> bytes:
    """Return at most `count` bytes from `offset` on of an open descriptor."""
    if hasattr(os, "pread"):
        return os.pread(file, count, offset)
    with _lock:
        before = os.lseek(file, 0, os.SEEK_CUR)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            return os.read(file, count)
        finally:
            os.lseek(file, before, os.SEEK_SET)


def pread_into(file: int, target: memoryview, offset: int) -> int:
    """Fill the bytes of `target` from `offset` on as far as the system does at once. Returns how many it read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [target], offset)
    data = pread(file, len(target), offset)
    target[: len(data)] = data
    return len(data)


def pwrite(file: int, data: Any, offset: int) -> int:
    """Write bytes at `offset` of an open descriptor. Returns how many were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    with _lock:
        before = os.lseek(file, 0, os.SEEK_CUR)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            return os.write(file, data)
        finally:
            os.lseek(file, before, os.SEEK_SET)
