"""Decoded images on disk, so that a large source is decoded once and not once a run.

An entry is a pack (see `pack`) in a folder named by its key, a hash of the source's state, the labels, the settings
and Pillow's version; so a changed image makes another entry. KEY.json leads from the settings as a run stored them to
the entry of those as asked. Entries are never deleted; all of it may be, at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

from unfog.cache_folder import cache_folder as cache_folder
from unfog.data.decode_pool import Progress
from unfog.data.packs.pack import Pack
from unfog.data.packs.pack_files import FORMAT, is_begun, is_pack
from unfog.data.packs.pack_journal import FILES, BusyError, locked
from unfog.data.packs.pack_writer import write_pack
from unfog.data.scan import Scan
from unfog.data.settings import Data
from unfog.errors import RequestError, RunError
from unfog.locks import LOCK

_ABANDONED_SECONDS = 7 * 24 * 3600
_LATENTS = frozenset(["latents.f16", "rows.i64", "done.json", "done.json.new", "latents.json", "latents.json.new"])
_WAIT = 0.2  # seconds between two looks at what another process is decoding


def entry_key(stamp: str, settings: Data, classes: tuple[str, ...], labels: NDArray[np.int64] | None) -> str:
    """Name of the entry for a source in this state under these settings, with these labels."""
    labelled = "" if labels is None else hashlib.sha256(np.ascontiguousarray(labels).data).hexdigest()
    matters = (settings.size, settings.channels, settings.background, settings.held_out, classes, labelled)
    return hashlib.sha256(repr((FORMAT, PIL.__version__, stamp, matters)).encode()).hexdigest()[:32]


def load(key: str) -> Pack | None:
    """The entry of that key; None if there is none that is whole.

    Whatever the files hold, this neither raises nor allocates for it: an entry that is no entry is decoded anew.
    """
    folder = cache_folder()
    with suppress(OSError, RequestError, LookupError, RecursionError, TypeError, ValueError):
        if is_pack(folder / key):
            return Pack.open(folder / key)
        see = json.loads((folder / f"{key}.json").read_text("utf-8"))["see"]
        if re.fullmatch(r"\w+", see) and is_pack(folder / see):
            return Pack.open(folder / see)
    return None


def room() -> int | None:
    """Free bytes where entries are kept; None if nothing can be written there."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None
    except OSError:
        return None


def held(entry: Path) -> int:
    """Bytes on disk of what is in an entry, or in one that was interrupted; 0 if there is none."""
    held = 0
    with suppress(OSError):
        for path in entry.iterdir():
            facts = path.stat()
            held += 512 * facts.st_blocks if hasattr(facts, "st_blocks") else facts.st_size  # it may have holes
    return held


def make(scan: Scan, key: str, progress: Progress | None = None) -> Pack:
    """Decode a source into the entry of that key, or go on with one that was interrupted.

    Where the source is changed meanwhile, what was decoded is neither state of it: it is found by nobody again, and
    gone with this process.

    Raises:
        RequestError: no image can be used; there is no room, or nothing can be written.
        RunError: the disk is full, or refuses.
    """
    folder = cache_folder()
    gigabytes = len(scan.source.names) * scan.channels * scan.size**2 / 1e9
    remedy = f"set UNFOG_CACHE to a folder with {gigabytes:.1f} GB free, or use cache = none or memory"
    remove_stale_entries(folder)
    _remove_damaged(key)
    pack = _write(scan, folder / key, key, remedy, progress)
    now, _ = scan.source.stamp()
    if now != scan.stamp:
        shutil.rmtree(folder / key, ignore_errors=True)  # mapped files stay for as long as they are mapped
        return pack
    settled = entry_key(scan.stamp, pack.resolve_settings(scan.settings), scan.classes, scan.labels)
    if settled != key:
        try:
            _lead(folder / f"{settled}.json", key)
        except OSError as error:
            raise RunError(f"{folder} could not be written ({error.strerror}); set UNFOG_CACHE or free it") from error
    return pack


def _write(scan: Scan, folder: Path, key: str, remedy: str, progress: Progress | None) -> Pack:
    """As `write_pack`; waits where another process is at it."""
    while not is_pack(folder):
        try:
            return write_pack(scan, folder, key, remedy, progress)
        except BusyError:
            time.sleep(_WAIT)
            if progress:
                progress(0, len(scan.source.names))  # it may raise to stop
        except RequestError:
            if not is_pack(folder):
                raise
    return Pack.open(folder)


def _lead(path: Path, key: str) -> None:
    partial = path.with_name(f"{os.getpid()}-{time.time_ns()}.partial")
    partial.write_text(json.dumps({"see": key}), "utf-8")
    partial.replace(path)


def _remove_damaged(key: str) -> None:
    """Remove the entry if it is none, and not one that another process has made since that was found."""
    folder = cache_folder() / key
    if is_pack(folder):
        with suppress(OSError, BusyError), locked(folder):
            if is_pack(folder) and load(key) is None:
                shutil.rmtree(folder, ignore_errors=True)


def remove_stale_entries(folder: Path) -> None:
    """Remove what has been left unfinished for a week: packs, latents, and arrays that were in memory.

    The folder may hold anything else, too, so it must be called as we call it, and hold nothing but our files.
    """
    with suppress(OSError):
        for path in list(folder.iterdir()):
            with suppress(OSError, BusyError):
                if re.fullmatch(r"array-[0-9a-f]{32}\.[0-9]+\.partial", path.name) and _is_old(path):
                    path.unlink()
                elif _is_abandoned(path):
                    with locked(path):
                        if _is_abandoned(path):  # nobody has gone on with it since that was looked at
                            shutil.rmtree(path)


def _is_abandoned(path: Path) -> bool:
    """Whether it is the folder of a pack or of latents that nobody finished or wrote to for a week."""
    if re.fullmatch(r"[0-9a-f]{32}", path.name):
        known = FILES if is_begun(path) else frozenset[str]()
    else:
        known = _LATENTS if re.fullmatch(r"latents-[0-9a-f]{32}\.partial", path.name) else frozenset[str]()
    files = [file for file in path.iterdir() if file.name != LOCK] if known else []
    return bool(files) and all(file.name in known and _is_old(file) for file in files)


def _is_old(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and time.time() - file.stat().st_mtime > _ABANDONED_SECONDS
