"""Where images come from. A source lists names and opens one image at a time; it decodes and decides nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.files import find, open_image
from unfog.data.ledger import Quarantined, shown
from unfog.errors import RequestError

FASHION = (
    *("tshirt_top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
)
"""The classes of the built-in set, in the order of the labels."""

SPLITS = frozenset(["train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"])


class Source(Protocol):
    """Some images, in a fixed order."""

    @property
    def name(self) -> str:
        """As the user wrote it, for messages."""

    @property
    def names(self) -> Sequence[str]:
        """A name for each image, unique, unchanged by adding others; "/" separates folders."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes this source is sure of, in the order of the labels; () to read them from the names."""

    @property
    def held_out(self) -> frozenset[str] | None:
        """Names of a split of its own; None to make one."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """How many files of each kind it passed over as not images; see `Ledger.ignored`."""

    @property
    def unreadable(self) -> Sequence[Quarantined]:
        """Folders that could not be listed; what is in them is not in `names`."""

    def open(self, i: int) -> Image.Image:
        """Image i, not necessarily decoded yet. Raises Unusable, or whatever opening it raises."""

    def stamps(self) -> Iterator[tuple[str, int, int]]:
        """(name, bytes, time of change) of each image: differs when an image was changed."""


def open_source(text: str | Path) -> Source:
    """The source that a user means: a built-in name, else a folder ("./fashion" is a folder in any case).

    Raises:
        RequestError: there is no such thing, or no image in it.
    """
    if not str(text):
        raise RequestError("SOURCE is empty; give a folder of images, or fashion")
    if str(text) == "fashion":
        return FashionSource()
    # These functions of os.path, unlike Path's, do not fail on whatever text.
    folder, said = Path(os.path.expanduser(text)), shown(str(text))
    if os.path.isdir(folder):
        try:
            str(folder.resolve()).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"the path of {said} has a byte that is no text (UTF-8), which no run could store; rename the folder"
            ) from None
        return FolderSource(folder, str(text))
    if os.path.exists(folder):
        raise RequestError(f"{said} is a file; give the folder that holds the images (unpack an archive first)")
    siblings: dict[str, str] = {}
    with suppress(OSError, ValueError):
        near = folder.parent if folder.parent.is_dir() else Path()
        siblings = {path.name: str(folder.parent / path.name) for path in near.iterdir() if path.is_dir()}
    close = difflib.get_close_matches(folder.name, ["fashion", *siblings], n=1)
    hint = f"did you mean {siblings.get(close[0], close[0])}?" if close else "give a folder of images, or fashion"
    raise RequestError(f"{said} is neither a folder nor a built-in set; {shown(hint)}")


class FolderSource:
    """Every image below a folder, at any depth, sorted by path; hidden ones are left out, links are followed.

    Raises:
        RequestError: no file below it has a suffix of images, or it cannot be read.
    """

    classes: tuple[str, ...] = ()
    held_out: frozenset[str] | None = None

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        found = find(folder)
        self.names: Sequence[str] = sorted(found.names)
        self.ignored: Mapping[str, int] = found.ignored
        self.unreadable: Sequence[Quarantined] = sorted(found.unreadable)
        if not self.names:
            others = found.ignored.total()
            listed = ", ".join(f"{count:,} {shown(kind)}" for kind, count in found.ignored.most_common(3))
            closed = "".join(f"; {reason}: {shown(below)}" for below, reason in self.unreadable[:3])
            raise RequestError(
                f"found 0 images; looked for .png .jpg .jpeg .webp .gif .tif .bmp ... in {name} ({others:,} other "
                f"file{'s' * (others != 1)}{': ' * (others > 0)}{listed}{closed}); give a folder with images"
            )

    def open(self, i: int) -> Image.Image:
        """The file's header, read; its pixels are read on use."""
        return open_image(self.folder / self.names[i])

    def stamps(self) -> Iterator[tuple[str, int, int]]:
        """Bytes and mtime of each file; zeros for one that cannot be looked at."""
        for name in self.names:
            try:
                stat = os.stat(self.folder / name)
            except OSError:
                yield name, 0, 0
            else:
                yield name, stat.st_size, stat.st_mtime_ns


class FashionSource:
    """The built-in set: 10,000 images of Fashion-MNIST, 1,000 a class, the last 100 of which are held out.

    28 x 28, grey; MIT licence, in builtin/LICENSE-fashion-mnist.
    """

    name = "fashion"
    classes: tuple[str, ...] = FASHION
    names: Sequence[str] = [f"{name}/{i:04}" for name in FASHION for i in range(1000)]
    held_out: frozenset[str] | None = frozenset(f"{name}/{i:04}" for name in FASHION for i in range(900, 1000))
    ignored: Mapping[str, int] = {}
    unreadable: Sequence[Quarantined] = ()

    def __init__(self) -> None:
        with (files("unfog.data") / "builtin" / "fashion.png").open("rb") as file, Image.open(file) as sheet:
            tiles = np.asarray(sheet).reshape(100, 28, 100, 28).swapaxes(1, 2)
        self.tiles: NDArray[np.uint8] = tiles.reshape(10000, 28, 28)  # in the order of `names`

    def open(self, i: int) -> Image.Image:
        """Image i, decoded."""
        return Image.fromarray(self.tiles[i])

    def stamps(self) -> Iterator[tuple[str, int, int]]:
        """It never changes."""
        return ((name, 784, 0) for name in self.names)


def labels_of(source: Source, mode: str) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """(classes, label of each image int64 [N]), or ((), None).

    A class is a top folder below whatever all images share ("photos/cats/a.jpg", "photos/dogs/1/b.jpg": cats,
    dogs). Mode "auto" takes the folders for classes when there are at least two of them, no image lies beside
    them, each has four images on average, and they are not a split into train and test. Mode "folders"
    insists; "none" has no classes.

    Raises:
        RequestError: mode "folders", and an image lies in no sub-folder.
    """
    if mode == "none":
        return (), None
    parts = [PurePosixPath(name).parts[:-1] for name in source.names]
    first, last = min(parts), max(parts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    tops = [folders[shared] if len(folders) > shared else "" for folders in parts]
    found = sorted(set(tops))
    if mode == "folders" and shared and found[0] == "":
        # All images lie in one folder, or in it and below: that folder is the class.
        shared, tops = shared - 1, [folders[shared - 1] for folders in parts]
        found = sorted(set(tops))
    if mode == "folders" and found[0] == "":
        loose = shown(source.names[tops.index("")])
        raise RequestError(
            f"labels = folders needs every image in a sub-folder, and {loose} is in none; move it or use labels = none"
        )
    if mode == "auto" and not source.classes:
        split = all(name.lower() in SPLITS for name in found)
        if split and all(len(folders) > shared + 1 for folders in parts):
            tops = [folders[shared + 1] for folders in parts]  # train/cats, val/cats: the classes are one level down
            found, split = sorted(set(tops)), False
        if len(found) < 2 or found[0] == "" or split or len(tops) < 4 * len(found):
            return (), None
    classes = source.classes or tuple(found)
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([index[top] for top in tops], np.int64)
    return tuple(shown(name) for name in classes), labels  # which are written into files, figures and terminals
