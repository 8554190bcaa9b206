"""A folder as a store of the zarr library, without links and without writing."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from unfog.files.safe_files import open_file


class FolderStore(Store):  # type: ignore[misc]
    """Files below a folder. A link, to a file or on the way to it, is an OSError, and so is a missing folder.

    Args:
        root: the folder.
        mark: path of a file that stays there while the store does. Without it a missing chunk is not one of the fill
            value.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, root: Path, mark: str) -> None:
        super().__init__(read_only=True)
        self._root, self._mark = root, mark

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderStore) and self._root == other._root

    __hash__ = None  # type: ignore[assignment]

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        from zarr.core.buffer import default_buffer_prototype

        if ".." in key.split("/"):
            return None
        try:
            with open_file(self._root / key, "rb", self._root) as file:
                start, size = _extent(os.fstat(file.fileno()).st_size, byte_range)
                file.seek(start)
                data = file.read(size)
        except FileNotFoundError:
            open_file(self._root / self._mark, "rb", self._root).close()
            return None
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
