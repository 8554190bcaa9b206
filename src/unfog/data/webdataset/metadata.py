"""Values beside the images of tar shards: keys of their .json members, and members that a suffix names, such as .age.

The values of a column are kept for each shard in the cache, so that a shard is gone through once for each column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from unfog.data.sources.base import ImageError
from unfog.data.sources.folder import ignored_kind, normalize_path
from unfog.data.sources.image_files import os_error_reason
from unfog.data.sources.label_tables import strip_shard
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.index_entry import candidate_stems, open_shard, split_suffix
from unfog.data.webdataset.shard_index import ShardIndex, shard_key
from unfog.data.webdataset.tar import DamagedTarError, TarMember
from unfog.device.cores import thread_pool
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder
from unfog.files.safe_files import read_file, write_atomic
from unfog.text import sanitize

_LARGEST_MEMBER = 2**20
_LARGEST_FILE = 2**31
_THREADS, _REMOTE_THREADS = 2, 16  # remote ones mostly wait for the network
_LOOKED_AT = 200  # members that names are taken from
_MAX_MEMBERS = 10_000_000  # of a shard, as a server may send members without end
_Cells: TypeAlias = dict[str, Any]
"""Name of a member without its suffix -> the value of one column."""


def read_values(
    storage: Storage, index: ShardIndex, names: Sequence[str], wanted: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the values of the images `names` of each of the wanted columns that any image has; None if one lacks it.

    As for labels, a value is that of the member of the image's name, else of its name cut before one of its dots.
    RequestError if a shard cannot be read.
    """
    pool = thread_pool(_REMOTE_THREADS if storage.remote else _THREADS)
    try:
        cells = list(pool.map(lambda path: _cells_of(storage, path, index.states[path], wanted), index.shards))
    finally:
        pool.shutdown(cancel_futures=True)
    there = [name for name in wanted if any(each[name] for each in cells)]
    found: dict[str, list[Any]] = {name: [] for name in there}
    for shard, name in zip(index.rows["shard"].tolist(), names):
        stems = candidate_stems(split_suffix(strip_shard(name))[0])
        for column in there:
            of = cells[shard][column]
            found[column].append(next((of[stem] for stem in stems if stem in of), None))
    return found


def first_keys(storage: Storage, index: ShardIndex) -> list[str]:
    """Return the keys of the first .json member of the first shard; [] if it is not among the first members."""
    path = index.shards[0]
    with suppress(ImageError, DamagedTarError):
        for _, kind, data in islice(_sidecars(storage, path, index.states[path]), _LOOKED_AT):
            if kind == "json" and (values := _json_values(data)):
                return list(values)
    return []


def _cells_of(storage: Storage, path: str, state: FileState, wanted: Sequence[str]) -> dict[str, _Cells]:
    """Return the values of each column in a shard, from the cache where they are there."""
    files = {name: _cells_file(path, state, name) for name in wanted}
    found = {name: cells for name, file in files.items() if (cells := _load(file)) is not None}
    if missing := [name for name in wanted if name not in found]:
        found |= _scan(storage, path, state, missing)
        for name in missing:
            with suppress(OSError):  # then the shard is gone through again
                write_atomic(files[name], json.dumps(found[name]).encode(), files[name].parent, shared=True)
    return found


def _cells_file(path: str, state: FileState, column: str) -> Path:
    try:
        key = shard_key(path, state)
    except OSError as error:
        raise RequestError(f"{sanitize(path)} is a file {os_error_reason(error)}; restore it") from None
    digest = hashlib.sha256(column.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return cache_folder() / "shards" / f"{key}.{digest}.cells"


def _load(file: Path) -> _Cells | None:
    try:
        cells = json.loads(read_file(file, file.parent, _LARGEST_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    return cells if isinstance(cells, dict) else None


def _scan(storage: Storage, path: str, state: FileState, wanted: Sequence[str]) -> dict[str, _Cells]:
    cells: dict[str, _Cells] = {name: {} for name in wanted}
    suffixes = {name.lower(): name for name in wanted}
    try:
        for stem, kind, data in _sidecars(storage, path, state, suffixes):
            if kind == "json":
                values = _json_values(data)
                for name in wanted:
                    if name in values:
                        cells[name][stem] = values[name]
            else:
                cells[suffixes[kind]].setdefault(stem, data.decode("utf-8", "replace").strip())
    except DamagedTarError:  # what comes before the damage is used, as with images
        pass
    except ImageError as error:
        raise RequestError(f"{sanitize(path)} cannot be read: {error}; restore it, or try again") from error
    return cells


def _sidecars(
    storage: Storage, path: str, state: FileState, suffixes: Sequence[str] | dict[str, str] = ()
) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name without suffix, suffix, content) of the .json members of a shard, and those of other suffixes."""
    file = open_shard(storage, path, state.size)
    for member in islice(TarMember.iterate(file), _MAX_MEMBERS):
        name = normalize_path(member.name.decode("utf-8", "surrogateescape"))
        stem, kind = split_suffix(name)
        known = (kind == "json" or kind in suffixes) and ignored_kind(name) not in (None, "hidden")
        if known and member.regular and member.size <= _LARGEST_MEMBER:
            yield stem, kind, file.read_at(member.start, member.size)


def _json_values(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
