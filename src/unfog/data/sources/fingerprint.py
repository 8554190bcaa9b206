"""Digests of files from a sample of their bytes, as size and time of change may be the same after a change."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SAMPLED_FILES, _SAMPLED_BYTES = 256, 64
"""Of many files, in how many of them how many bytes at the beginning, the middle and the end count."""


def sample_digest(path: str | os.PathLike[str], blocks: int = 64, block: int = 4096) -> bytes:
    """Return a digest of a regular file's first and last block and of `blocks` spread evenly between.

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
    """Return (a digest of files below a folder, their bytes in all).

    The digest covers the name, size and mtime of each file, zeros for one that cannot be looked at, and a few bytes of
    at most 512 files, spread evenly, as opening each of a million would take minutes.
    """
    digest, total = hashlib.sha256(), 0
    step = max(1, len(names) // _SAMPLED_FILES)
    for i, name in enumerate(names):
        size = changed = 0
        with suppress(OSError):
            status = os.stat(folder / name)
            size, changed = status.st_size, status.st_mtime_ns
            if i % step == 0 and stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                digest.update(sample_digest(folder / name, 1, _SAMPLED_BYTES))
        digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
        total += size
    return digest.hexdigest(), total
