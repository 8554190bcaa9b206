"""The index of a set of tar shards, built once and stored, so that opening ten million images costs as much as ten.

The folder `shards` of the cache has KEY.piece.npz for each shard, so that only the new shards of a set that grew are
scanned; and for the set KEY.rows, KEY.codes and KEY.names, which are memory-mapped, and KEY.json with all else. A key
is a hash of the shard's path, size, and times of change or ETag. A damaged file is built anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.cache_folder import cache_folder
from unfog.data.data_report import SkippedFile
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import MAX_FILE_BYTES, os_error_reason
from unfog.data.sources.label_tables import sort_labels
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.index_builder import ROW_DTYPE, IndexEntry, index_shard
from unfog.data.webdataset.index_files import (
    DAMAGE_ERRORS,
    load_entry,
    map_array,
    map_codes,
    remove_partial_files,
    save_entry,
    write_atomically,
)
from unfog.errors import RequestError
from unfog.text import sanitize

_Progress = Callable[[int, int], None]
_FORMAT = 2
_TEXT = ("utf-8", "surrogateescape")
_THREADS, _REMOTE_THREADS = 2, 16
_POLL = 0.2  # seconds between two calls of `progress`
_MAX_FOLDERS = 100_000  # that are listed; those of a set with more are read from its names


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The position, name and label of every image in a set of shards. The arrays are mapped from files."""

    shards: Sequence[str]
    """Path or URL of each shard."""

    sizes: Sequence[int]
    """Bytes of each shard."""

    rows: NDArray[Any]
    """[n + 1] of ROW_DTYPE; the last row only ends the last name."""

    name_bytes: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    """[n], from .cls, .json or .txt members; None if there are none."""

    classes: tuple[str, ...]
    folders: tuple[list[str], NDArray[np.int64]] | None
    """(each folder below the shards, "" for none; [n] index of the folder of each image); None if there are labels."""

    ignored: Mapping[str, int]
    unreadable: Sequence[SkippedFile]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def place(self, i: int) -> tuple[str, int, int]:
        """Return (shard, start, bytes) of an image's file. Raises ImageError if the index is damaged."""
        row = self.rows[i]
        shard, start, size = int(row["shard"]), int(row["start"]), int(row["size"])
        # A mapped file may be written over at any time, so each row is checked as it is used.
        if not (
            0 <= shard < len(self.shards) and start >= 0 and 0 <= size <= min(MAX_FILE_BYTES, self.sizes[shard] - start)
        ):
            raise ImageError("in a damaged index")
        return self.shards[shard], start, size


def open_shard_index(
    storage: Storage, states: Mapping[str, FileState], base: str, progress: _Progress | None = None
) -> ShardIndex:
    """Return the index of these shards, loaded or built. `base` is the beginning of their paths that names leave out.

    Raises:
        RequestError: a shard cannot be read or is compressed; the cache cannot be written.
    """
    folder = cache_folder() / "shards"
    try:
        keys = {path: _key(path, state) for path, state in states.items()}
    except OSError as error:
        raise RequestError(
            f"{sanitize(str(error.filename))} is a file {os_error_reason(error)}; bring it, or leave it out"
        ) from None
    key = hashlib.sha256(repr((base.partition("?")[0], list(keys.values()))).encode()).hexdigest()[:32]
    found = _load(folder, key, states)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial_files(folder)
        _build_entries(storage, states, {path: folder / f"{key}.piece.npz" for path, key in keys.items()}, progress)
        entries = [(path, folder / f"{keys[path]}.piece.npz", states[path].size) for path in states]
        _combine(folder, key, entries, base)
    except OSError as error:
        raise RequestError(
            f"{folder} cannot be written ({error.strerror or error}), where the index of the shards is kept; set "
            "UNFOG_CACHE to a folder with room"
        ) from error
    found = _load(folder, key, states)
    if found is None:
        raise RequestError(f"{folder} does not keep what is written to it; set UNFOG_CACHE to another folder")
    return found


