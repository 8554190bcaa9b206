"""The cache of decoded images, so that a large source is decoded once rather than in every run.

An entry is a pack in a folder named by its key: a hash of the source's state, the columns, the settings and Pillow's
version, so that a changed image makes another entry. KEY.json redirects from the key of the resolved settings, which a
run stores, to the entry of the settings as given. Entries that no process uses go when the cache is full, the least
recently used first; a person may delete all.
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

from unfog.data.decode_pool import Progress
from unfog.data.packs.pack import FORMAT, Pack
from unfog.data.packs.pack_writer import FILES, BusyError, check_replaceable, locked, write_pack
from unfog.data.scan import Scan, read_sides
from unfog.data.settings import Data
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder, cache_limit, hold, make_room
from unfog.files.locks import LOCK, OWNER, OwnedError, notify
from unfog.files.safe_files import LARGEST_TEXT, read_file, remove, remove_tree, write_atomic
from unfog.files.work_folder import work_folder
from unfog.text import format_bytes
from unfog.values.columns import columns_digest

# Bytes of pixels whose checksum each process compares: a tenth of a second. A whole pack takes seconds for each GB.
_COMPARED_BYTES = 2**25
_KEPT_SIDES = 1000  # images from which on their sides are kept: reading so many heads takes about half a second
_WAIT = 0.2  # seconds between two looks at what another process is decoding
_ABANDONED_SECONDS = 7 * 24 * 3600
_JSON_FILES = [f"{name}.json{suffix}" for name in ("done", "latents") for suffix in ("", ".partial", ".new")]
_compared = set[Path]()  # entries that this process has compared
_LATENT_FILES = frozenset(["latents.f16", "rows.i64", *_JSON_FILES])


def entry_key(scan: Scan, settings: Data) -> str:
    """Return the name of the entry for a source, as it was when it was scanned, decoded with these settings."""
    labels = "" if scan.labels is None else hashlib.sha256(np.ascontiguousarray(scan.labels).data).hexdigest()
    others = columns_digest(scan.columns)
    added = (*settings.later_key, *([others] if others else []))
    matters = (settings.size, settings.channels, settings.background, settings.held_out, scan.classes, labels, *added)
    # Pillow's version, as another one may decode or resize to other values.
    return hashlib.sha256(repr((FORMAT, PIL.__version__, scan.stamp, matters)).encode()).hexdigest()[:32]


def sides_of_images(scan: Scan, progress: Progress | None = None) -> NDArray[np.int32]:
    """Return `read_sides` of a source, [N, 2]. Those of many images are kept in the cache.

    Raises as `read_sides`.
    """
    folder, n = cache_folder(), len(scan.source.names)
    if n < _KEPT_SIDES:
        return read_sides(scan.source, progress)
    key = hashlib.sha256(repr((PIL.__version__, scan.stamp)).encode()).hexdigest()[:32]
    path = folder / f"sides-{key}.i32"
    hold(path)
    with suppress(OSError, ValueError):
        sides = np.frombuffer(read_file(path, folder, 8 * n), "<i4").reshape(n, 2)
        if (sides >= 0).all():
            return sides.astype(np.int32)
    sides = read_sides(scan.source, progress)
    with suppress(OSError):
        if make_room(8 * n) and scan.read_stamp() == scan.stamp:
            write_atomic(path, sides.astype("<i4").tobytes(), folder, shared=True)
    return sides


def load(key: str) -> Pack | None:
    """Open the entry of a key, or the one that KEY.json redirects to; None if there is no valid one."""
    folder = cache_folder()
    # Whatever the files hold, an invalid entry is decoded anew rather than reported.
    with suppress(OSError, RequestError, LookupError, RecursionError, TypeError, ValueError):
        if Pack.is_at(folder / key):
            return _open(folder / key)
        see = json.loads(read_file(folder / f"{key}.json", folder, LARGEST_TEXT))["see"]
        # A bare name, so that the file cannot lead out of the cache folder.
        if re.fullmatch(r"\w+", see) and Pack.is_at(folder / see):
            return _open(folder / see)
    return None


def _open(entry: Path) -> Pack:
    hold(entry)  # before it is opened, so that no file in it is removed meanwhile
    pack = Pack.open(entry)
    if entry not in _compared:
        if not pack.sample_is_whole(_COMPARED_BYTES):
            raise RequestError(f"{entry} is a damaged entry of the cache: its pixels are not as they were written")
        _compared.add(entry)
    return pack


def make(scan: Scan, key: str, progress: Progress | None = None) -> Pack:
    """Decode a source into the entry of a key, or finish one that was interrupted. Raises as `write_pack`."""
    folder = cache_folder()
    hold(folder / key)
    needed = len(scan.source.names) * scan.image_format.nbytes
    remedy = f"set UNFOG_CACHE to a folder with {format_bytes(max(needed, 1e6))} free, or use cache = none or memory"
    remove_stale_entries(folder)
    _remove_damaged(key)
    if not Pack.is_at(folder / key) and not make_room(needed, keep=folder / key):
        raise RequestError(over_limit(needed, "use cache = none or memory"))
    pack = _write_or_wait(scan, folder / key, key, remedy, progress)
    if scan.read_stamp() != scan.stamp:
        # The source changed meanwhile, so the pack is of no single state of it: this process uses it, no other does.
        remove_tree(folder / key, folder)  # mapped files stay for as long as they are mapped
        return pack
    resolved = entry_key(scan, pack.resolve_settings(scan.settings))
    if resolved != key:
        try:
            _redirect(folder / f"{resolved}.json", key)
        except OSError as error:
            raise RunError(
                f"{folder} could not be written ({error.strerror}); free some space there, or set UNFOG_CACHE"
            ) from error
    return pack


def _write_or_wait(scan: Scan, folder: Path, key: str, remedy: str, progress: Progress | None) -> Pack:
    while True:
        try:
            if not Pack.is_at(folder):
                _write(scan, folder, key, remedy, progress)
            return _open(folder)
        except (BusyError, OwnedError):  # another process is writing it
            time.sleep(_WAIT)
            if progress:
                progress(0, len(scan.source.names))  # it may raise to stop
        except RequestError:  # such as no space, which does not matter if another process has finished the pack
            if not Pack.is_at(folder):
                raise
            _remove_damaged(key)
            if Pack.is_at(folder) and load(key) is None:
                raise RequestError(
                    f"{folder} is a damaged entry of the cache and cannot be removed; remove it, or set UNFOG_CACHE"
                ) from None


def _write(scan: Scan, folder: Path, key: str, remedy: str, progress: Progress | None) -> None:
    """Write an entry, or finish an interrupted one, in a folder of this process's own. Raises as `write_pack`."""
    check_replaceable(folder, remedy)
    try:
        with work_folder(folder, rest=folder) as own:
            write_pack(scan, own, key, remedy, progress)
    except OwnedError:
        raise
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({error.strerror}); {remedy}") from error


