"""The index of a set of tar shards, built once and stored, so that opening ten million images costs as much as ten.

The folder `shards` of the cache has KEY.piece.npz for each shard, so that only the new shards of a set that grew are
scanned; and for the set KEY.rows, KEY.codes and KEY.names, which are memory-mapped, and KEY.json with all else. A key
is a hash of the shard's path, size, and times of change or ETag. A damaged file is built anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.file_rows import is_local
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import MAX_FILE_BYTES, os_error_reason
from unfog.data.sources.label_tables import sort_labels
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.index_entry import ROW_DTYPE, IndexEntry
from unfog.device.cores import thread_pool
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, hold
from unfog.files.safe_files import read_file, regular_file, remove, replace_file, write_atomic
from unfog.text import sanitize

_Progress = Callable[[int, int], None]
_FORMAT = 2
_LARGEST_INFO = 2**31  # bytes
_TEXT = ("utf-8", "surrogateescape")
_THREADS, _REMOTE_THREADS = 2, 16  # remote ones mostly wait for the network
_POLL = 0.2  # seconds between two calls of `progress`
_ABANDONED_SECONDS = 24 * 3600
_PARTIAL = re.compile(r"[0-9a-f]{32}\.\w+(\.npz)?\.[0-9]+-[0-9]{19}\.partial")  # no others are ours
_MAX_FOLDERS = 100_000  # that are listed; those of a set with more are read from its names


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The position, name and label of every image in a set of shards. The arrays are mapped from files."""

    states: Mapping[str, FileState]
    """Path or URL of each shard -> its state."""

    rows: NDArray[Any]
    """[n + 1] of ROW_DTYPE; the last row only ends the last name."""

    name_bytes: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    """[n], from .cls, .json or .txt members; None without any."""

    classes: tuple[str, ...]
    folders: tuple[list[str], NDArray[np.int64]] | None
    """(each folder below the shards, "" for none; [n] index of the folder of each image); None if there are labels."""

    ignored: Mapping[str, int]
    unreadable: Sequence[SkippedFile]

    @cached_property
    def shards(self) -> list[str]:
        return list(self.states)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def place(self, i: int) -> tuple[str, int, int]:
        """Return (shard, start, bytes) of an image's file. Raises ImageError if the index is damaged."""
        row = self.rows[i]
        shard, start, size = int(row["shard"]), int(row["start"]), int(row["size"])
        # A mapped file may be written over at any time, so each row is checked as it is used.
        if 0 <= shard < len(self.shards) and start >= 0:
            path = self.shards[shard]
            if 0 <= size <= min(MAX_FILE_BYTES, self.states[path].size - start):
                return path, start, size
        raise ImageError("in a damaged index")

    @classmethod
    def open(
        cls, storage: Storage, states: Mapping[str, FileState], base: str, progress: _Progress | None = None
    ) -> ShardIndex:
        """Return the index of these shards, loaded or built. `base` is the part of their paths that names leave out.

        Raises:
            RequestError: a shard cannot be read or is compressed; the cache cannot be written.
        """
        folder = cache_folder() / "shards"
        hold(folder)
        try:
            keys = [shard_key(path, state) for path, state in states.items()]
        except OSError as error:
            raise RequestError(
                f"{sanitize(str(error.filename))} is a file {os_error_reason(error)}; restore it, or remove it "
                "from the pattern"
            ) from None
        key = hashlib.sha256(repr((plain_url(base), keys)).encode()).hexdigest()[:32]
        found = _load(folder, key, states)
        if found is not None:
            return found
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_partial_files(folder)
            files = {path: folder / f"{key}.piece.npz" for path, key in zip(states, keys)}
            _build_entries(storage, states, files, progress)
            _combine(folder / key, states, files, base)
        except OSError as error:
            raise RequestError(
                f"{folder} cannot be written ({error.strerror or error}), where the index of the shards is kept; set "
                "UNFOG_CACHE to a folder with room"
            ) from error
        found = _load(folder, key, states)
        if found is None:
            raise RequestError(f"{folder} does not keep what is written to it; set UNFOG_CACHE to another folder")
        return found


