"""Shards far away while a run reads them: kept on disk as they come, and given up one by one where they fail."""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from unfog.cache_folder import cache_folder
from unfog.data.sources.byte_storage import FileState, Storage
from unfog.data.sources.image_files import FailedShardError, ImageError, ShardReadError
from unfog.data.webdataset.byte_range_cache import ByteRangeCache
from unfog.data.webdataset.tar import BLOCK, is_header
from unfog.errors import RequestError, RunError
from unfog.text import sanitize

_OTHERS = 3  # shards of which one has to answer before another is given up
_HEADERS = 8  # that are looked at in a shard with an image that cannot be decoded
_NAMED = 3


@dataclass(frozen=True)
class RemotePolicy:
    """How shards far away are dealt with."""

    cache_bytes: int = 0
    """Bytes on disk that what was read of them may take."""

    max_failed: float = 0.0
    """Share of them that may be given up."""

    failed_before: Mapping[str, str] | None = None
    """Of a run that goes on: those given up by then, name -> reason; None where one begins, which needs them all."""


DEFAULT_POLICY = RemotePolicy()
"""Nothing is kept, and nothing given up."""


class Index(Protocol):
    """Where the images are: see `shard_index.ShardIndex`."""

    @property
    def shards(self) -> Sequence[str]:
        """Path of each shard."""

    @property
    def rows(self) -> NDArray[Any]:
        """The number of its shard, never falling, and more of each image; and one row behind the last."""

    def place(self, i: int) -> tuple[str, int, int]:
        """(shard, start, bytes) of an image's file."""


