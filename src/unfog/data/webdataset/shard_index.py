"""The index of a set of tar shards, built once and stored, so that opening ten million images costs as much as ten.

In the folder `shards` of the cache: KEY.piece.npz for each shard, so that of a set that grew only what is new is gone
through; and for the set KEY.rows, KEY.codes and KEY.names, which are mapped, and KEY.json with all else.
A key is a hash of where a shard is, of its size and of its times of change or ETag. Nothing in them is run or
unpickled, and a damaged one is built anew.
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

from unfog.data.cache import cache_folder
from unfog.data.report import SkippedFile
from unfog.data.sources.byte_storage import FileState, Storage
from unfog.data.sources.image_files import ImageError, os_error_reason
from unfog.data.webdataset.index_builder import MAX_FILE_BYTES, ROW_DTYPE, IndexEntry, index_shard, sort_labels
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

Progress = Callable[[int, int], None]
"""Called with (megabytes passed, megabytes in all); may raise, to stop."""

_FORMAT = 2
_TEXT = ("utf-8", "surrogateescape")
_THREADS, _REMOTE_THREADS = 2, 16
_POLL = 0.2
_MOST_FOLDERS = 100_000
"""Folders of which a list is kept; of a set with more, they are read from the names."""


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where every image of a set of shards is. The arrays are mapped from files."""

    shards: Sequence[str]
    """Path or URL of each."""

    sizes: Sequence[int]
    """Bytes of each shard."""

    rows: NDArray[Any]
    """[n + 1] of ROW; the last one only ends the last name."""

    name_bytes: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    """[n], from .cls, .json or .txt members; None if there are none."""

    classes: tuple[str, ...]
    folders: tuple[list[str], NDArray[np.int64]] | None
    """Of a set without labels of its own: (each folder below the shards, "" for none; which of them each image is in,
    [n])."""

    ignored: Mapping[str, int]
    unreadable: Sequence[SkippedFile]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def place(self, i: int) -> tuple[str, int, int]:
        """(shard, start, bytes) of an image's file. Raises ImageError if the index says what cannot be."""
        row = self.rows[i]
        shard, start, size = int(row["shard"]), int(row["start"]), int(row["size"])
        if not (
            0 <= shard < len(self.shards) and start >= 0 and 0 <= size <= min(MAX_FILE_BYTES, self.sizes[shard] - start)
        ):
            raise ImageError("in a damaged index")
        return self.shards[shard], start, size