def _redirect(path: Path, key: str) -> None:
    # Processes that waited for the same entry write the same redirection at the same time.
    write_atomic(path, json.dumps({"see": key}).encode(), path.parent, shared=True)


def _remove_damaged(key: str) -> None:
    folder = cache_folder() / key
    if Pack.is_at(folder):
        with suppress(OSError, BusyError), locked(folder):
            if Pack.is_at(folder) and load(key) is None:  # still, as another process may have made it anew
                notify(f"{folder} is damaged, so its images are decoded again")
                remove_tree(folder, cache_folder())


def free_bytes() -> int | None:
    """Return the free bytes on the disk of the cache folder; None if it cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None
    except OSError:
        return None


def over_limit(needed: int, remedy: str) -> str:
    """Return the message that so many bytes do not fit the limit of the cache."""
    return (
        f"{format_bytes(needed)} are more than the {cache_limit() / 1e9:,.3g} GB that the cache may hold "
        f"besides what is in use; set UNFOG_CACHE_LIMIT higher, or {remedy}"
    )


def remove_stale_entries(folder: Path) -> None:
    """Remove unfinished packs, latents and arrays that nobody wrote to for a week."""
    # The folder may hold anything else too, so an entry must have one of our names and hold nothing but our files.
    with suppress(OSError):
        for path in list(folder.iterdir()):
            with suppress(OSError, BusyError):
                if re.fullmatch(r"(array-[0-9a-f]{32}(\.npz)?\.|images-)[0-9-]+\.partial", path.name) and _is_old(path):
                    remove(path, folder)
                elif _is_abandoned(path):
                    with locked(path):
                        if _is_abandoned(path):  # still, now that no other process can go on with it
                            remove_tree(path, folder)


def _is_abandoned(path: Path) -> bool:
    known = frozenset[str]()
    if re.fullmatch(rf"[0-9a-f]{{32}}(\.{OWNER}\.partial)?", path.name):
        known = FILES if Pack.is_unfinished_at(path) else known
    elif re.fullmatch(rf"latents-[0-9a-f]{{32}}(\.{OWNER})?\.partial", path.name):
        known = _LATENT_FILES
    files = [file for file in path.iterdir() if file.name != LOCK] if known else []
    return bool(files) and all(file.name in known and _is_old(file) for file in files)


def _is_old(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and time.time() - file.stat().st_mtime > _ABANDONED_SECONDS
