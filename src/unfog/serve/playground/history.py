"""Finished drawings that outlive the server: settings and pictures, in a folder of the cache, never in a run folder.

A file for each, a line of JSON and packed pixels. The oldest go first, and `unfog cache` lists and clears the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unfog.cache_folder import cache_folder
from unfog.reporting.image_grids import Pixels
from unfog.safe_files import make_folder, read_file, remove, write_atomic

_MOST_FILES, _MOST_BYTES = 100, 2**25  # of a folder of runs
_LARGEST = 2**23  # bytes of pixels of a drawing that is kept
_SUFFIX = ".drawing"


class StoredDrawing(NamedTuple):
    """A drawing as it was stored."""

    number: int
    facts: dict[str, Any]
    pictures: Pixels


class History:
    """Drawings from the runs of one folder."""

    def __init__(self, runs: Path) -> None:
        name = hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]
        self._folder = cache_folder() / f"drawings-{name}"

    def add(self, drawing: StoredDrawing) -> None:
        """Store a drawing, and remove the oldest of too many. Without effect where nothing can be written."""
        if drawing.pictures.nbytes > _LARGEST:
            return
        head = json.dumps({**drawing.facts, "shape": drawing.pictures.shape}).encode()
        data = head + b"\n" + zlib.compress(drawing.pictures.tobytes(), 1)
        with suppress(OSError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            make_folder(self._folder, cache_folder())
            # What people draw is nobody else's business; and what a crash loses can be drawn again.
            path = self._folder / f"{drawing.number:08d}{_SUFFIX}"
            write_atomic(path, data, cache_folder(), private=True, durable=False)
            self._forget_old()

    def read(self) -> Iterator[StoredDrawing]:
        """Yield the stored drawings, oldest first. What is damaged is left out."""
        for path in self._files():
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, zlib.error):
                head, _, packed = read_file(path, 2 * _LARGEST, cache_folder()).partition(b"\n")
                facts = json.loads(head)
                # With a bound: a few bytes may unpack to any size.
                pixels = zlib.decompressobj().decompress(packed, _LARGEST)
                pictures = np.frombuffer(pixels, np.uint8).reshape(facts.pop("shape"))
                if pictures.ndim == 4 and pictures.shape[3] in (1, 3):
                    yield StoredDrawing(int(path.stem), facts, pictures)

    def _files(self) -> list[Path]:
        with suppress(OSError):
            if not self._folder.is_symlink():
                found = [path for path in self._folder.iterdir() if path.suffix == _SUFFIX]
                return sorted(path for path in found if path.stem.isdecimal())
        return []

    def _forget_old(self) -> None:
        files = self._files()
        sizes = [path.lstat().st_size for path in files]
        while len(files) > _MOST_FILES or sum(sizes) > _MOST_BYTES:
            remove(files.pop(0), cache_folder())
            sizes.pop(0)
