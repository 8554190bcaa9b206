"""A folder of images."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.formats.files import find, none_found, open_image
from unfog.data.formats.sampled import sampled
from unfog.data.ledger import Quarantined

_LOOKED_INTO = 256
_BYTES = 64
"""Of how many files how many bytes at the beginning, the middle and the end are part of a folder's state."""


class FolderSource:
    """Every image below a folder, at any depth, sorted by path; hidden ones are left out, links are followed.

    Raises:
        RequestError: no file below it has a suffix of images, or it cannot be read.
    """

    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None
    far = False
    held_out: frozenset[str] | None = None

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.resolved = str(folder.resolve())
        found = find(folder)
        self.names: Sequence[str] = sorted(found.names)
        self.ignored: Mapping[str, int] = found.ignored
        self.unreadable: Sequence[Quarantined] = sorted(found.unreadable)
        if not self.names:
            raise none_found(name, found.ignored, self.unreadable)

    def open(self, i: int) -> Image.Image:
        """The file's header, read; its pixels are read on use."""
        return open_image(self.folder / self.names[i])

    def stamp(self) -> tuple[str, int]:
        """Digest of the name, bytes and mtime of each file, and of a few bytes in each of at most 512 files spread
        evenly; zeros for one that cannot be looked at."""
        digest, total = hashlib.sha256(), 0
        step = max(1, len(self.names) // _LOOKED_INTO)
        for i, name in enumerate(self.names):
            size = changed = 0
            with suppress(OSError):
                status = os.stat(self.folder / name)
                size, changed = status.st_size, status.st_mtime_ns
                if i % step == 0 and stat.S_ISREG(status.st_mode):  # to open a pipe would be to wait for its writer
                    digest.update(sampled(self.folder / name, 1, _BYTES))
            digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
            total += size
        return digest.hexdigest(), total
