"""The index of a set of tar shards, built once and stored, so that opening ten million images costs as much as ten.

In the folder `shards` of the cache: KEY.piece.npz for each shard, so that of a set that grew only what is new is gone
through; and for the set KEY.rows, KEY.labels and KEY.names, which are mapped and not read, and KEY.json with all else.
A key is a hash of where a shard is, of its size and of its time of change or ETag. Nothing in them is run or
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
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from unfog.data.cache import cache_folder
from unfog.data.formats.files import Unusable
from unfog.data.formats.shard_piece import LARGEST, ROW, Piece, in_order, index_shard
from unfog.data.formats.storage import State, Storage
from unfog.data.ledger import Quarantined, shown
from unfog.errors import RequestError

Progress = Callable[[int, int], None]
"""Called with (megabytes passed, megabytes in all); may raise, to stop."""

_FORMAT = 1
_THREADS, _THREADS_FAR = 2, 16
_POLL = 0.2


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
    ignored: Mapping[str, int]
    unreadable: Sequence[Quarantined]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def place(self, i: int) -> tuple[str, int, int]:
        """(shard, start, bytes) of an image's file. Raises Unusable if the index says what cannot be."""
        row = self.rows[i]
        shard, start, size = int(row["shard"]), int(row["start"]), int(row["size"])
        if not (0 <= shard < len(self.shards) and start >= 0 and 0 <= size <= min(LARGEST, self.sizes[shard] - start)):
            raise Unusable("in a damaged index")
        return self.shards[shard], start, size


def shard_index(
    storage: Storage, states: Mapping[str, State], base: str, progress: Progress | None = None
) -> ShardIndex:
    """The index of these shards, found or built. `base` is what their paths begin with, and their names do not.

    Raises:
        RequestError: a shard cannot be read or is compressed; the cache cannot be written.
    """
    folder = cache_folder() / "shards"
    keys = {path: _key(path, state) for path, state in states.items()}
    key = hashlib.sha256(repr((base.partition("?")[0], list(keys.values()))).encode()).hexdigest()[:32]
    found = _load(folder, key, states)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
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


def _key(path: str, state: State) -> str:
    plain = path.partition("?")[0] if "://" in path else path  # less a signature that is another each day
    return hashlib.sha256(repr((_FORMAT, plain, tuple(state))).encode("utf-8", "replace")).hexdigest()[:32]


def _build_pieces(
    storage: Storage, states: Mapping[str, State], files: Mapping[str, Path], progress: Progress | None
) -> None:
    """Go through those shards of which there is no piece yet; whatever stops this stops the threads."""
    missing = [path for path in states if _load_piece(files[path], states[path].size) is None]
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
        except Unusable as error:
            raise RequestError(f"{shown(path)} cannot be read: {error}; bring it back, or leave it out") from error
        _save_piece(files[path], piece)
        passed[path] = states[path].size

    pool = ThreadPoolExecutor(_THREADS_FAR if storage.far else _THREADS)
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


def _save_piece(file: Path, piece: Piece) -> None:
    info = {"values": piece.values, "ignored": piece.ignored, "quarantined": piece.quarantined}
    buffer = BytesIO()
    np.savez(
        buffer,
        rows=piece.rows,
        names=np.frombuffer(piece.names, np.uint8),
        info=np.frombuffer(json.dumps(info).encode(), np.uint8),
    )
    _write(file, [buffer.getbuffer()])


