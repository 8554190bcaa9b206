"""A pack: decoded images in a folder of flat files, which opens at once because the files are mapped and not parsed.

    pack.json        shape, split, settings, classes, data report, statistics, a checksum of each file
    pixels.u8        uint8 [N, C, H, W], first the training images, then those held out
    labels.npy       int64 [N], an index into the classes; absent without classes
    names.bin        the names of the images in UTF-8; names.npy int64 [N + 1] has the offset of each
    treatment.npy    int32 [N], sides.npy int32 [N, 2], grey.npy bool [N]: see `DataReport` and `ImageSet`
    chunks.json      [row behind it, sha256] of each chunk of pixels.u8

`unfog pack` and the cache write the same format (`pack_writer`). Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unfog.data.data_report import DataReport
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.packs.pack_files import (
    PACK_SETTINGS,
    file_digest,
    is_pack,
    is_unfinished_pack,
    open_files,
    read_manifest,
)
from unfog.data.settings import Data
from unfog.data.sources.base import OpenOptions, Source, SourceLocation
from unfog.errors import RequestError
from unfog.text import sanitize


@dataclass(frozen=True, eq=False)
class Pack:
    """An open pack. Pixels, labels and names are mapped from its files."""

    path: Path
    manifest: Mapping[str, Any]
    """The content of pack.json."""
    images: ImageSet
    """All images: first the training images, then those held out."""
    train: int
    """Number of training images."""
    settings: Mapping[str, Any]
    """The values of PACK_SETTINGS, resolved."""
    report: DataReport

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Open a pack: read its manifest and check the sizes of its files. `verify` checks their content.

        Raises:
            RequestError: the folder is no pack, or a damaged one.
        """
        try:
            manifest = read_manifest(path)
            report, images = open_files(path, manifest)
            report.line()  # reads each field of the report, so that a damaged one fails here
        except RequestError:
            raise
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise _damaged(path, error) from None
        settings = {name: manifest["settings"][name] for name in PACK_SETTINGS}
        return cls(path, manifest, images, manifest["train"], settings, report)

    @property
    def nbytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    def resolve_settings(self, settings: Data) -> Data:
        """Return the settings with those of the pack in place."""
        return replace(settings, **self.settings)

    def dataset(self, settings: Data, source: str) -> Dataset:
        """Return the pack's images as a dataset, decoding nothing.

        The settings must fit the pack; their `labels` are kept unless automatic. `source` is its name for people.
        """
        labels = self.settings["labels"] if settings.labels == "auto" else settings.labels
        report, (train, held_out) = replace(self.report, source=source), self.manifest["fingerprints"]
        resolved = replace(self.resolve_settings(settings), labels=labels)
        return Dataset.split(self.images, self.train, resolved, report, (train, held_out))

    @classmethod
    def verify(cls, path: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read all of a pack and compare checksums. Return a line for each damage, [] for none.

        `progress` is called with (bytes done, bytes in all).

        Raises:
            RequestError: the folder is no pack, or cannot be opened.
        """
        pack, problems, done = cls.open(path), list[str](), 0
        try:
            for name, file in pack.manifest["files"].items():
                if name != "pixels.u8" and file_digest(path / name) != file["sha256"]:
                    problems.append(f"{name} is not as it was written")
            per_image, begin = math.prod(pack.images.pixels.shape[1:]), 0
            chunks = json.loads((path / "chunks.json").read_text("utf-8")) if not problems else []
            with open(path / "pixels.u8", "rb") as file:
                for end, expected in chunks:
                    if hashlib.sha256(file.read((end - begin) * per_image)).hexdigest() != expected:
                        problems.append(f"pixels.u8 is damaged at images {begin:,} to {end - 1:,}")
                    done, begin = end * per_image, end
                    if progress:
                        progress(done, pack.nbytes)
        except (OSError, ValueError, TypeError) as error:
            problems.append(f"it cannot be read: {error}")
        return problems


class PackSource(Source):
    """A pack as a source, for settings other than its own: its images are resized anew.

    Raises:
        RequestError: the folder is no pack, or a damaged one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.pack = folder, name, Pack.open(folder)
        self.resolved = str(folder.resolve())
        self.names = self.pack.images.names
        self.classes = self.pack.images.classes
        self.labels = self.pack.images.labels

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form != "folder":
            return None
        folder = Path(location.resolved)
        if is_pack(folder):
            return location
        if is_unfinished_pack(folder):
            raise RequestError(
                f"{sanitize(location.name)} is an unfinished pack; finish it with the same `unfog pack` as before"
            )
        return None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> PackSource:
        return cls(Path(location.resolved), location.name)

    def open(self, i: int) -> Image.Image:
        pixels = self.pack.images.pixels[i]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))

    def stamp(self) -> tuple[str, int]:
        # The manifest's digest covers a checksum of every file.
        return str(self.pack.manifest["digest"]), self.pack.nbytes

    def decoded_dataset(self, settings: Data) -> Dataset | None:
        # Automatic settings fit, and so does the default `held_out`.
        pack, packed = self.pack, self.pack.settings
        size = packed["size"]
        if settings.size > size:
            raise RequestError(
                f"size = {settings.size}, but {sanitize(self.name)} holds images of {size}x{size}; pack the originals "
                f"again with --size {settings.size}, or train on these as they are"
            )
        fits = settings.size in (0, size) and settings.channels in (0, packed["channels"])
        fits = fits and settings.labels in ("auto", "none", packed["labels"])
        if not (fits and (settings.held_out == 0 or self._has_split(settings.held_out))):
            return None
        dataset = pack.dataset(settings, self.name)
        drop_labels = settings.labels == "none" and packed["labels"] != "none"
        join = len(dataset.held_out) > 0 and not self._has_split(settings.held_out)
        if not (drop_labels or join):
            return dataset
        images, train, report, resolved = pack.images, pack.train, dataset.report, dataset.settings
        if drop_labels:
            images, report = replace(images, labels=None, classes=()), replace(report, class_counts={})
            resolved = replace(resolved, labels="none")
        if settings.held_out == 0:
            train, report, resolved = len(images), replace(report, held_out=0), replace(resolved, held_out=0.0)
        return Dataset.split(images, train, resolved, report)

    def _has_split(self, held_out: float) -> bool:
        # The default means "no wish", so it takes the pack's own split, whatever fraction that has.
        return held_out in (Data().held_out, self.pack.settings["held_out"])

    def train_count(self, held_out: float) -> int | None:
        return self.pack.train if self._has_split(held_out) else None

    def fill_settings(self, settings: Data) -> Data:
        labels = self.pack.settings["labels"] if settings.labels == "auto" else settings.labels
        return replace(settings, size=settings.size or self.pack.settings["size"], labels=labels)


def _damaged(path: Path, error: Exception) -> RequestError:
    reason = " ".join(sanitize(str(error)).split())[:200] or type(error).__name__
    return RequestError(f"{sanitize(str(path))} is a damaged pack ({reason}); pack the originals again")
