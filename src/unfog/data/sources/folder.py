"""A folder of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile
from unfog.data.sources.fingerprint import files_digest
from unfog.data.sources.image_files import list_images, no_images_error, open_image


class FolderSource:
    """Every image below a folder, at any depth, sorted by path; hidden ones are left out, links are followed.

    Raises:
        RequestError: no file below it has a suffix of images, or it cannot be read.
    """

    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None
    remote = False
    held_out: frozenset[str] | None = None

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.resolved = str(folder.resolve())
        found = list_images(folder)
        self.names: Sequence[str] = sorted(found.names)
        self.ignored: Mapping[str, int] = found.ignored
        self.unreadable: Sequence[SkippedFile] = sorted(found.unreadable)
        if not self.names:
            raise no_images_error(name, found.ignored, self.unreadable)

    def open(self, i: int) -> Image.Image:
        """The file's header, read; its pixels are read on use."""
        return open_image(self.folder / self.names[i])

    def stamp(self) -> tuple[str, int]:
        """See `files_digest`."""
        return files_digest(self.folder, self.names)
