"""Where images come from. A source lists names and opens one image at a time; it decodes and decides nothing."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from unfog.errors import RequestError

SUFFIXES = tuple(
    f".{kind}"
    for kind in (
        *("png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "dib", "gif", "tif", "tiff", "avif"),
        *("heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm", "pnm", "tga", "ico"),
    )
)
"""What counts as an image in a folder. Pillow goes by content, so a misnamed one works; HEIC needs a plugin
of the user's, and is listed so that it is named as skipped rather than passed over."""

FASHION = (
    *("tshirt_top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
)
"""The classes of the built-in set, in the order of the labels."""

SPLITS = frozenset(["train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"])
_SKIPPED_FOLDERS = frozenset(["__MACOSX", "@eaDir", "$RECYCLE.BIN"])


class Unusable(Exception):
    """An image that must be skipped. The message is the reason, in the same few words for the same trouble."""


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
    def other_files(self) -> int:
        """How many files it passed over as not images."""

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
    folder = Path(text).expanduser()
    if folder.is_dir():
        return FolderSource(folder, str(text))
    if folder.exists():
        raise RequestError(f"{text} is a file; give the folder that holds the images (unpack an archive first)")
    near = folder.parent if folder.parent.is_dir() else Path()
    siblings = {path.name: str(folder.parent / path.name) for path in near.iterdir() if path.is_dir()}
    close = difflib.get_close_matches(folder.name, ["fashion", *siblings], n=1)
    hint = f"did you mean {siblings.get(close[0], close[0])}?" if close else "give a folder of images, or fashion"
    raise RequestError(f"{text} is neither a folder nor a built-in set; {hint}")


class FolderSource:
    """Every image below a folder, at any depth, sorted by path; hidden ones are left out, links are followed.

    Raises:
        RequestError: no file below it has one of SUFFIXES.
    """

    classes: tuple[str, ...] = ()
    held_out: frozenset[str] | None = None

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        others: Counter[str] = Counter()
        names = []
        for path in _files(folder, ()):
            if path.suffix.lower() in SUFFIXES:
                names.append(path.relative_to(folder).as_posix())
            else:
                others[path.suffix.lower() or "without suffix"] += 1
        self.names: Sequence[str] = sorted(names)
        self.other_files = others.total()
        if not names:
            listed = ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common(3))
            looked_for = " ".join(SUFFIXES[:12])
            found = f"{self.other_files:,} other files" + (f": {listed}" if others else "")
            raise RequestError(
                f"found 0 images; looked for {looked_for} ... in {name} ({found}); give a folder with images"
            )

    def open(self, i: int) -> Image.Image:
        """The file's header, read; its pixels are read on use."""
        path = self.folder / self.names[i]
        try:
            return Image.open(path)
        except UnidentifiedImageError as error:
            if path.stat().st_size == 0:
                raise Unusable("empty") from error
            if path.suffix.lower() in (".heic", ".heif"):
                raise Unusable("HEIC, to be converted to JPEG or PNG first") from error
            raise Unusable("not an image") from error

    def stamps(self) -> Iterator[tuple[str, int, int]]:
        """Bytes and mtime of each file; zeros for one that cannot be looked at."""
        for name in self.names:
            try:
                stat = os.stat(self.folder / name)
            except OSError:
                yield name, 0, 0
            else:
                yield name, stat.st_size, stat.st_mtime_ns


def _files(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Files below a folder. A folder that is one of those above it is a loop of links, and is not entered again."""
    try:
        stat = folder.stat()
        entries = list(os.scandir(folder))
    except OSError as error:
        if not above:
            raise RequestError(f"{folder} cannot be read: {error.strerror}; check its permissions") from error
        yield folder  # to be counted among what is ignored
        return
    here = (stat.st_dev, stat.st_ino)
    if here in above:
        return
    if above and {"config.toml", "checkpoints"} <= {entry.name for entry in entries}:
        return  # a run, whose previews are no photographs; one may train inside the folder of the images
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS:
            continue
        path = Path(entry.path)
        if path.is_dir():
            yield from _files(path, (*above, here))
        elif path.is_file() or not path.exists():
            # A broken link is kept, to be named as skipped; a pipe or device would block whoever opens it.
            yield path


class FashionSource:
    """The built-in set: 10,000 images of Fashion-MNIST, 1,000 a class, the last 100 of which are held out.

    28 x 28, grey; MIT licence, in builtin/LICENSE-fashion-mnist.
    """

    name = "fashion"
    classes: tuple[str, ...] = FASHION
    names: Sequence[str] = [f"{name}/{i:04}" for name in FASHION for i in range(1000)]
    held_out: frozenset[str] | None = frozenset(f"{name}/{i:04}" for name in FASHION for i in range(900, 1000))
    other_files = 0

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
        loose = source.names[tops.index("")]
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
    return classes, np.array([index[top] for top in tops], np.int64)
