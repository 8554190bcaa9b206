"""Bounds for Zarr chunks: each unpacks to at most the size of the shape of its array, whatever its bytes claim."""

from __future__ import annotations

import asyncio
import bz2
import lzma
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from zarr import Array
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import ShardingCodec
from zarr.core.array import AsyncArray

_WIDER = 8  # times the bytes of a chunk, to which filters may widen values of one byte
_HARMLESS = 2**24  # bytes
_ZSTD, _SKIPPED, _ZSTD_BLOCK = 0xFD2FB528, 0x184D2A50, 2**17


def most_stored(chunk: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the most bytes that a chunk of this shape may have, stored or unpacked."""
    return _WIDER * math.prod(chunk) * dtype.itemsize + _HARMLESS


def with_bounds(array: Array[Any]) -> Array[Any]:
    """Return the array with codecs that raise ValueError in place of unpacking too much."""
    metadata: Any = array.metadata
    if metadata.zarr_format == 3:
        metadata = replace(metadata, codecs=tuple(map(_with_bound, metadata.codecs)))
    else:
        most = most_stored(metadata.chunks, np.dtype(array.dtype))
        compressor, filters = metadata.compressor, metadata.filters
        metadata = replace(
            metadata,
            compressor=compressor and ChunkFilter(compressor, most),
            filters=filters and tuple(ChunkFilter(one, most) for one in filters),
        )
    return Array(AsyncArray(metadata=metadata, store_path=array.store_path, config=array.async_array.config))


def _with_bound(codec: Codec) -> Codec:
    if isinstance(codec, ShardingCodec):
        return replace(codec, codecs=tuple(map(_with_bound, codec.codecs)))
    return ChunkCompressor(codec) if isinstance(codec, BytesBytesCodec) else codec


class ChunkFilter:
    """A codec of version 2 that unpacks at most so many bytes."""

    codec_id = "checked"

    def __init__(self, inner: Any, most: int) -> None:
        self._inner, self._most = inner, most

    def encode(self, buf: Any) -> Any:
        return self._inner.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        config = self._inner.get_config()
        if config["id"] not in _CLAIMS and config["id"] not in _STREAMS:
            return self._inner.decode(buf, out)
        data = np.ascontiguousarray(buf).reshape(-1).view(np.uint8).data
        found = unpack(config, data, self._most)
        return self._inner.decode(buf, out) if found is None else found

    def get_config(self) -> Any:
        return self._inner.get_config()

    @classmethod
    def from_config(cls, config: Any) -> Any:
        raise NotImplementedError("codecs are read from the metadata of an array")


@dataclass(frozen=True)
class ChunkCompressor(BytesBytesCodec):  # type: ignore[misc]
    """A codec of version 3 that unpacks at most what the shape of a chunk says."""

    inner: Any
    is_fixed_size = False

    def evolve_from_array_spec(self, array_spec: Any) -> ChunkCompressor:
        return replace(self, inner=self.inner.evolve_from_array_spec(array_spec))

    def resolve_metadata(self, chunk_spec: Any) -> Any:
        return self.inner.resolve_metadata(chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return int(self.inner.compute_encoded_size(input_byte_length, chunk_spec))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.inner.to_dict())

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        described = self.to_dict()
        config = dict(described.get("configuration") or {}) | {"id": str(described["name"]).removeprefix("numcodecs.")}
        most = most_stored(chunk_spec.shape, chunk_spec.dtype.to_native_dtype())
        if config["id"] in _CLAIMS or config["id"] in _STREAMS:
            data = np.ascontiguousarray(chunk_data.as_numpy_array()).reshape(-1).view(np.uint8).data
            if (found := await asyncio.to_thread(unpack, config, data, most)) is not None:
                return chunk_spec.prototype.buffer.from_bytes(found)
        return await self.inner._decode_single(chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        raise NotImplementedError("the store is only read")


def unpack(config: dict[str, Any], data: memoryview, most: int) -> bytes | None:
    """Return unpacked bytes; None for a codec that allocates what the data claims, which is then checked.

    ValueError if they are more than `most`, or damaged.
    """
    name = str(config["id"])
    if name in _CLAIMS:
        if not 0 <= _CLAIMS[name](data) <= most:
            raise ValueError(_too_much(most))
        return None
    return _inflate(data, lambda: _STREAMS[name](config), most)


def _inflate(data: memoryview, new: Callable[[], Any], most: int) -> bytes:
    """Unpack a stream, or several of them one after the other."""
    parts, left, rest = list[bytes](), most, bytes(data)
    while rest.strip(b"\0") or not parts:
        stream = new()
        part = stream.decompress(rest, left + 1)
        if (left := left - len(part)) < 0:
            raise ValueError(_too_much(most))
        if not stream.eof:
            raise ValueError("a chunk that is cut off")
        parts.append(part)
        rest = stream.unused_data
    return b"".join(parts)


def _too_much(most: int) -> str:
    return f"a chunk that unpacks to over {most:,} bytes, more than its shape has"


def _blosc_claim(data: memoryview) -> int:
    return int.from_bytes(data[4:8], "little") if len(data) >= 16 else 0


def _lz4_claim(data: memoryview) -> int:
    return int.from_bytes(data[:4], "little", signed=True)


def zstd_claim(data: memoryview) -> int:
    """Return the most bytes that frames of Zstandard unpack to: what they claim, or what their blocks can hold."""
    at = total = 0
    while at + 5 <= len(data):
        magic = int.from_bytes(data[at : at + 4], "little")
        if magic & ~15 == _SKIPPED:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if magic != _ZSTD:
            break  # damaged, which the codec reports
        descriptor = data[at + 4]
        single = descriptor >> 5 & 1
        width = (single, 2, 4, 8)[descriptor >> 6]
        start = at + 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        claimed = int.from_bytes(data[start : start + width], "little") + 256 * (width == 2) if width else -1
        at, held = _skip_blocks(data, start + width)
        at += 4 * (descriptor >> 2 & 1)
        total += held if claimed < 0 else claimed
    return total


def _skip_blocks(data: memoryview, at: int) -> tuple[int, int]:
    """Return (the end of the blocks of a frame, the most bytes that they can hold)."""
    held = 0
    while at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        held += _ZSTD_BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if last:
            break
    return at, held


# Codecs that make room for what their data claims, and those that unpack until their data ends.
_CLAIMS: dict[str, Callable[[memoryview], int]] = {"blosc": _blosc_claim, "lz4": _lz4_claim, "zstd": zstd_claim}
_STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda config: zlib.decompressobj(31),
    "zlib": lambda config: zlib.decompressobj(),
    "bz2": lambda config: bz2.BZ2Decompressor(),
    "lzma": lambda config: lzma.LZMADecompressor(
        config.get("format", lzma.FORMAT_XZ),
        filters=config.get("filters") if config.get("format") == lzma.FORMAT_RAW else None,
    ),
}