def open_shard_index(
    storage: Storage, states: Mapping[str, FileState], base: str, progress: Progress | None = None
) -> ShardIndex:
    """The index of these shards, found or built. `base` is what their paths begin with, and their names do not.

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
        _build_pieces(storage, states, {path: folder / f"{key}.piece.npz" for path, key in keys.items()}, progress)
        pieces = [(path, folder / f"{keys[path]}.piece.npz", states[path].size) for path in states]
        _combine(folder, key, pieces, base)
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
    """What a shard is called in the names of its images."""
    return (path.partition("?")[0] if "://" in path else path).removeprefix(base)


def _key(path: str, state: FileState) -> str:
    if "://" in path:
        plain, written = path.partition("?")[0], 0  # less a signature that is another each day
    else:
        # Who writes over a file and sets its time of change back cannot set this one.
        plain, written = path, os.stat(path).st_ctime_ns
    return hashlib.sha256(repr((_FORMAT, plain, written, tuple(state))).encode("utf-8", "replace")).hexdigest()[:32]


def _build_pieces(
    storage: Storage, states: Mapping[str, FileState], files: Mapping[str, Path], progress: Progress | None
) -> None:
    """Go through those shards of which there is no piece yet; whatever stops this stops the threads."""
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
            piece = index_shard(storage, path, states[path], report)
        except ImageError as error:
            raise RequestError(f"{sanitize(path)} cannot be read: {error}; bring it back, or leave it out") from error
        save_entry(files[path], piece)
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


def _pieces(files: _Files) -> Iterator[tuple[str, IndexEntry]]:
    for path, file, size in files:
        piece = load_entry(file, size)
        if piece is None:
            raise OSError(f"{file.name} was removed meanwhile")
        yield path, piece


def _combine(folder: Path, key: str, files: _Files, base: str) -> None:
    """One index of all pieces, in their order, a piece in memory at a time."""
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
        for shard, (path, piece) in enumerate(_pieces(files)):
            if kind:
                values = np.array([number[value] if of == kind else -1 for of, value in piece.values] + [-1], np.int64)
                code = _without_unlabelled(piece, values[piece.rows["label"]])  # -1 is the last
            else:
                code = _folders(piece, folders)
            mine = piece.rows.copy()
            mine["name"], mine["shard"] = at + piece.rows["name"], shard
            rows.write(mine.tobytes())
            codes.write(code.tobytes())
            names.write(piece.names)
            count, at = count + len(mine), at + len(piece.names)
            ignored.update(piece.ignored)
            called = shard_name(path, base)
            unreadable += [one._replace(name=f"{called}/{one.name}".rstrip("/")) for one in piece.skipped]
        rows.write(np.array([(0, 0, at, 0, 0)], ROW_DTYPE).tobytes())
        for name, out in zip(parts, (rows, codes, names)):
            out.close()
            parts[name].replace(folder / f"{key}.{name}")
    info = {
        "count": count,
        "classes": classes if kind else None,
        "folders": None if kind or len(folders) > _MOST_FOLDERS else [name.decode(*_TEXT) for name in folders],
        "ignored": ignored,
        "unreadable": sorted(unreadable),
    }
    write_atomically(folder / f"{key}.json", [json.dumps(info).encode()])


def _folders(piece: IndexEntry, known: dict[bytes, int]) -> NDArray[np.int64]:
    """Which folder each image of a piece is in, [n]; those not known yet are added, until they are too many."""
    names, starts = piece.names, piece.rows["name"]
    slashes = np.append(-1, np.flatnonzero(np.frombuffer(names, np.uint8) == ord("/")))
    last = slashes[np.searchsorted(slashes, np.append(starts[1:], len(names))) - 1]  # before the end of each name
    found = np.zeros(len(starts), np.int64)
    for i, (start, end) in enumerate(zip(starts.tolist(), last.tolist())):
        if len(known) > _MOST_FOLDERS:
            break
        found[i] = known.setdefault(names[start : max(start, end)], len(known))
    return found


def _without_unlabelled(piece: IndexEntry, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Take the images of label -1 out of a piece, into what is skipped. Returns the labels of the others."""
    if (label >= 0).all():
        return label
    ends = np.append(piece.rows["name"][1:], len(piece.names))
    names = [piece.names[start:end] for start, end in zip(piece.rows["name"].tolist(), ends.tolist())]
    for i in np.flatnonzero(label < 0):
        name = names[i].decode(*_TEXT)
        piece.skipped.append(SkippedFile(name, "without a label, as others have"))
    kept = np.flatnonzero(label >= 0)
    names = [names[i] for i in kept]
    piece.rows, piece.names = piece.rows[kept], b"".join(names)
    lengths = np.array([len(name) for name in names], np.int64)
    piece.rows["name"] = np.cumsum(lengths) - lengths
    return label[kept]


def _choose_labels(files: _Files) -> tuple[str, list[str]]:
    """(which kind of values are the labels, or "" for none; the classes).

    Those of .cls and .json, if at least half of the images have one; else those of .txt, if so and if there are at
    least four images of each on average, as captions are no classes.
    """
    images = 0
    counts: Counter[str] = Counter()
    values: dict[str, set[str]] = {"class": set(), "text": set()}
    for _, piece in _pieces(files):
        images += len(piece.rows)
        of = np.bincount(piece.rows["label"][piece.rows["label"] >= 0], minlength=len(piece.values))
        for (kind, value), number in zip(piece.values, of.tolist()):
            counts[kind] += number
            values.setdefault(kind, set()).add(value)
    if counts["class"] and 2 * counts["class"] >= images:
        return "class", sort_labels(values["class"])
    if counts["text"] and 2 * counts["text"] >= images and 4 * len(values["text"]) <= counts["text"]:
        return "text", sort_labels(values["text"])
    return "", []


def _load(folder: Path, key: str, states: Mapping[str, FileState]) -> ShardIndex | None:
    """The stored index of a set; None if there is none that is whole."""
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
