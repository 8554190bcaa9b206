"""Remote shards while a run reads them: their states, a cache of their members, and the marking of those that fail.

The states of a set are remembered while all of it is there, in shards/KEY.seen.json of the cache folder, where the key
is a hash of the shards' URLs. A run that resumes without some of its shards takes their states from there.

Members are cached on disk up to a limit, for later epochs and other runs. Of a set that does not fit, a fixed part is
cached: in a new random order each epoch, the least recently used range would nearly always be evicted before it is read
again. Ranges of other sets are evicted first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from unfog.data.sources.base import FailedShardError, ImageError, RemotePolicy, ShardReadError, SourceLocation
from unfog.data.sources.storage import FileState, Storage
from unfog.data.webdataset.shard_index import ShardIndex, plain_url, shard_name
from unfog.data.webdataset.tar import BLOCK, is_header
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder, cache_limit, hold, make_room
from unfog.files.positions import pread, pwrite
from unfog.files.safe_files import Mode, disk_usage, open_file, read_file, remove, write_atomic
from unfog.text import sanitize

_PROBED_SHARDS = 3  # others, of which one has to answer before a shard fails; else it is the network that is down
_CHECKED_HEADERS = 8  # in a shard with an image that cannot be decoded
_MAX_NAMED = 3

_SEGMENT_BYTES = 64 * 2**20  # of a shard in one file, which is evicted as a whole
_UNIT = 512  # of a tar archive: no two members begin in the same one
_CHECKSUM_BYTES = 4
_MEMBERS_FILE = re.compile(r"[0-9a-f]{32}-[0-9]{6}\.members")
_FILL = 0.9  # of the limit, so that a set never evicts its own ranges
_SCANS = 32  # of the folder while as much is written as may be cached
_TOUCH_SECONDS = 60.0  # between two updates of a file's time of use


class RemoteShards:
    """The failed shards of a remote source, and reads of all others; implements `ShardFailures`.

    A shard fails if it stays unreadable while others can be read, or if an image of it cannot be decoded and the shard
    turns out not to be what was indexed. *When* it fails depends on the network; which images replace its own is a
    function of the set of failed shards alone, so that a resume continues with the same ones.

    `policy` says how many may fail and how much is cached; `failed` maps the URLs of those that failed before to the
    reason.
    """

    def __init__(
        self,
        location: SourceLocation,
        storage: Storage,
        index: ShardIndex,
        policy: RemotePolicy,
        failed: Mapping[str, str],
    ) -> None:
        self._source, self._storage, self._index, self._policy = location.name, storage, index, policy
        self._names = {path: shard_name(path, location.base) for path in index.states}
        self._failed = dict(failed)
        self._intact: set[str] = set()  # rechecked
        # Held over network reads, too: of many threads that fail on one shard, the first decides for all.
        self._lock = threading.Lock()
        self.cache: ByteRangeCache | None = None

    @staticmethod
    def states(
        storage: Storage, location: SourceLocation, policy: RemotePolicy
    ) -> tuple[dict[str, FileState], dict[str, str]]:
        """Return (the state of each shard, sorted by URL; URL -> reason of the failed ones a resume does without).

        Failed shards have the state in which they were last seen, so that the set stays the one the run began with.
        RequestError if a shard cannot be looked at and was never seen, or too many cannot be.
        """
        absent: dict[str, str] = {}
        states = storage.states(location.paths, None if policy.failed_before is None else absent)
        failed: dict[str, str] = {}
        if policy.failed_before is not None:
            known, present = _remembered_states(location), {plain_url(path) for path in states}
            urls = {plain_url(path): path for path in location.paths}
            # If more failed before than may now, all get another chance: some may be back.
            allowed = len(policy.failed_before) <= policy.max_failed * len(known)
            failed_before = policy.failed_before if allowed else {}
            for name, state in known.items():
                path = urls.get(name, name)
                reason = failed_before.get(shard_name(path, location.base))
                if reason is None and name not in present:
                    reason = absent.get(path, "is not there")
                if reason is not None:
                    states[path], failed[path] = state, reason
        for path, reason in absent.items():
            if path not in states:
                raise RequestError(f"{sanitize(path)} {reason}; restore it, or check the URL")
        if len(failed) > policy.max_failed * len(states):
            named = {shard_name(path, location.base): reason for path, reason in failed.items()}
            raise RequestError(_too_many_failed(location.name, named, len(states)))
        if not failed:
            _remember_states(location, states)
        return dict(sorted(states.items())), failed

    @property
    def failed(self) -> dict[str, str]:
        # A copy, as other threads may add to it.
        return {self._names[path]: reason for path, reason in list(self._failed.items())}

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
        limit, folder = min(self._policy.cache_bytes, int(min(cache_limit(), 2**60))), cache_folder() / "members"
        if not limit:
            return ""
        hold(folder)
        total = sum(state.size for state in self._index.states.values())
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and its like set it
        make_room(max(0, min(limit, total) - disk_usage(folder)))
        self.cache = ByteRangeCache(folder, limit, total, processes)
        kept = "what is read of the shards" if total <= limit else f"a part of {total / 1e9:,.3g} GB of shards"
        return f"{kept} is kept for later epochs, up to {limit / 1e9:,.3g} GB, in {self.cache.folder}"

    def read(self, i: int) -> bytes:
        """Return the file of image i.

        Raises:
            FailedShardError: its shard has failed.
            ShardReadError: it cannot be read now.
        """
        path, start, size = self._index.place(i)
        if path in self._failed:
            raise FailedShardError(f"in {sanitize(self._names[path])}, a shard that {self._failed[path]}")
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
            self.cache.discard(self._key(path), start)  # the cached bytes may be the damage
        with self._lock:
            if path not in self._failed:
                if path in self._intact:
                    return
                try:
                    damage = self._change(path) or self._damage(path)
                except ImageError:  # for now; the next read of the image will show it
                    return
                if not damage:
                    self._intact.add(path)
                    return
                self._fail(path, damage)
        raise FailedShardError(self._failed[path])

    @property
    def _allowed(self) -> int:
        return int(self._policy.max_failed * len(self._names) + 1e-9)  # 0.29 * 100 is 28.999…

    def _path(self, name: str) -> str:
        return next(path for path, known in self._names.items() if known == name)

    def _images(self, path: str) -> range:
        """Return the images in a shard, by bisection, as the rows may be a mapped file of gigabytes."""
        shard, rows = self._index.shards.index(path), self._index.rows
        images = range(len(rows) - 1)
        return range(*(bisect_left(images, k, key=lambda i: int(rows[i]["shard"])) for k in (shard, shard + 1)))

    def _key(self, path: str) -> str:
        """Return the cache's key of a shard in this state, without the signature in its URL, which changes daily."""
        return hashlib.sha256(repr((plain_url(path), tuple(self._index.states[path]))).encode()).hexdigest()[:32]

    def _fail(self, path: str, reason: str) -> None:
        if len(self._failed) >= self._allowed:
            raise RunError(_too_many_failed(self._source, self.failed | {self._names[path]: reason}, len(self._names)))
        self._failed[path] = reason

    def _others_answer(self, path: str) -> bool:
        shards = list(self._names)
        after = shards.index(path) + 1
        others = [other for other in shards[after:] + shards[: after - 1] if other not in self._failed]
        for other in others[:_PROBED_SHARDS]:
            with suppress(ImageError):
                self._storage.read(other, 0, BLOCK)
                return True
        return False

    def _change(self, path: str) -> str:
        """Return how a shard differs from what was indexed, "" if it does not or cannot be looked at."""
        try:
            now = self._storage.states([path])
        except RequestError:
            return ""
        return "" if list(now.values()) == [self._index.states[path]] else "is not the file that was indexed"

    def _damage(self, path: str) -> str:
        """Describe the fault of a shard if most members are not where the index says, else ""."""
        # Which headers are read depends on the index alone, so that every process comes to the same result.
        images = self._images(path)
        checked = [images[k * len(images) // _CHECKED_HEADERS] for k in range(_CHECKED_HEADERS)]
        blocks = [self._storage.read(path, self._index.place(i)[1] - BLOCK, BLOCK) for i in checked]
        missing = sum(not is_header(block) for block in blocks)
        if 2 * missing <= _CHECKED_HEADERS:
            return ""
        return f"is damaged ({missing} of {_CHECKED_HEADERS} headers that were read are damaged)"


def _too_many_failed(source: str, failed: Mapping[str, str], count: int) -> str:
    """Return the message for a source of `count` shards of which more failed, name -> reason, than may."""
    named = "; ".join(f"{sanitize(name)} {reason}" for name, reason in list(failed.items())[:_MAX_NAMED])
    return (
        f"{len(failed)} of {count} shards of {sanitize(source)} cannot be used, more than data.failed_shards "
        f"allows: {named}{'; ...' * (len(failed) > _MAX_NAMED)}. Restore them and use `unfog resume`, or "
        "allow more: --data.failed-shards 0.1"
    )


def _states_file(location: SourceLocation) -> Path:
    urls = repr([plain_url(path) for path in location.paths]).encode("utf-8", "replace")
    return cache_folder() / "shards" / f"{hashlib.sha256(urls).hexdigest()[:32]}.seen.json"


def _remembered_states(location: SourceLocation) -> dict[str, FileState]:
    try:
        stored = json.loads(read_file(_states_file(location), cache_folder(), 2**30))
        return {str(path): FileState(int(size), str(version)) for path, (size, version) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _remember_states(location: SourceLocation, states: Mapping[str, FileState]) -> None:
    now = {plain_url(path): state for path, state in states.items()}
    if now != _remembered_states(location):
        with suppress(OSError):  # without it only a resume with missing shards is refused
            file = _states_file(location)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(now).encode(), cache_folder(), private=True, shared=True)


class ByteRangeCache:
    """A disk cache of members of shards, by shard and position.

    Each file KEY-NUMBER.members holds 64 MB of a shard: a table of checksums of the members that begin there, then the
    members at their offsets; what is not cached is a hole. A member without its checksum counts as not cached, so a
    write that a crash cut short does no harm, and any number of processes may read and write at once. All of it may be
    deleted.

    Args:
        folder: the folder of the cache; other files in it are left alone.
        limit: bytes on disk of all sets together; at most half of what is free besides.
        total: bytes of the set that this process reads.
        processes: number of processes that write at once; each scans the folder more often, as it sees only its own
            writes between two scans.
    """

    def __init__(self, folder: Path, limit: int, total: int, processes: int = 1) -> None:
        self.folder, self.limit = folder, limit
        self.error = ""
        """Why nothing more is cached, after a write failed."""
        self._scan_bytes = limit / _SCANS / processes
        self._share = min(1.0, _FILL * limit / max(1, total))
        self._written: int | None = None  # since the last scan
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, size: int) -> bytes | None:
        """Return the member of that size at that position of a shard, None if it is not cached whole."""
        name, checksum_at, data_at = _place(key, start)
        with suppress(OSError), _open(self.folder / name, "rb") as file:
            checksum = pread(file, _CHECKSUM_BYTES, checksum_at)
            if any(checksum) and (data := pread(file, size, data_at)) and _checksum(data, size) == checksum:
                self._touch(name, file)
                return data
        return None

    def write(self, key: str, start: int, data: bytes) -> None:
        """Cache a member, if it belongs to the part of the set that is cached and the disk accepts it."""
        name, checksum_at, data_at = _place(key, start)
        if self.error or not self._is_cached_part(name):
            return
        try:
            self._make_room(len(data))
            with _open(self.folder / name, "a+b") as file:
                _write_all(file, data, data_at)
                _write_all(file, _checksum(data, len(data)), checksum_at)
        except OSError as error:
            self.error = f"{self.folder} cannot be written ({error.strerror or error})"

    def discard(self, key: str, start: int) -> None:
        """Remove a member from the cache."""
        name, checksum_at, _ = _place(key, start)
        with suppress(OSError), _open(self.folder / name, "r+b") as file:
            _write_all(file, bytes(_CHECKSUM_BYTES), checksum_at)

    def _is_cached_part(self, name: str) -> bool:
        # By a hash, so that every process and epoch chooses the same parts, evenly spread over the shards.
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48 < self._share

    def _touch(self, name: str, file: int) -> None:
        if (now := time.monotonic()) - self._used.get(name, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
            self._used[name] = now
            with suppress(OSError):
                os.utime(file)

    def _make_room(self, size: int) -> None:
        """Scan the folder now and then, and evict what is over the limit."""
        with self._lock:
            if self._written is not None and self._written <= self._scan_bytes:
                self._written += size
                return
            self._written = size
            self.folder.mkdir(parents=True, exist_ok=True)
            self._evict()

    def _evict(self) -> None:
        """Remove the files used least recently, down to a little less than the limit."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another process has just evicted it
                if _MEMBERS_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    read = entry.stat(follow_symlinks=False).st_mtime
                    found.append((read, disk_usage(Path(entry)), Path(entry)))
        used = sum(size for _, size, _ in found)
        limit = min(self.limit, (used + shutil.disk_usage(self.folder).free) // 2)
        if used <= limit:
            return
        for _, size, path in sorted(found):
            if used <= _FILL * limit:
                break
            with suppress(OSError):
                remove(path, self.folder)
            used -= size


def _place(key: str, start: int) -> tuple[str, int, int]:
    """Return (file name, position of the checksum in it, position of the member in it)."""
    number, begin = divmod(start, _SEGMENT_BYTES)
    checksums = _SEGMENT_BYTES // _UNIT * _CHECKSUM_BYTES
    return f"{key}-{number:06}.members", begin // _UNIT * _CHECKSUM_BYTES, checksums + begin


def _checksum(data: bytes, size: int) -> bytes:
    # Seeded by the size, and never all zeros, which is what a hole reads as.
    return (zlib.crc32(data, size) or 1).to_bytes(_CHECKSUM_BYTES, "little")


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = pwrite(file, view, at)
        view, at = view[written:], at + written


@contextmanager
def _open(path: Path, mode: Mode) -> Iterator[int]:
    with open_file(path, mode, path.parent, buffering=0) as file:
        yield file.fileno()