def plain_url(url: str) -> str:
    """Return a URL without its secrets, which change: user name, password, query. A path is unchanged."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    host, slash, path = rest.partition("?")[0].partition("/")
    # With az:// the part before the @ is a container.
    return f"{scheme}://{host.rpartition('@')[2] if scheme.startswith('http') else host}{slash}{path}"


def shard_name(path: str, base: str) -> str:
    """Return the name of a shard in the names of its images."""
    return plain_url(path).removeprefix(plain_url(base))


def shard_key(path: str, state: FileState) -> str:
    """Return the name of a shard in the cache: a digest of its path and state. OSError if it is gone."""
    # Programs that write over a file can set its mtime back, but not its ctime.
    written = 0 if "://" in path else os.stat(path).st_ctime_ns
    stated = (_FORMAT, plain_url(path), written, tuple(state))
    return hashlib.sha256(repr(stated).encode("utf-8", "replace")).hexdigest()[:32]


def _build_entries(
    storage: Storage, states: Mapping[str, FileState], files: Mapping[str, Path], progress: _Progress | None
) -> None:
    """Index the shards that have no stored entry. Any exception, also one of `progress`, stops the threads."""
    missing = [path for path in states if IndexEntry.load(files[path], states[path].size) is None]
    passed, total = dict.fromkeys(missing, 0), sum(states[path].size for path in missing)
    stop = Event()

    def one(path: str) -> None:
        def report(done: int) -> None:
            passed[path] = done
            if stop.is_set():
                raise InterruptedError

        report(0)  # so that a thread that starts after the stop opens nothing
        try:
            entry = IndexEntry.build(storage, path, states[path], report)
        except ImageError as error:
            raise RequestError(
                f"{sanitize(path)} cannot be read: {error}; restore it, or remove it from the pattern"
            ) from error
        entry.save(files[path])
        passed[path] = states[path].size

    pool = thread_pool(_REMOTE_THREADS if storage.remote else _THREADS)
    try:
        pending = {pool.submit(one, path) for path in missing}
        while pending:
            done, pending = wait(pending, _POLL, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if progress:
                progress(sum(passed.values()) >> 20, max(1, total >> 20))
    finally:
        stop.set()  # first, as shutdown waits for the threads
        pool.shutdown(cancel_futures=True)


def _load_entries(states: Mapping[str, FileState], files: Mapping[str, Path]) -> Iterator[tuple[str, IndexEntry]]:
    for path, file in files.items():
        entry = IndexEntry.load(file, states[path].size)
        if entry is None:
            raise OSError(f"{file.name} was removed meanwhile")
        yield path, entry


def _combine(out: Path, states: Mapping[str, FileState], files: Mapping[str, Path], base: str) -> None:
    """Write one index of all entries, in their order, with one entry in memory at a time: OUT.rows, OUT.codes, …"""
    kind, classes = _choose_labels(entry for _, entry in _load_entries(states, files))
    number = {name: i for i, name in enumerate(classes)}
    ignored, unreadable = Counter[str](), list[SkippedFile]()
    folders: dict[bytes, int] = {}
    count = at = 0
    with ExitStack() as stack:
        parts = (out.with_name(f"{out.name}.{end}") for end in ("rows", "codes", "names"))
        rows, codes, names = (stack.enter_context(replace_file(file, out.parent, shared=True)) for file in parts)
        for shard, (path, entry) in enumerate(_load_entries(states, files)):
            codes.write((_label_codes(entry, kind, number) if kind else _folder_codes(entry, folders)).tobytes())
            mine = entry.rows.copy()
            mine["name"], mine["shard"] = at + entry.rows["name"], shard
            rows.write(mine.tobytes())
            names.write(entry.names)
            count, at = count + len(mine), at + len(entry.names)
            ignored.update(entry.ignored)
            prefix = shard_name(path, base)
            unreadable += [one._replace(name=f"{prefix}/{one.name}".rstrip("/")) for one in entry.skipped]
        rows.write(np.array([(0, 0, at, 0, 0)], ROW_DTYPE).tobytes())
    info = {
        "count": count,
        "classes": classes if kind else None,
        "folders": None if kind or len(folders) > _MAX_FOLDERS else [name.decode(*_TEXT) for name in folders],
        "ignored": ignored,
        "unreadable": sorted(unreadable),
    }
    # Last, as a set without this file counts as not indexed.
    write_atomic(out.with_name(f"{out.name}.json"), json.dumps(info).encode(), out.parent, shared=True)


def _folder_codes(entry: IndexEntry, known: dict[bytes, int]) -> NDArray[np.int64]:
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


def _label_codes(entry: IndexEntry, kind: str, number: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the class of each image with a label of this kind; move the others to the entry's skipped files."""
    values = [number[value] if of == kind else -1 for of, value in entry.values]
    values.append(-1)  # which label -1, for none, picks
    codes: NDArray[np.int64] = np.array(values, np.int64)[entry.rows["label"]]
    if (codes >= 0).all():
        return codes
    ends = np.append(entry.rows["name"][1:], len(entry.names))
    names = [entry.names[start:end] for start, end in zip(entry.rows["name"].tolist(), ends.tolist())]
    for i in np.flatnonzero(codes < 0):
        entry.skipped.append(SkippedFile(names[i].decode(*_TEXT), "without a label, as others have"))
    kept = np.flatnonzero(codes >= 0)
    names = [names[i] for i in kept]
    entry.rows, entry.names = entry.rows[kept], b"".join(names)
    lengths = np.array([len(name) for name in names], np.int64)
    entry.rows["name"] = np.cumsum(lengths) - lengths
    return codes[kept]