def _load_piece(file: Path, size: int) -> Piece | None:
    """The stored piece of a shard of `size` bytes; None if there is none that is whole."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            rows, names, info = arrays["rows"], arrays["names"].tobytes(), json.loads(arrays["info"].tobytes())
        values = [(str(kind), str(value)) for kind, value in info["values"]]
        starts = rows["name"]
        whole = rows.dtype == ROW and rows.ndim == 1
        whole = whole and bool((rows["start"] >= 0).all() and (rows["size"] >= 0).all())
        whole = whole and bool((rows["start"] + rows["size"] <= size).all() and (rows["label"] < len(values)).all())
        whole = whole and bool((np.diff(starts, append=len(names)) >= 0).all() and (starts[:1] == 0).all())
        ignored = Counter({str(kind): int(count) for kind, count in info["ignored"].items()})
        quarantined = [Quarantined(str(name), str(reason)) for name, reason in info["quarantined"]]
    except (OSError, BadZipFile, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return Piece(rows, names, values, ignored, quarantined) if whole else None


_Files = Sequence[tuple[str, Path, int]]


def _pieces(files: _Files) -> Iterator[tuple[str, Piece]]:
    for path, file, size in files:
        piece = _load_piece(file, size)
        if piece is None:
            raise OSError(f"{file.name} was removed meanwhile")
        yield path, piece


def _combine(folder: Path, key: str, files: _Files, base: str) -> None:
    """One index of all pieces, in their order, a piece in memory at a time."""
    kind, classes = _choose_labels(files)
    number = {name: i for i, name in enumerate(classes)}
    ignored, unreadable = Counter[str](), list[Quarantined]()
    count = at = 0
    partial = f"{os.getpid()}-{time.time_ns()}"
    parts = {end: folder / f"{partial}.{end}.partial" for end in ("rows", "labels", "names")}
    with parts["rows"].open("wb") as rows, parts["labels"].open("wb") as labels, parts["names"].open("wb") as names:
        for shard, (path, piece) in enumerate(_pieces(files)):
            codes = np.array([number[value] if of == kind else -1 for of, value in piece.values] + [-1], np.int64)
            label = codes[piece.rows["label"]]  # -1 is the last
            if kind:
                label = _without_unlabelled(piece, label)
            mine = piece.rows.copy()
            mine["name"], mine["shard"] = at + piece.rows["name"], shard
            rows.write(mine.tobytes())
            labels.write(label.tobytes())
            names.write(piece.names)
            count, at = count + len(mine), at + len(piece.names)
            ignored.update(piece.ignored)
            called = shard_name(path, base)
            unreadable += [one._replace(name=f"{called}/{one.name}".rstrip("/")) for one in piece.quarantined]
        end = np.zeros(1, ROW)
        end["name"] = at
        rows.write(end.tobytes())
    for name, file in parts.items():
        file.replace(folder / f"{key}.{name}")
    info = {"count": count, "classes": classes if kind else None, "ignored": ignored, "unreadable": sorted(unreadable)}
    _write(folder / f"{key}.json", [json.dumps(info).encode()])


def _without_unlabelled(piece: Piece, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Take the images of label -1 out of a piece, into what is quarantined. Returns the labels of the others."""
    if (label >= 0).all():
        return label
    ends = np.append(piece.rows["name"][1:], len(piece.names))
    names = [piece.names[start:end] for start, end in zip(piece.rows["name"].tolist(), ends.tolist())]
    for i in np.flatnonzero(label < 0):
        name = names[i].decode("utf-8", "surrogateescape")
        piece.quarantined.append(Quarantined(name, "without a label, as others have"))
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
        return "class", in_order(values["class"])
    if counts["text"] and 2 * counts["text"] >= images and 4 * len(values["text"]) <= counts["text"]:
        return "text", in_order(values["text"])
    return "", []


def _load(folder: Path, key: str, states: Mapping[str, State]) -> ShardIndex | None:
    """The stored index of a set; None if there is none that is whole."""
    try:
        info = json.loads((folder / f"{key}.json").read_bytes())
        count, classes = int(info["count"]), info["classes"]
        rows = _mapped(folder / f"{key}.rows", ROW, count + 1)
        names = _mapped(folder / f"{key}.names", np.dtype(np.uint8), int(rows["name"][-1]))
        labels = None if classes is None else _mapped(folder / f"{key}.labels", np.dtype("<i8"), count)
        ignored = {str(kind): int(number) for kind, number in info["ignored"].items()}
        unreadable = [Quarantined(str(name), str(reason)) for name, reason in info["unreadable"]]
        named = tuple(str(name) for name in classes or ())
    except (OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    sizes = [state.size for state in states.values()]
    return ShardIndex(list(states), sizes, rows, names, labels, named, ignored, unreadable)


def _mapped(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The array in a file that holds just that. ValueError if it does not."""
    if count < 0 or file.stat().st_size != count * dtype.itemsize:
        raise ValueError("not whole")
    return np.asarray(np.memmap(file, dtype, "r", shape=(count,))) if count else np.zeros(0, dtype)


def _write(file: Path, parts: Sequence[Any]) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f"{os.getpid()}-{time.time_ns()}-{file.name[:8]}.partial")
    try:
        with partial.open("wb") as out:
            out.writelines(parts)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