def shard_name(path: str, base: str) -> str:
    """Return the name of a shard in the names of its images."""
    return (path.partition("?")[0] if "://" in path else path).removeprefix(base)


def _key(path: str, state: FileState) -> str:
    if "://" in path:
        plain, written = path.partition("?")[0], 0  # without a signature, which changes daily
    else:
        # Programs that write over a file can set its mtime back, but not its ctime.
        plain, written = path, os.stat(path).st_ctime_ns
    return hashlib.sha256(repr((_FORMAT, plain, written, tuple(state))).encode("utf-8", "replace")).hexdigest()[:32]


def _build_entries(
    storage: Storage, states: Mapping[str, FileState], files: Mapping[str, Path], progress: _Progress | None
) -> None:
    """Index the shards that have no stored entry. Any exception, also one of `progress`, stops the threads."""
    missing = [path for path in states if load_entry(files[path], states[path].size) is None]
    passed, total = dict.fromkeys(missing, 0), sum(states[path].size for path in missing)
    stop = Event()

    def one(path: str) -> None:
        def report(done: int) -> None:
            passed[path] = done
            if stop.is_set():
                raise InterruptedError

        report(0)
        try:
            entry = index_shard(storage, path, states[path], report)
        except ImageError as error:
            raise RequestError(f"{sanitize(path)} cannot be read: {error}; bring it back, or leave it out") from error
        save_entry(files[path], entry)
        passed[path] = states[path].size

    pool = ThreadPoolExecutor(_REMOTE_THREADS if storage.remote else _THREADS)
    try:
        pending = {pool.submit(one, path) for path in missing}
        while pending:
            done, pending = wait(pending, _POLL, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if progress:
                progress(sum(passed.values()) >> 20, max(1, total >> 20))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_Files = Sequence[tuple[str, Path, int]]


def _load_entries(files: _Files) -> Iterator[tuple[str, IndexEntry]]:
    for path, file, size in files:
        entry = load_entry(file, size)
        if entry is None:
            raise OSError(f"{file.name} was removed meanwhile")
        yield path, entry


def _combine(folder: Path, key: str, files: _Files, base: str) -> None:
    """Write one index of all entries, in their order, with one entry in memory at a time."""
    kind, classes = _choose_labels(files)
    number = {name: i for i, name in enumerate(classes)}
    ignored, unreadable = Counter[str](), list[SkippedFile]()
    folders: dict[bytes, int] = {}
    count = at = 0
    partial = f"{os.getpid()}-{time.time_ns()}"
    parts = {end: folder / f"{partial}.{end}.partial" for end in ("rows", "codes", "names")}
    with ExitStack() as stack:
        for file in parts.values():
            stack.callback(file.unlink, missing_ok=True)  # which is gone when all went well
        rows, codes, names = (stack.enter_context(file.open("wb")) for file in parts.values())
        for shard, (path, entry) in enumerate(_load_entries(files)):
            if kind:
                values = np.array([number[value] if of == kind else -1 for of, value in entry.values] + [-1], np.int64)
                code = _without_unlabelled(entry, values[entry.rows["label"]])  # -1 is the last
            else:
                code = _folders(entry, folders)
            mine = entry.rows.copy()
            mine["name"], mine["shard"] = at + entry.rows["name"], shard
            rows.write(mine.tobytes())
            codes.write(code.tobytes())
            names.write(entry.names)
            count, at = count + len(mine), at + len(entry.names)
            ignored.update(entry.ignored)
            prefix = shard_name(path, base)
            unreadable += [one._replace(name=f"{prefix}/{one.name}".rstrip("/")) for one in entry.skipped]
        rows.write(np.array([(0, 0, at, 0, 0)], ROW_DTYPE).tobytes())
        for name, out in zip(parts, (rows, codes, names)):
            out.close()
            parts[name].replace(folder / f"{key}.{name}")
    info = {
        "count": count,
        "classes": classes if kind else None,
        "folders": None if kind or len(folders) > _MAX_FOLDERS else [name.decode(*_TEXT) for name in folders],
        "ignored": ignored,
        "unreadable": sorted(unreadable),
    }
    write_atomically(folder / f"{key}.json", [json.dumps(info).encode()])


def _folders(entry: IndexEntry, known: dict[bytes, int]) -> NDArray[np.int64]:
    """Return [n] index of the folder of each image, adding new folders to `known` until there are too many."""
    names, starts = entry.names, entry.rows["name"]
    slashes = np.append(-1, np.flatnonzero(np.frombuffer(names, np.uint8) == ord("/")))
    last = slashes[np.searchsorted(slashes, np.append(starts[1:], len(names))) - 1]  # before the end of each name
    found = np.zeros(len(starts), np.int64)
    for i, (start, end) in enumerate(zip(starts.tolist(), last.tolist())):
        if len(known) > _MAX_FOLDERS:
            break
        found[i] = known.setdefault(names[start : max(start, end)], len(known))
    return found


def _without_unlabelled(entry: IndexEntry, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move the images of label -1 to the skipped files of an entry, and return the labels of the others."""
    if (label >= 0).all():
        return label
    ends = np.append(entry.rows["name"][1:], len(entry.names))
    names = [entry.names[start:end] for start, end in zip(entry.rows["name"].tolist(), ends.tolist())]
    for i in np.flatnonzero(label < 0):
        name = names[i].decode(*_TEXT)
        entry.skipped.append(SkippedFile(name, "without a label, as others have"))
    kept = np.flatnonzero(label >= 0)
    names = [names[i] for i in kept]
    entry.rows, entry.names = entry.rows[kept], b"".join(names)
    lengths = np.array([len(name) for name in names], np.int64)
    entry.rows["name"] = np.cumsum(lengths) - lengths
    return label[kept]


def _choose_labels(files: _Files) -> tuple[str, list[str]]:
    """Return (kind of values that are the labels, "" for none; the classes).

    Those of .cls and .json, if at least half of the images have one; else those of .txt, if at least half have one and
    each has four images on average, as captions are no classes.
    """
    images = 0
    counts: Counter[str] = Counter()
    values: dict[str, set[str]] = {"class": set(), "text": set()}
    for _, entry in _load_entries(files):
        images += len(entry.rows)
        of = np.bincount(entry.rows["label"][entry.rows["label"] >= 0], minlength=len(entry.values))
        for (kind, value), number in zip(entry.values, of.tolist()):
            counts[kind] += number
            values.setdefault(kind, set()).add(value)
    if counts["class"] and 2 * counts["class"] >= images:
        return "class", sort_labels(values["class"])
    if counts["text"] and 2 * counts["text"] >= images and 4 * len(values["text"]) <= counts["text"]:
        return "text", sort_labels(values["text"])
    return "", []


def _load(folder: Path, key: str, states: Mapping[str, FileState]) -> ShardIndex | None:
    """Return the stored index of a set, None if there is none or it is damaged."""
    try:
        info = json.loads((folder / f"{key}.json").read_bytes())
        count, classes = int(info["count"]), info["classes"]
        rows = map_array(folder / f"{key}.rows", ROW_DTYPE, count + 1)
        names = map_array(folder / f"{key}.names", np.dtype(np.uint8), int(rows["name"][-1]))
        known = info["folders"] if classes is None else classes
        codes = None if known is None else map_codes(folder / f"{key}.codes", count, len(known))
        folders = None if classes is not None or codes is None else ([str(name) for name in known], codes)
        ignored = {str(kind): int(number) for kind, number in info["ignored"].items()}
        unreadable = [SkippedFile(str(name), str(reason)) for name, reason in info["unreadable"]]
        named = tuple(str(name) for name in classes or ())
    except DAMAGE_ERRORS:
        return None
    sizes = [state.size for state in states.values()]
    labels = None if classes is None else codes
    return ShardIndex(list(states), sizes, rows, names, labels, named, folders, ignored, unreadable)
