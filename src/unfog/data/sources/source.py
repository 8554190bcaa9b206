"""Where images come from. A source lists names and opens one image at a time; it decodes and decides nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile
from unfog.data.sources.builtin_fashion import FASHION_CLASSES as FASHION_CLASSES
from unfog.data.sources.builtin_fashion import FashionSource as FashionSource
from unfog.data.sources.folder import FolderSource as FolderSource
from unfog.data.sources.locate import locate
from unfog.data.webdataset.remote_shards import DEFAULT_POLICY, RemotePolicy
from unfog.errors import RequestError
from unfog.text import sanitize

SPLITS = frozenset(["train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"])
_SHARD = re.compile(r"\.tar/", re.IGNORECASE)


class Source(Protocol):
    """Some images, in a fixed order, which is a function of the data alone."""

    @property
    def name(self) -> str:
        """As the user wrote it, for messages."""

    @property
    def resolved(self) -> str:
        """How to find it again from anywhere: an absolute path, a URL, "fashion"."""

    @property
    def names(self) -> Sequence[str]:
        """A name for each image, unique, unchanged by adding others; "/" separates folders. May be made on demand."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes this source is sure of, in the order of the labels; () to read them from the names."""

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """Its own labels, [N], each an index into `classes`; None to read them from the names."""

    @property
    def held_out(self) -> frozenset[str] | None:
        """Names of a split of its own; None to make one."""

    @property
    def remote(self) -> bool:
        """Whether who opens an image waits for a network rather than for a processor."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """How many files of each kind it passed over as not images; see `DataReport.ignored`."""

    @property
    def unreadable(self) -> Sequence[SkippedFile]:
        """What was found and is not in `names`: folders that could not be listed, images without a label."""

    def open(self, i: int) -> Image.Image:
        """Image i, not necessarily decoded yet. Raises ImageError, or whatever opening it raises. Safe in threads."""

    def stamp(self) -> tuple[str, int]:
        """(digest of its state, which differs when an image or label was changed; bytes in all)."""


def open_source(
    text: str | Path, progress: Callable[[int, int], None] | None = None, policy: RemotePolicy = DEFAULT_POLICY
) -> Source:
    """The source that a user means: see `locate`.

    `progress` is called with (megabytes passed, megabytes in all) while an index of shards is built, which may take
    minutes once; what it raises stops that, and what is done by then is kept. `policy` is for shards far away.

    Raises:
        RequestError: there is no such thing, no image in it, or it cannot be read.
    """
    located = locate(str(text))
    path = Path(located.resolved)
    match located.kind:
        case "fashion":
            return FashionSource()
        case "folder":
            return FolderSource(Path(located.name).expanduser(), located.name)
        case "zip":
            from unfog.data.sources.zip_archive import ZipSource

            return ZipSource(located)
        case "tar":
            from unfog.data.webdataset.shard_source import ShardSource

            return ShardSource(located, progress, policy)
        case "pack":
            from unfog.data.packs.pack import PackSource

            return PackSource(path, str(text))
        case "arrays":
            from unfog.data.sources.arrays import ArraySource

            return ArraySource(path, str(text))
        case "hub":
            from unfog.data.sources.huggingface import HuggingFaceSource

            if located.resolved.startswith("hf:"):
                place, _, split = located.resolved.removeprefix("hf:").partition(":")
                return HuggingFaceSource(place, str(text), split)
            return HuggingFaceSource(located.resolved, str(text))


def strip_shard(name: str) -> str:
    """An image's name less the shard that it is in."""
    return _SHARD.split(name, 1)[-1]


def _folders(source: Source) -> tuple[list[tuple[str, ...]], NDArray[Any]]:
    """(the parts of each folder that there is, few beside the images; which of them each image is in, [N]).

    A source of very many names may know: `folders` is then (each folder below the shard, which of them [N]).
    """
    known = getattr(source, "folders", None)
    if known is None:
        names, found = source.names, dict[str, int]()
        folders = (strip_shard(name).rpartition("/")[0] for name in names)
        codes = np.fromiter((found.setdefault(folder, len(found)) for folder in folders), np.int64, len(names))
        known = list(found), codes
    return [tuple(folder.split("/")) if folder else () for folder in known[0]], known[1]


def read_labels(source: Source, mode: str) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """(classes, label of each image int64 [N]), or ((), None).

    The source's own labels, where it has some. Else a class is a top folder below whatever all images share
    ("photos/cats/a.jpg", "photos/dogs/1/b.jpg": cats, dogs). Mode "auto" takes the folders for classes when there
    are at least two of them, no image lies beside them, each has four images on average, and they are not a split
    into train and test; below such a split, in both modes, they are what is one level down ("train/cats", "val/cats").
    Mode "folders" insists, and gives what "auto" settled to; "none" has no classes. A table's labels are the source's
    own after `tables.labelled`.

    Raises:
        RequestError: mode "folders", and an image lies in no sub-folder.
    """
    if mode == "none":
        return (), None
    if source.labels is not None:
        return tuple(sanitize(name) for name in source.classes), source.labels
    parts, codes = _folders(source)
    first, last = min(parts), max(parts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    tops = [folder[shared] if len(folder) > shared else "" for folder in parts]
    found = sorted(set(tops))
    if mode == "folders" and shared and found[0] == "":
        # All images lie in one folder, or in it and below: that folder is the class.
        shared, tops = shared - 1, [folder[shared - 1] for folder in parts]
        found = sorted(set(tops))
    if mode == "folders" and found[0] == "":
        loose = sanitize(source.names[int(np.argmax(np.array([top == "" for top in tops])[codes]))])
        raise RequestError(
            f"labels = folders needs every image in a sub-folder, and {loose} is in none; move it or use labels = none"
        )
    split = not source.classes and all(name.lower() in SPLITS for name in found)
    if split and all(len(folder) > shared + 1 for folder in parts):
        tops = [folder[shared + 1] for folder in parts]
        found, split = sorted(set(tops)), False
    unclear = len(found) < 2 or found[0] == "" or split or len(codes) < 4 * len(found)
    if mode == "auto" and not source.classes and unclear:
        return (), None
    classes = source.classes or tuple(found)
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([index[top] for top in tops], np.int64)[codes]
    return tuple(sanitize(name) for name in classes), labels  # which are written into files, figures and terminals
