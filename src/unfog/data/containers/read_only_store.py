"""The files of a Zarr store as a store of the zarr library, without links and without writing."""

from __future__ import annotations

import zipfile
from collections.abc import AsyncIterator, Iterable
from typing import Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from unfog.data.containers.store_files import StoreFiles


class ReadOnlyStore(Store):  # type: ignore[misc]
    """Files by their keys. A link, a folder or a missing store is an OSError.

    Args:
        files: the files.
        mark: key of a file that stays there while the store does. Without it a missing chunk is not one of the fill
            value.
        most: bytes of a file, or of the part of one that is read. `most` may be set later. ValueError for more.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, files: StoreFiles, mark: str, most: int) -> None:
        super().__init__(read_only=True)
        self._files, self._mark, self.most = files, mark, most

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadOnlyStore) and self._files is other._files

    __hash__ = None  # type: ignore[assignment]

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        from zarr.core.buffer import default_buffer_prototype

        if ".." in key.split("/"):
            return None
        try:
            file, length = self._files.open(key)
            with file:
                start, size = _extent(length, byte_range)
                if size > self.most:
                    raise ValueError(f"a chunk of {size:,} bytes, and the shape of chunks has {self.most:,} at most")
                file.seek(start)
                data = file.read(size)
        except FileNotFoundError:
            self._files.open(self._mark)[0].close()
            return None
        except zipfile.BadZipFile as error:  # a wrong checksum
            raise ValueError(str(error)) from None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return await self.get(key, byte_range=RangeByteRequest(0, 0)) is not None

    async def set(self, key: str, value: Any) -> None:
        raise NotImplementedError("the store is only read")

    async def delete(self, key: str) -> None:
        raise NotImplementedError("the store is only read")

    async def list(self) -> AsyncIterator[str]:
        for key in tuple[str, ...]():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in tuple[str, ...]():
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for key in tuple[str, ...]():
            yield key


def _extent(size: int, wanted: Any) -> tuple[int, int]:
    """Return (start, length) of a part of a file."""
    match wanted:
        case None:
            return 0, size
        case RangeByteRequest():
            return wanted.start, max(0, min(wanted.end, size) - wanted.start)
        case OffsetByteRequest():
            return wanted.offset, max(0, size - wanted.offset)
        case SuffixByteRequest():
            return max(0, size - wanted.suffix), min(wanted.suffix, size)
    raise ValueError(f"a part of a file: {wanted}")
