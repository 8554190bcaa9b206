"""Files of the shard index: written atomically, and validated when read. Nothing in them is unpickled."""

from __future__ import annotations

import json
import os
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.webdataset.index_builder import ROW_DTYPE, IndexEntry

_ABANDONED_SECONDS = 24 * 3600
_PARTIAL = re.compile(r"[0-9]+-[0-9]{19}(-[0-9a-f]{8}|\.(rows|codes|names))\.partial")  # no others are ours
DAMAGE_ERRORS = (
    *(OSError, BadZipFile, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError, SyntaxError),
    *(NotImplementedError, RuntimeError, struct.error, zlib.error, TokenError),
)
"""Errors that reading a damaged file may raise."""


def save_entry(file: Path, entry: IndexEntry) -> None:
    info = {"values": entry.values, "ignored": entry.ignored, "quarantined": entry.skipped}
    buffer = BytesIO()
    np.savez(
        buffer,
        rows=entry.rows,
        names=np.frombuffer(entry.names, np.uint8),
        info=np.frombuffer(json.dumps(info).encode(), np.uint8),
    )
    write_atomically(file, [buffer.getbuffer()])


def load_entry(file: Path, size: int) -> IndexEntry | None:
    """Return the stored entry of a shard of `size` bytes, None if there is none or it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            rows, names, info = arrays["rows"], arrays["names"].tobytes(), json.loads(arrays["info"].tobytes())
        values = [(str(kind), str(value)) for kind, value in info["values"]]
        starts = rows["name"]
        whole = rows.dtype == ROW_DTYPE and rows.ndim == 1
        whole = whole and bool((rows["start"] >= 0).all() and (rows["size"] >= 0).all())
        whole = whole and bool((rows["start"] + rows["size"] <= size).all() and (rows["label"] < len(values)).all())
        whole = whole and bool((rows["label"] >= -1).all())
        whole = whole and bool((np.diff(starts, append=len(names)) >= 0).all() and (starts[:1] == 0).all())
        ignored = Counter({str(kind): int(count) for kind, count in info["ignored"].items()})
        skipped = [SkippedFile(str(name), str(reason)) for name, reason in info["quarantined"]]
    except DAMAGE_ERRORS:
        return None
    return IndexEntry(rows, names, values, ignored, skipped) if whole else None


def map_codes(file: Path, count: int, known: int) -> NDArray[np.int64]:
    """Map a file of `count` class or folder numbers below `known`. Raises ValueError if it holds anything else."""
    codes: NDArray[np.int64] = map_array(file, np.dtype("<i8"), count)
    if count and not 0 <= int(codes.min()) <= int(codes.max()) < known:
        raise ValueError("out of range")
    return codes


def map_array(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file of `count` items. Raises ValueError if it has another size."""
    if count < 0 or file.stat().st_size != count * dtype.itemsize:
        raise ValueError("not whole")
    return np.asarray(np.memmap(file, dtype, "r", shape=(count,))) if count else np.zeros(0, dtype)


def remove_partial_files(folder: Path) -> None:
    """Remove files over a day old that killed processes left half-written."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            if _PARTIAL.fullmatch(partial.name) and time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
                partial.unlink()


def write_atomically(file: Path, parts: Sequence[Any]) -> None:
    partial = file.with_name(f"{os.getpid()}-{time.time_ns()}-{file.name[:8]}.partial")
    try:
        with partial.open("wb") as out:
            out.writelines(parts)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
