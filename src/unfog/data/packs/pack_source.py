"""A pack as a source of images: its own, or resized to other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unfog.data.dataset import Dataset
from unfog.data.files.file_rows import FileRows
from unfog.data.packs.pack import Pack
from unfog.data.settings import Data
from unfog.data.sources.base import OpenOptions, Source, SourceLocation
from unfog.errors import RequestError
from unfog.settings import is_auto
from unfog.text import sanitize
from unfog.values.columns import without_class
from unfog.values.image_format import ImageFormat, sides_of


class PackSource(Source):
    """A pack as a source, for settings other than its own: its images are resized anew."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.pack = folder, name, Pack.open(folder)
        self.resolved = str(folder.resolve())
        self.names = self.pack.images.names
        self.classes = self.pack.images.classes
        self.labels = self.pack.images.labels
        self.columns = self.pack.images.columns
        if isinstance(self.pack.images.pixels, FileRows) and self.pack.images.pixels.waits is not None:
            self.outage = self.pack.images.pixels.waits

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form != "folder":
            return None
        folder = Path(location.resolved)
        if Pack.is_at(folder):
            return location
        if Pack.is_unfinished_at(folder):
            raise RequestError(
                f"{sanitize(location.name)} is an unfinished pack; repeat the same `unfog pack` to finish it"
            )
        return None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> PackSource:
        return cls(Path(location.resolved), location.name)

    def read(self, i: int) -> NDArray[Any]:
        return self.pack.images.pixels[i].transpose(1, 2, 0)

    def stamp(self) -> tuple[str, int]:
        # The manifest's digest covers a checksum of every file.
        return str(self.pack.manifest["digest"]), self.pack.nbytes

    def decoded_dataset(self, settings: Data) -> Dataset | None:
        # Automatic settings fit, and so does the default `held_out`.
        pack, packed = self.pack, self.pack.settings
        size, format = packed["size"], ImageFormat.of(packed["channels"], packed["size"])
        if any(wanted > held for wanted, held in zip(sides_of(settings.size), sides_of(size))):
            raise RequestError(
                f"size = {settings.size}, but {sanitize(self.name)} holds images of {format.sides}; pack the "
                f"originals again with --size {settings.size}, or omit --size"
            )
        fitting = {"size": (size,), "channels": (packed["channels"],), "labels": ("none", packed["labels"])}
        fits = all(is_auto(settings, name) or getattr(settings, name) in values for name, values in fitting.items())
        if not (fits and (settings.held_out == 0 or self._has_split(settings.held_out))):
            return None
        dataset = pack.dataset(settings, self.name)
        drop_labels = settings.labels == "none" and packed["labels"] != "none"
        join = len(dataset.held_out) > 0 and not self._has_split(settings.held_out)
        if not (drop_labels or join):
            return dataset
        images, train, report, resolved = pack.images, pack.train, dataset.report, dataset.settings
        if drop_labels:
            images, report = replace(images, columns=without_class(images.columns)), replace(report, class_counts={})
        if settings.held_out == 0:
            train, report, resolved = len(images), replace(report, held_out=0), replace(resolved, held_out=0.0)
        return Dataset.split(images, train, resolved, report)

    def _has_split(self, held_out: float) -> bool:
        # The default means "no wish", so it takes the pack's own split, whatever fraction that has.
        return held_out in (Data().held_out, self.pack.settings["held_out"])

    def train_count(self, held_out: float) -> int | None:
        return self.pack.train if self._has_split(held_out) else None

    def fill_settings(self, settings: Data) -> Data:
        resolved = self.pack.resolve_settings(settings)
        size = resolved.size if is_auto(settings, "size") else settings.size
        return replace(settings, size=size, labels=resolved.labels)
