"""Remote shards while a run reads them: members are cached on disk, and shards that fail are marked one by one."""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from unfog.cache_folder import cache_folder
from unfog.data.sources.base import FailedShardError, ImageError, RemotePolicy, ShardReadError
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.byte_range_cache import ByteRangeCache
from unfog.data.webdataset.shard_index import ShardIndex
from unfog.data.webdataset.tar import BLOCK, is_header
from unfog.errors import RequestError, RunError
from unfog.text import sanitize

_PROBED_SHARDS = 3  # others, of which one has to answer before a shard fails; else it is the network that is down
_CHECKED_HEADERS = 8  # in a shard with an image that cannot be decoded
_MAX_NAMED = 3


@dataclass(frozen=True)
class ShardSet:
    """The shards of one remote source, as they were indexed."""

    source: str
    """Name of the source, for messages."""

    storage: Storage
    index: ShardIndex
    states: Mapping[str, FileState]
    names: Mapping[str, str]
    """URL -> name of each shard in messages and image names."""


class RemoteShards:
    """The failed shards of a remote source, and reads of all others; implements `ShardFailures`.

    A shard fails if it stays unreadable while others can be read, or if an image of it cannot be decoded and the shard
    turns out not to be what was indexed. *When* it fails depends on the network; which images replace its own is a
    function of the set of failed shards alone, so that a resume continues with the same ones.

    Args:
        shards: the shards.
        policy: how many may fail, and how much is cached.
        failed: URL -> reason of those that failed before.
    """

    def __init__(self, shards: ShardSet, policy: RemotePolicy, failed: Mapping[str, str]) -> None:
        self._shards, self._policy = shards, policy
        self._storage, self._index, self._states = shards.storage, shards.index, shards.states
        self._failed = dict(failed)
        self._intact: set[str] = set()  # rechecked
        self._lock = threading.Lock()
        self.cache: ByteRangeCache | None = None

    @property
    def failed(self) -> dict[str, str]:
        # A copy, as other threads may add to it.
        return {self._shards.names[path]: reason for path, reason in list(self._failed.items())}

    @property
    def cache_error(self) -> str:
        return "" if self.cache is None else self.cache.error

    def mark_failed(self, failed: Mapping[str, str]) -> None:
        with self._lock:
            for name, reason in failed.items():
                if (path := self._path(name)) not in self._failed:
                    self._fail(path, reason)

    def image_count(self, name: str) -> int:
        return len(self._images(self._path(name)))

    def enable_cache(self) -> str:
        if not self._policy.cache_bytes:
            return ""
        total = sum(state.size for state in self._states.values())
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and its like set it
        limit = self._policy.cache_bytes
        self.cache = ByteRangeCache(cache_folder() / "members", limit, total, processes)
        kept = "what is read" if total <= limit else f"a part of {total / 1e9:,.3g} GB"
        return f"{kept} is kept for later epochs, up to {limit / 1e9:,.3g} GB, in {self.cache.folder}"

    def read(self, i: int) -> bytes:
        """Return the file of image i.

        Raises:
            FailedShardError: its shard has failed.
            ShardReadError: it cannot be read now.
        """
        path, start, size = self._index.place(i)
        if path in self._failed:
            raise FailedShardError(f"in {sanitize(self._shards.names[path])}, a shard that {self._failed[path]}")
        if self.cache is not None and (cached := self.cache.read(self._key(path), start, size)) is not None:
            return cached
        try:
            data = self._storage.read(path, start, size)
        except ImageError as error:  # also an error called permanent, as the shard was there when the run began
            raise ShardReadError(str(error)) from error
        if len(data) < size:
            raise ShardReadError("is shorter than it was when it was indexed")
        if self.cache is not None:
            self.cache.write(self._key(path), start, data)
        return data

    def fail_shard_of(self, i: int, reason: str) -> None:
        path, _, _ = self._index.place(i)
        with self._lock:
            if path not in self._failed:
                # If no shard may fail, or no other answers, the run has to wait for the network.
                if self._allowed < 1 or not self._others_answer(path):
                    return
                self._fail(path, self._change(path) or reason)
        raise FailedShardError(self._failed[path])

    def recheck(self, i: int) -> None:
        path, start, _ = self._index.place(i)
        if self.cache is not None:
            self.cache.discard(self._key(path), start)
        with self._lock:
            if path not in self._failed and path not in self._intact:
                try:
                    damage = self._change(path) or self._damage(path)
                except ImageError:  # for now; the next read of the image will show it
                    return
                if not damage:
                    self._intact.add(path)
                    return
                self._fail(path, damage)
            if path not in self._failed:
                return
        raise FailedShardError(self._failed[path])

    @property
    def _allowed(self) -> int:
        return int(self._policy.max_failed * len(self._states) + 1e-9)  # 0.29 * 100 is 28.999…

    def _path(self, name: str) -> str:
        return next(path for path, known in self._shards.names.items() if known == name)

    def _images(self, path: str) -> range:
        """Return the images in a shard, by bisection, as the rows may be a mapped file of gigabytes."""
        shard, rows = self._index.shards.index(path), self._index.rows
        images = range(len(rows) - 1)
        return range(*(bisect_left(images, k, key=lambda i: int(rows[i]["shard"])) for k in (shard, shard + 1)))

    def _key(self, path: str) -> str:
        """Return the cache's key of a shard in this state, without the signature in its URL, which changes daily."""
        return hashlib.sha256(repr((path.partition("?")[0], tuple(self._states[path]))).encode()).hexdigest()[:32]

    def _fail(self, path: str, reason: str) -> None:
        if len(self._failed) >= self._allowed:
            failed = {**self._failed, path: reason}
            named = {self._shards.names[path]: reason for path, reason in failed.items()}
            raise RunError(too_many_failed(self._shards.source, named, len(self._states)))
        self._failed[path] = reason

    def _others_answer(self, path: str) -> bool:
        paths = list(self._states)
        after = paths.index(path) + 1
        others = [other for other in paths[after:] + paths[: after - 1] if other not in self._failed]
        for other in others[:_PROBED_SHARDS]:
            try:
                self._storage.read(other, 0, BLOCK)
            except ImageError:
                continue
            return True
        return False

    def _change(self, path: str) -> str:
        """Return how a shard differs from what was indexed, "" if it does not or cannot be looked at."""
        try:
            now = self._storage.states([path])
        except RequestError:
            return ""
        return "" if list(now.values()) == [self._states[path]] else "is not the file that was indexed"

    def _damage(self, path: str) -> str:
        """Return what is wrong with a shard most of whose members are not where the index says, else ""."""
        # Which headers are read depends on the index alone, so that every process comes to the same result.
        images = self._images(path)
        checked = [images[k * len(images) // _CHECKED_HEADERS] for k in range(_CHECKED_HEADERS)]
        blocks = [self._storage.read(path, self._index.place(i)[1] - BLOCK, BLOCK) for i in checked]
        missing = sum(not is_header(block) for block in blocks)
        if 2 * missing <= _CHECKED_HEADERS:
            return ""
        return f"is damaged ({missing} of {_CHECKED_HEADERS} headers looked at are none)"


def too_many_failed(source: str, failed: Mapping[str, str], count: int) -> str:
    """Return the message for a source of `count` shards of which more failed, name -> reason, than may."""
    named = "; ".join(f"{sanitize(name)} {reason}" for name, reason in list(failed.items())[:_MAX_NAMED])
    return (
        f"{len(failed)} of {count} shards of {sanitize(source)} cannot be used, more than data.failed_shards allows: "
        f"{named}{'; ...' * (len(failed) > _MAX_NAMED)}. Bring them back and `unfog resume`, or allow more: "
        "--data.failed-shards 0.1"
    )