class RemoteShards:
    """The shards of one source.

    A shard is given up when it cannot be read for long although others can be, and when an image of it cannot be
    decoded and it turns out not to be what was indexed. When it is given up is a matter of the network; what stands in
    for its images then is a function of which are given up. That may be no more than a share of them.

    Args:
        source: name of the source, for messages.
        storage: what reads them.
        index: where the images are.
        states: of each shard, as it was indexed.
        names: of each shard, as messages call it.
        care: how they are dealt with.
        lost: path -> reason of those that are given up already.
    """

    def __init__(
        self,
        source: str,
        storage: Storage,
        index: Index,
        states: Mapping[str, FileState],
        names: Mapping[str, str],
        care: RemotePolicy,
        lost: Mapping[str, str],
    ) -> None:
        self._source, self._storage, self._index, self._states, self._names = source, storage, index, states, names
        self._care = care
        self._lost = dict(lost)
        self._sound: set[str] = set()  # looked into
        self._lock = threading.Lock()
        self.cache: ByteRangeCache | None = None

    @property
    def failed(self) -> dict[str, str]:
        """Name -> reason of the shards that are given up, in the order in which that happened."""
        return {self._names[path]: reason for path, reason in list(self._lost.items())}

    def mark_failed(self, given_up: Mapping[str, str]) -> None:
        """Give up what another process has, name -> reason.

        Raises:
            RunError: that would be one too many.
        """
        with self._lock:
            for name, reason in given_up.items():
                if (path := self._called(name)) not in self._lost:
                    self._lose(path, reason)

    def image_count(self, name: str) -> int:
        """How many images are in the shard of that name."""
        return len(self._members(self._called(name)))

    def enable_cache(self) -> str:
        """Keep on disk what is read from here on, as it will be read again; says so in a line, "" if it is not."""
        if not self._care.cache_bytes:
            return ""
        total = sum(state.size for state in self._states.values())
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and its like say
        self.cache = ByteRangeCache(cache_folder() / "members", self._care.cache_bytes, total, processes)
        kept = "what is read" if total <= self._care.cache_bytes else f"a part of {total / 1e9:,.3g} GB"
        return f"{kept} is kept for later epochs, up to {self._care.cache_bytes / 1e9:,.3g} GB, in {self.cache.folder}"

    def read(self, i: int) -> bytes:
        """The file of image i.

        Raises:
            Lost: its shard has been given up.
            ShardReadError: it cannot be read just now.
        """
        path, start, size = self._index.place(i)
        if path in self._lost:
            raise FailedShardError(f"in {sanitize(self._names[path])}, a shard that {self._lost[path]}")
        if self.cache is not None and (kept := self.cache.read(self._key(path), start, size)) is not None:
            return kept
        try:
            data = self._storage.read(path, start, size)
        except ImageError as error:  # what was there when the run began may come back
            raise ShardReadError(str(error)) from error
        if len(data) < size:
            raise ShardReadError("is shorter than it was when it was indexed")
        if self.cache is not None:
            self.cache.write(self._key(path), start, data)
        return data

    def fail_shard_of(self, i: int, reason: str) -> None:
        """Give up the shard of image i, which could not be read often enough. Returns if no other can be read either.

        Raises:
            Lost: it is given up.
            RunError: that would be one too many.
        """
        path, _, _ = self._index.place(i)
        with self._lock:
            if path not in self._lost:
                # With no more than one shard, or none that may be missed, it is the run that has to wait.
                if self._allowed < 1 or not self._others_answer(path):
                    return
                self._lose(path, self._changed(path) or reason)
        raise FailedShardError(self._lost[path])

    def recheck(self, i: int) -> None:
        """Image i cannot be decoded: forget what was kept of it, and look once whether its shard is what it was.

        Raises:
            Lost: it is not, and is given up.
            RunError: that would be one too many.
        """
        path, start, _ = self._index.place(i)
        if self.cache is not None:
            self.cache.forget(self._key(path), start)
        with self._lock:
            if path not in self._lost and path not in self._sound:
                try:
                    damage = self._changed(path) or self._damage(path)
                except ImageError:  # for now; whoever reads the image again will find that out
                    return
                if not damage:
                    self._sound.add(path)
                    return
                self._lose(path, damage)
            if path not in self._lost:
                return
        raise FailedShardError(self._lost[path])

    @property
    def _allowed(self) -> int:
        return int(self._care.max_failed * len(self._states) + 1e-9)

    def _called(self, name: str) -> str:
        """The shard of that name."""
        return next(path for path, known in self._names.items() if known == name)

    def _members(self, path: str) -> range:
        """The images in a shard, found without reading the rows of others."""
        shard, rows = self._index.shards.index(path), self._index.rows
        images = range(len(rows) - 1)
        return range(*(bisect_left(images, k, key=lambda i: int(rows[i]["shard"])) for k in (shard, shard + 1)))

    def _key(self, path: str) -> str:
        """What a shard in this state is called in the cache, wherever else a signature in its URL may differ."""
        return hashlib.sha256(repr((path.partition("?")[0], tuple(self._states[path]))).encode()).hexdigest()[:32]

    def _lose(self, path: str, reason: str) -> None:
        if len(self._lost) >= self._allowed:
            lost = {**self._lost, path: reason}
            raise RunError(too_many(self._source, {self._names[p]: why for p, why in lost.items()}, len(self._states)))
        self._lost[path] = reason

    def _others_answer(self, path: str) -> bool:
        """Whether one of the next shards can be read; else it is the network that is away, or the server."""
        paths = list(self._states)
        after = paths.index(path) + 1
        others = [other for other in paths[after:] + paths[: after - 1] if other not in self._lost]
        for other in others[:_OTHERS]:
            try:
                self._storage.read(other, 0, BLOCK)
            except ImageError:
                continue
            return True
        return False

    def _changed(self, path: str) -> str:
        """What to say of a shard that is another than was indexed; "" if it is not, or cannot be looked at."""
        try:
            now = self._storage.states([path])
        except RequestError:
            return ""
        return "" if list(now.values()) == [self._states[path]] else "is not the file that was indexed"

    def _damage(self, path: str) -> str:
        """What to say of a shard in which most members are not where they were; "" of any other.

        Where is looked depends on the index alone, so that what is found depends on the shard alone.
        """
        images = self._members(path)
        looked_at = [images[k * len(images) // _HEADERS] for k in range(_HEADERS)]
        blocks = [self._storage.read(path, self._index.place(i)[1] - BLOCK, BLOCK) for i in looked_at]
        missing = sum(not is_header(block) for block in blocks)
        return f"is damaged ({missing} of {_HEADERS} headers looked at are none)" if 2 * missing > _HEADERS else ""


def too_many(source: str, lost: Mapping[str, str], count: int) -> str:
    """What to say where more shards of `count` are lost, name -> reason, than may be."""
    named = "; ".join(f"{sanitize(name)} {reason}" for name, reason in list(lost.items())[:_NAMED])
    return (
        f"{len(lost)} of {count} shards of {sanitize(source)} cannot be used, more than data.failed_shards allows: "
        f"{named}{'; ...' * (len(lost) > _NAMED)}. Bring them back and `unfog resume`, or allow more: "
        "--data.failed-shards 0.1"
    )
