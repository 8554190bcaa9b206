"""What a file holds, told from a sample of its bytes: files of the same size and time of change may differ."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

BLOCK = 4096
BLOCKS = 64

_LOOKED_INTO = 256
_BYTES = 64
"""Of how many of many files how many bytes at the beginning, the middle and the end are part of their state."""


def sample_digest(path: str | os.PathLike[str], blocks: int = BLOCKS, block: int = BLOCK) -> bytes:
    """Digest of a regular file's beginning, its end and blocks spread evenly between; all of a small file.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        last = max(0, size - block)
        for start in sorted({last * i // (blocks + 1) for i in range(blocks + 2)}):
            digest.update(os.pread(file, block, start))
    finally:
        os.close(file)
    return digest.digest()


def files_digest(folder: Path, names: Sequence[str]) -> tuple[str, int]:
    """(digest of the name, bytes and mtime of each of these files below a folder, and of a few bytes in each of at most
    512 of them, spread evenly; bytes in all). Zeros for one that cannot be looked at."""
    digest, total = hashlib.sha256(), 0
    step = max(1, len(names) // _LOOKED_INTO)
    for i, name in enumerate(names):
        size = changed = 0
        with suppress(OSError):
            status = os.stat(folder / name)
            size, changed = status.st_size, status.st_mtime_ns
            if i % step == 0 and stat.S_ISREG(status.st_mode):  # to open a pipe would be to wait for its writer
                digest.update(sample_digest(folder / name, 1, _BYTES))
        digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
        total += size
    return digest.hexdigest(), total
