"""The space in the cache folder: how much is free, how much an entry takes, and removal of abandoned entries."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from unfog.cache_folder import cache_folder
from unfog.data.packs.pack_files import is_begun
from unfog.data.packs.pack_journal import FILES, BusyError, locked
from unfog.locks import LOCK

_ABANDONED_SECONDS = 7 * 24 * 3600
_LATENT_FILES = frozenset(
    [
        "latents.f16",
        "rows.i64",
        *(f"{name}.json{suffix}" for name in ("done", "latents") for suffix in ("", ".partial")),
    ]
)


def free_bytes() -> int | None:
    """Return the free bytes on the disk of the cache folder; None if it cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None
    except OSError:
        return None


def disk_usage(entry: Path) -> int:
    """Return the bytes on disk of an entry, finished or not; 0 if there is none."""
    total = 0
    with suppress(OSError):
        for path in entry.iterdir():
            status = path.stat()
            # Blocks, as a file may have holes.
            total += 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size
    return total


def remove_stale_entries(folder: Path) -> None:
    """Remove unfinished packs, latents and unpacked arrays that nobody wrote to for a week.

    The folder may hold anything else too, so an entry must have one of our names and hold nothing but our files.
    """
    with suppress(OSError):
        for path in list(folder.iterdir()):
            with suppress(OSError, BusyError):
                if re.fullmatch(r"array-[0-9a-f]{32}\.[0-9]+\.partial", path.name) and _is_old(path):
                    path.unlink()
                elif _is_abandoned(path):
                    with locked(path):
                        if _is_abandoned(path):  # still, now that no other process can go on with it
                            shutil.rmtree(path)


def _is_abandoned(path: Path) -> bool:
    if re.fullmatch(r"[0-9a-f]{32}", path.name):
        known = FILES if is_begun(path) else frozenset[str]()
    else:
        known = _LATENT_FILES if re.fullmatch(r"latents-[0-9a-f]{32}\.partial", path.name) else frozenset[str]()
    files = [file for file in path.iterdir() if file.name != LOCK] if known else []
    return bool(files) and all(file.name in known and _is_old(file) for file in files)


def _is_old(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and time.time() - file.stat().st_mtime > _ABANDONED_SECONDS
