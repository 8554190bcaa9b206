"""Image source: a folder of image files, nested as deep as you like."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from unfog.data.sources.base import LabelTable, OpenOptions, Source, SourceLocation
from unfog.data.sources.fingerprint import files_digest
from unfog.data.sources.image_files import list_images, no_images_error, open_image


class FolderSource(Source):
    """Every image below a folder, at any depth, sorted by path. Hidden files are left out, links are followed.

    Raises:
        RequestError: no file below it has a suffix of images, or the folder cannot be read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.resolved = str(folder.resolve())
        listing = list_images(folder)
        self.names = sorted(listing.names)
        self.ignored = listing.ignored
        self.unreadable = sorted(listing.unreadable)
        if not self.names:
            raise no_images_error(name, self.ignored, self.unreadable)

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        return location if location.form == "folder" else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> FolderSource:
        return cls(Path(location.name).expanduser(), location.name)

    def open(self, i: int) -> Image.Image:
        return open_image(self.folder / self.names[i])

    def stamp(self) -> tuple[str, int]:
        return files_digest(self.folder, self.names)

    def table(self, name: str) -> LabelTable | None:
        path = self.folder / name
        return LabelTable.from_path(path) if path.is_file() else None
