"""Tar shards as webdataset writes them, here or far away, read by position and never unpacked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile
from unfog.data.sources.byte_storage import FileState, open_storage
from unfog.data.sources.fingerprint import sample_digest
from unfog.data.sources.image_files import ImageError, no_images_error, open_bytes
from unfog.data.sources.locate import SourceLocation
from unfog.data.webdataset.remote_shards import DEFAULT_POLICY, RemotePolicy, RemoteShards
from unfog.data.webdataset.shard_index import Progress, ShardIndex, open_shard_index, shard_name
from unfog.data.webdataset.shard_states import remote_states
from unfog.errors import RequestError

_AT_ONCE = 65536  # names that are read at once
_LOOKED_INTO, _BLOCKS = 64, 8
"""Into how many shards the stamp looks, and how many blocks of each are part of it beside the first and the last."""


class ShardSource:
    """The images in uncompressed tar archives: shards in the order of their names, members in the order of each.

    An image is called by its shard and its member, "shards-000.tar/cats/1.jpg". Its class is what the member of the
    same name ending in .cls says, or .json under "label", "class" or "cls", or .txt unless those are captions; where
    there is none, that of the name cut before one of its dots, as webdataset's keys are. Images without, where most
    have one, are in `unreadable`. Without any, folders inside the archives may be classes.

    Raises:
        RequestError: a shard is compressed as a whole or cannot be read (of those far away of a run that goes on: too
            many); there is no image; the index, which is built once and stored in the cache, cannot be.
    """

    held_out: frozenset[str] | None = None

    def __init__(
        self, located: SourceLocation, progress: Progress | None = None, policy: RemotePolicy = DEFAULT_POLICY
    ) -> None:
        self.name, self.resolved = located.name, located.resolved
        self._storage = open_storage(located.paths[0])
        self.remote = self._storage.remote
        lost: dict[str, str] = {}
        if self.remote:
            self._states, lost = remote_states(self._storage, located, policy)
        else:
            self._states = self._storage.states(located.paths)
        self._base = located.base
        self.index: ShardIndex = open_shard_index(self._storage, self._states, located.base, progress)
        called = {path: shard_name(path, self._base) for path in self._states}
        self.names: Sequence[str] = _ShardNames(self.index, list(called.values()))
        self.classes, self.labels, self.folders = self.index.classes, self.index.labels, self.index.folders
        self.ignored: Mapping[str, int] = self.index.ignored
        self.unreadable: Sequence[SkippedFile] = self.index.unreadable
        if not len(self.index):
            raise no_images_error(self.name, self.ignored, self.unreadable)
        self.remote_shards: RemoteShards | None = None
        """Which of them fail, and what is kept of them; None of shards on this machine."""
        if self.remote:
            self.remote_shards = RemoteShards(self.name, self._storage, self.index, self._states, called, policy, lost)

    def open(self, i: int) -> Image.Image:
        """Image i, its file read and its pixels not yet. Raises ImageError."""
        if self.remote_shards is not None:
            return open_bytes(self.remote_shards.read(i), self.names[i])
        shard, start, size = self.index.place(i)
        data = self._storage.read(shard, start, size)
        if len(data) < size:
            raise ImageError("truncated")
        return open_bytes(data, self.names[i])

    def stamp(self) -> tuple[str, int]:
        """Digest of the name, bytes and time of change of each shard, and of a sample of some shards' bytes; of those
        far away, as they were when opened."""
        states, samples = self._states, list[bytes]()
        if not self._storage.remote:
            states = {path: FileState(0, "") for path in states}
            for path in states:
                with suppress(RequestError):  # one that is gone is not what it was
                    states |= self._storage.states([path])
            for path in list(states)[:: -(-len(states) // _LOOKED_INTO)]:
                with suppress(OSError):
                    samples.append(sample_digest(path, _BLOCKS))
        lines = [(shard_name(path, self._base), *state) for path, state in states.items()]
        return hashlib.sha256(repr((lines, samples)).encode("utf-8", "replace")).hexdigest(), sum(
            line[1] for line in lines
        )


class _ShardNames(Sequence[str]):
    """The names of a set of shards, each made when it is asked for."""

    def __init__(self, index: ShardIndex, shards: Sequence[str]) -> None:
        self._index, self._shards = index, shards

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            start, stop, step = i.indices(len(self))
            return (
                self._some(start, stop) if step == 1 and start < stop else [self[k] for k in range(start, stop, step)]
            )
        i = index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return self._some(i, i + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self._some(start, min(start + _AT_ONCE, len(self)))

    def _some(self, start: int, stop: int) -> list[str]:
        rows = self._index.rows[start : stop + 1]
        ends: NDArray[np.int64] = rows["name"]
        first = int(ends[0])
        text = self._index.name_bytes[first : int(ends[-1])].tobytes()
        places = (ends - first).tolist()
        return [
            f"{self._shards[shard]}/{text[a:b].decode('utf-8', 'surrogateescape')}"
            for shard, a, b in zip(rows["shard"].tolist(), places, places[1:])
        ]
