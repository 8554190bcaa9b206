"""Bounds for HDF5 chunks: one that would unpack to far more than the shape of its dataset says is not unpacked."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

from unfog.data.containers.stored_array import Key
from unfog.errors import RequestError

_DEFLATE_RATIO = 1032  # at most
_HARMLESS = 2**29  # bytes that a chunk may unpack to unlooked at
_SLACK = 2**20  # bytes of a chunk beyond its values: checksums, and compression that failed
_PIECE = 2**24  # bytes that are unpacked at a time, and not kept


class ChunkBounds:
    """The chunks of a dataset whose stored bytes could unpack to more than fits into memory.

    `check` unpacks them piece by piece before the library does so at once, which has no limit. RequestError if the
    dataset is compressed by deflate twice.
    """

    def __init__(self, h5py: Any, dataset: Any, place: str) -> None:
        self._dataset, self._most = dataset, 0
        self._deflate: int | None = None  # place of deflate among the filters
        self._suspects = dict[tuple[int, ...], int]()
        if not dataset.chunks:
            return
        properties = dataset.id.get_create_plist()
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        deflates = filters.count(h5py.h5z.FILTER_DEFLATE)
        if deflates > 1:
            raise RequestError(f"{place} is compressed by gzip {deflates} times; write it anew with gzip once")
        if not filters:
            return
        self._deflate = filters.index(h5py.h5z.FILTER_DEFLATE) if deflates else None
        self._most = math.prod(dataset.chunks) * dataset.dtype.itemsize + _SLACK
        if dataset.id.get_storage_size() * _DEFLATE_RATIO > _HARMLESS:
            dataset.id.chunk_iter(self._note)

    def _note(self, chunk: Any) -> None:
        if chunk.size > self._most or (self._deflate is not None and chunk.size * _DEFLATE_RATIO > _HARMLESS):
            self._suspects[tuple(chunk.chunk_offset)] = chunk.size

    def check(self, key: Key) -> None:
        """Raise ValueError if a chunk that a part of the dataset needs unpacks to too much."""
        if not self._suspects:
            return
        chunks = self._dataset.chunks
        starts = []
        for one, length, part in zip(key, self._dataset.shape, chunks):
            first, last, _ = one.indices(length) if isinstance(one, slice) else (one, one + 1, 1)
            starts.append(range(first - first % part, last, part))
        if math.prod(map(len, starts)) > len(self._suspects):
            wanted = (at for at in list(self._suspects) if all(x in of for x, of in zip(at, starts)))
        else:
            wanted = (at for at in itertools.product(*starts) if at in self._suspects)
        for at in wanted:
            self._check_chunk(at)
            self._suspects.pop(at, None)

    def _check_chunk(self, at: tuple[int, ...]) -> None:
        mask, content = 0, b""
        if self._suspects.get(at, 0) <= self._most:
            mask, content = self._dataset.id.read_direct_chunk(at)
        # A set bit of the mask is a filter that this chunk was stored without.
        if content and mask >> (self._deflate or 0) & 1:
            return
        if not content or _unpacked(content, self._most) > self._most:
            raise ValueError(f"a chunk that unpacks to over {self._most:,} bytes, more than its shape has")


def _unpacked(content: bytes, most: int) -> int:
    """Return to how many bytes a chunk unpacks, at most one piece more than `most`."""
    stream, total = zlib.decompressobj(), 0
    while content and total <= most:
        piece = len(stream.decompress(content, _PIECE))
        content, total = stream.unconsumed_tail, total + piece
        if not piece:
            break
    return total
