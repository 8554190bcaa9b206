"""A pack: images decoded once, in a folder of flat files that are mapped and never parsed, so that it opens at once.

    pack.json        what it holds: shape, split, settings, classes, account, statistics, a checksum of each file
    pixels.u8        uint8 [N, C, H, W], first the images to train on, then those held out
    labels.npy       int64 [N], an index into the classes; left out without classes
    names.bin        the images' names, UTF-8, one behind the other; names.npy int64 [N + 1] says where each begins
    treatment.npy    int32 [N], sides.npy int32 [N, 2], grey.npy bool [N]: see `DataReport` and `ImageSet`
    chunks.json      for each piece of pixels.u8: the row behind it, and its sha256

`packing` writes one; `unfog pack` and the cache share the format. Nothing in it is ever unpickled.
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

from unfog.data.dataset import Dataset, ImageSet, split
from unfog.data.packs.pack_files import check, check_settings, is_begun, is_pack, open_files, read_manifest
from unfog.data.report import DataReport
from unfog.data.settings import Data
from unfog.data.sources.base import OpenOptions, Source, SourceLocation
from unfog.errors import RequestError
from unfog.text import sanitize

PACK_SETTINGS = ("size", "channels", "background", "labels", "held_out")
"""Settings that a pack was made with; the others act on what comes out of it."""


@dataclass(frozen=True, eq=False)
class Pack:
    """A whole pack, open; its pixels, labels and names are in files that the system pages in as they are read."""

    path: Path
    manifest: Mapping[str, Any]
    """What pack.json holds."""

    images: ImageSet
    """All of it: first the images to train on, then those held out."""

    train: int
    """How many to train on."""

    settings: Mapping[str, Any]
    """Those of PACK_SETTINGS, settled."""

    report: DataReport

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Open a pack, reading its manifest and looking at the sizes of its files; `verify_pack` reads all.

        Whatever the files hold, this neither crashes nor allocates for it.

        Raises:
            RequestError: it is no pack, or not a whole one.
        """
        try:
            manifest = read_manifest(path)
            shape, train, classes = manifest["shape"], manifest["train"], manifest["classes"]
            check(shape, train, classes, manifest["labelled"], manifest["fingerprints"])
            settings = {name: manifest["settings"][name] for name in PACK_SETTINGS}
            check_settings(settings, shape)
            report, images = open_files(path, manifest)
            report.line()  # which looks at each of its parts
        except RequestError:
            raise
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise _damaged(path, error) from None
        return cls(path, manifest, images, train, settings, report)

    @property
    def fingerprints(self) -> tuple[str, str]:
        """Of the images to train on, and of those held out; see `ImageSet.fingerprint`."""
        first, second = self.manifest["fingerprints"]
        return first, second

    @property
    def nbytes(self) -> int:
        """Size of all its files but the manifest."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    def resolve_settings(self, asked: Data) -> Data:
        """The settings as asked, with those of the pack."""
        return replace(asked, **self.settings)

    def prepared(self, asked: Data, source: str) -> Dataset:
        """Its images without decoding anything.

        `asked` must fit; what it says of labels is kept, if settled. `source` is what the user calls the images.
        """
        labels = self.settings["labels"] if asked.labels == "auto" else asked.labels
        report = replace(self.report, source=source)
        return split(
            self.images, self.train, replace(self.resolve_settings(asked), labels=labels), report, self.fingerprints
        )


def verify_pack(path: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """What is wrong with a pack, a line for each; [] if every byte is as it was written. Reads all of it.

    `progress` is called with (bytes done, bytes in all).

    Raises:
        RequestError: it is no pack, or cannot be opened.
    """
    pack, troubles, done = Pack.open(path), [], 0
    try:
        for name, file in pack.manifest["files"].items():
            if name != "pixels.u8" and _digest(path / name) != file["sha256"]:
                troubles.append(f"{name} is not as it was written")
        per_image, begin = math.prod(pack.images.pixels.shape[1:]), 0
        chunks = json.loads((path / "chunks.json").read_text("utf-8")) if not troubles else []
        with open(path / "pixels.u8", "rb") as file:
            for end, expected in chunks:
                if hashlib.sha256(file.read((end - begin) * per_image)).hexdigest() != expected:
                    troubles.append(f"pixels.u8 is damaged at images {begin:,} to {end - 1:,}")
                done, begin = end * per_image, end
                if progress:
                    progress(done, pack.nbytes)
    except (OSError, ValueError, TypeError) as error:
        troubles.append(f"it cannot be read: {error}")
    return troubles


class PackSource(Source):
    """A pack as a source, for settings that it was not made with: each image is decoded already, and resized anew.

    Raises:
        RequestError: it is no pack, or not a whole one.
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
        if is_begun(folder):
            raise RequestError(
                f"{sanitize(location.name)} is an unfinished pack; finish it with the same `unfog pack` as before"
            )
        return None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> PackSource:
        return cls(Path(location.resolved), location.name)

    def open(self, i: int) -> Image.Image:
        """Image i, decoded."""
        pixels = self.pack.images.pixels[i]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))

    def stamp(self) -> tuple[str, int]:
        """The manifest's digest, which covers a checksum of every file."""
        return str(self.pack.manifest["digest"]), self.pack.nbytes

    def dataset_if_fitting(self, settings: Data) -> Dataset | None:
        """The images as they are, if they are what is asked for; None if they have to be made anew from these.

        What is left open fits, and held_out too is left open where it is the usual one.

        Raises:
            RequestError: they cannot be made from these, which are smaller.
        """
        pack, kept = self.pack, self.pack.settings
        size = kept["size"]
        if settings.size > size:
            raise RequestError(
                f"size = {settings.size}, but {sanitize(self.name)} holds images of {size}x{size}; pack the originals "
                f"again with --size {settings.size}, or train on these as they are"
            )
        labelled, wants_none = kept["labels"] != "none", settings.labels == "none"
        usual = (Data().held_out, kept["held_out"])
        fits = settings.size in (0, size) and settings.channels in (0, kept["channels"])
        fits = fits and settings.labels in ("auto", "none", kept["labels"]) and settings.held_out in (0, *usual)
        if not fits:
            return None
        prepared = pack.prepared(settings, self.name)
        if not (labelled and wants_none) and (settings.held_out in usual or not len(prepared.held_out)):
            return prepared
        images, train, report, settled = pack.images, pack.train, prepared.report, prepared.settings
        if wants_none:
            images, report = replace(images, labels=None, classes=()), replace(report, class_counts={})
            settled = replace(settled, labels="none")
        if settings.held_out == 0:
            train, report, settled = len(images), replace(report, held_out=0), replace(settled, held_out=0.0)
        return split(images, train, settled, report)

    def split(self, fraction: float) -> int | None:
        """How many of its images are to be trained on, the first ones; None where another split is asked for."""
        return self.pack.train if fraction in (Data().held_out, self.pack.settings["held_out"]) else None

    def with_pack_defaults(self, settings: Data) -> Data:
        """What is left open but for size and channels, as the pack has it."""
        labels = self.pack.settings["labels"] if settings.labels == "auto" else settings.labels
        return replace(settings, size=settings.size or self.pack.settings["size"], labels=labels)


def _damaged(path: Path, error: Exception) -> RequestError:
    why = " ".join(sanitize(str(error)).split())[:200] or type(error).__name__
    return RequestError(f"{sanitize(str(path))} is a damaged pack ({why}); pack the originals again")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