def _choose_labels(entries: Iterable[IndexEntry]) -> tuple[str, list[str]]:
    """Return (kind of values that are the labels, "" for none; the classes).

    Those of .cls and .json, if at least half of the images have one; else those of .txt, if at least half have one and
    each has four images on average, as captions are not classes.
    """
    images = 0
    counts: Counter[str] = Counter()
    values: dict[str, set[str]] = {"class": set(), "text": set()}
    for entry in entries:
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
    """Return the stored index of a set, None if it is missing or damaged."""
    try:
        info = json.loads(read_file(folder / f"{key}.json", folder, _LARGEST_INFO))
        count, classes = int(info["count"]), info["classes"]
        rows = _map_array(folder / f"{key}.rows", ROW_DTYPE, count + 1)
        names = _map_array(folder / f"{key}.names", np.dtype(np.uint8), int(rows["name"][-1]))
        known = info["folders"] if classes is None else classes
        codes = None if known is None else _map_codes(folder / f"{key}.codes", count, len(known))
        folders = None if classes is not None or codes is None else ([str(name) for name in known], codes)
        ignored = {str(kind): int(number) for kind, number in info["ignored"].items()}
        unreadable = [SkippedFile(str(name), str(reason)) for name, reason in info["unreadable"]]
        named = tuple(str(name) for name in classes or ())
    except Exception:  # whatever the files hold, the index is built anew
        return None
    return ShardIndex(states, rows, names, None if classes is None else codes, named, folders, ignored, unreadable)


def _map_codes(file: Path, count: int, known: int) -> NDArray[np.int64]:
    """Map a file of `count` class or folder numbers below `known`. Raises ValueError if it holds anything else."""
    codes: NDArray[np.int64] = _map_array(file, np.dtype("<i8"), count)
    # All at once, unlike rows: codes are used in bulk, where a wrong one would be an image of the wrong class.
    if count and not 0 <= int(codes.min()) <= int(codes.max()) < known:
        raise ValueError("out of range")
    return codes


def _map_array(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file of `count` items. Raises ValueError if it has another size."""
    if count < 0 or file.stat().st_size != count * dtype.itemsize:
        raise ValueError("not whole")
    if not count:
        return np.zeros(0, dtype)
    if not is_local(regular_file(file, file.parent)):
        return np.fromfile(file, dtype, count)
    return np.asarray(np.memmap(file, dtype, "r", shape=(count,)))


def _remove_partial_files(folder: Path) -> None:
    """Remove files over a day old that killed processes left half-written."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            if _PARTIAL.fullmatch(partial.name) and time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
                remove(partial, folder)
