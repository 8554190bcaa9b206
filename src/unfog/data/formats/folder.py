"""A folder of images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.formats.files import find, none_found, open_image
from unfog.data.ledger import Quarantined


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
        """Digest of the name, bytes and mtime of each file; zeros for one that cannot be looked at."""
        digest, total = hashlib.sha256(), 0
        for name in self.names:
            size = changed = 0
            with suppress(OSError):
                stat = os.stat(self.folder / name)
                size, changed = stat.st_size, stat.st_mtime_ns
            digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
            total += size
        return digest.hexdigest(), total
