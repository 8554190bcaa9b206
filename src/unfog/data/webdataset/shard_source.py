"""Tar shards as webdataset writes them, local or remote. They are read in place and never unpacked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.sources.base import ImageError, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import list_only, sample_digest
from unfog.data.sources.image_files import open_bytes
from unfog.data.sources.storage import FileState, open_storage
from unfog.data.webdataset.metadata import first_keys, read_values
from unfog.data.webdataset.remote_shards import RemoteShards
from unfog.data.webdataset.shard_index import ShardIndex, shard_name
from unfog.errors import RequestError

_NAMES_AT_ONCE = 65536
_STAMP_SHARDS, _STAMP_BLOCKS = 64, 8  # of how many shards how many blocks are sampled, beside the first and the last


class ShardSource(Source):
    """The images in uncompressed tar archives: shards sorted by name, members in the order of each shard.

    An image is named by its shard and its member, "shards-000.tar/cats/1.jpg". Its class is in the member of the same
    name ending in .cls, in .json under "label", "class" or "cls", or in .txt unless those are captions; else in that of
    the name cut before one of its dots, like webdataset's keys. If most images have one, those without are in
    `unreadable`. If none has, folders inside the archives may be classes.

    Raises:
        RequestError: a shard is compressed as a whole or cannot be read (on a resume: too many remote ones); there is
            no image; the index, which is built once and stored in the cache, cannot be.
    """

    suffixes = (".tar",)

    def __init__(self, location: SourceLocation, options: OpenOptions | None = None) -> None:
        super().__init__(location)
        options = options or OpenOptions()
        self._storage, self._base, failed = open_storage(location.paths[0]), location.base, dict[str, str]()
        self.remote = self._storage.remote
        if self.remote:
            states, failed = RemoteShards.states(self._storage, location, options.remote)
        else:
            states = self._storage.states(location.paths)
        self.index = ShardIndex.open(self._storage, states, location.base, options.progress)
        self.names = _ShardNames(self.index, [shard_name(path, location.base) for path in states])
        self.classes, self.labels, self.folders = self.index.classes, self.index.labels, self.index.folders
        self.ignored, self.unreadable = self.index.ignored, self.index.unreadable
        if not len(self.index):
            raise self._no_images_error()
        self._remote_shards: RemoteShards | None = None
        if self.remote:
            self._remote_shards = RemoteShards(location, self._storage, self.index, options.remote, failed)
            self.remote_shards = self._remote_shards

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form == "folder" and (shards := list_only(location.resolved, ".tar")):
            base = f"{location.resolved}/"
            return replace(location, paths=tuple(base + name for name in shards), base=base)
        return location if location.suffix in cls.suffixes else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ShardSource:
        return cls(location, options)

    def open(self, i: int) -> Image.Image:
        if self._remote_shards is not None:
            return open_bytes(self._remote_shards.read(i), self.names[i])
        shard, start, size = self.index.place(i)
        data = self._storage.read(shard, start, size)
        if len(data) < size:
            raise ImageError("truncated")
        return open_bytes(data, self.names[i])

    def value_names(self) -> Sequence[str]:
        return first_keys(self._storage, self.index)

    def values_of(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        return read_values(self._storage, self.index, self.names, names) if names else {}

    def folder_problem(self, i: int) -> str:
        return self._storage.folder_problem(self.index.place(i)[0])

    def stamp(self) -> tuple[str, int]:
        # Remote shards count as they were when opened; local ones are looked at again, and some are sampled.
        states, samples = dict(self.index.states), list[bytes]()
        if not self.remote:
            states = {path: FileState(0, "") for path in states}
            for path in states:
                with suppress(RequestError):  # a shard that is gone keeps the zeros
                    states |= self._storage.states([path])
            for path in list(states)[:: -(-len(states) // _STAMP_SHARDS)]:
                with suppress(OSError):
                    samples.append(sample_digest(path, _STAMP_BLOCKS))
        lines = [(shard_name(path, self._base), *state) for path, state in states.items()]
        digest = hashlib.sha256(repr((lines, samples)).encode("utf-8", "replace")).hexdigest()
        return digest, sum(state.size for state in states.values())


class _ShardNames(Sequence[str]):
    """Names of the images in shards, each decoded from the mapped index on demand."""

    def __init__(self, index: ShardIndex, shards: Sequence[str]) -> None:
        self._index, self._shards = index, shards

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        chosen = range(len(self))[i]
        if isinstance(chosen, int):
            return self._decode(chosen, chosen + 1)[0]
        if chosen and chosen.step == 1:
            return self._decode(chosen.start, chosen.stop)
        return [self[k] for k in chosen]

    def __iter__(self) -> Iterator[str]:
        # In blocks: one by one, ten times slower, as each slice of the mapped arrays has its cost.
        for start in range(0, len(self), _NAMES_AT_ONCE):
            yield from self._decode(start, min(start + _NAMES_AT_ONCE, len(self)))

    def _decode(self, start: int, stop: int) -> list[str]:
        rows = self._index.rows[start : stop + 1]  # one more, whose name begins where the last one ends
        ends: NDArray[np.int64] = rows["name"]
        first = int(ends[0])
        text = self._index.name_bytes[first : int(ends[-1])].tobytes()
        places = (ends - first).tolist()
        return [
            f"{self._shards[shard]}/{text[a:b].decode('utf-8', 'surrogateescape')}"
            for shard, a, b in zip(rows["shard"].tolist(), places, places[1:])
        ]
