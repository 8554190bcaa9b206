"""`Source`, the interface of everything that images are read from, and the errors that reading them raises.

To add a source, write a subclass and name it in `registry.BUILT_IN`. It must set `names` and define `stamp`, and `open`
or `read`; all other members have defaults. A class outside this package is registered with `registry.register`, or
given on the command line as `python:MODULE:CLASS`.
"""

from __future__ import annotations

import csv
import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import DeepImage, Ranges, as_image
from unfog.data.data_report import EDITORS_FILES, SkippedFile
from unfog.data.dataset import Dataset
from unfog.data.outages import Outage
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.files.safe_files import read_file
from unfog.text import plural, sanitize
from unfog.values.arrays.slices import AXIAL
from unfog.values.columns import Column, rows_of

NIFTI_SUFFIXES = (".nii", ".nii.gz")
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
FITS_SUFFIXES = (".fits", ".fit", ".fts", ".fz", ".fits.gz", ".fit.gz", ".fts.gz", ".fits.fz")
SCAN_SUFFIXES = tuple(sorted((*NIFTI_SUFFIXES, *DICOM_SUFFIXES, *FITS_SUFFIXES), key=len, reverse=True))
"""Suffixes of files that hold several images, the longest first, as one may be the end of another."""
_LARGEST_TABLE = 2**30  # bytes of a label table: ten million images have half of that


class ImageError(Exception):
    """An image cannot be used. The message is a short reason, the same for the same cause, as reasons are counted."""


class MissingImageError(ImageError):
    """The file of an image is not there, or may not be read. It is gone, or the source is out of reach."""


class TransientImageError(ImageError):
    """An image could not be read now, but may be readable later: the network or the disk failed."""


class ShardReadError(TransientImageError):
    """The remote shard of an image could not be read now."""


class FailedShardError(ImageError):
    """The remote shard of an image has failed for good. The message says why."""


@dataclass(frozen=True)
class SourceLocation:
    """The place of the images that a SOURCE text means, before anything is opened."""

    name: str
    """The text, for messages; a URL without its query and password."""

    resolved: str
    """A text that means the same source from any working directory: an absolute path or pattern, or a URL."""

    form: Literal["name", "folder", "file", "files"]
    """"files" are URLs, or local files that a pattern stands for; "name" is a text that is looked up nowhere."""

    paths: tuple[str, ...] = ()
    """Absolute paths or URLs of a file or files, sorted. A remote pattern with a * is expanded when it is opened.
    For `python:MODULE:CLASS:ARGUMENT`, the argument."""

    base: str = ""
    """The common beginning of `paths`; the rest of each path names the file."""

    @property
    def suffix(self) -> str:
        """The lower-case suffix of the first path, such as ".tar", or ""."""
        path = self.paths[0] if self.paths else ""
        if "://" in path:
            # A signed URL ends with its signature, and not with the suffix.
            path = path.partition("?")[0].partition("#")[0]
        return os.path.splitext(path)[1].lower()


@dataclass(frozen=True)
class RemotePolicy:
    """Limits for remote shards: disk space, and shards that fail."""

    cache_bytes: int = 0
    """Bytes on disk for what was read; 0 caches nothing."""

    max_failed: float = 0.0
    """Share of the shards that may fail before the run ends."""

    failed_before: Mapping[str, str] | None = None
    """Name -> reason of shards that failed before a resume. None for a new run, which needs all shards at its start."""


@dataclass(frozen=True)
class OpenOptions:
    """Options that `Source.load` passes to the source that it opens."""

    progress: Callable[[int, int], None] | None = None
    """Called with (megabytes done, megabytes in all) while an index is built. It may raise to stop."""

    remote: RemotePolicy = field(default_factory=RemotePolicy)

    axes: str = "auto"
    """`data.axes`: order of the axes of arrays."""

    slices: str = AXIAL
    """`data.slices`: how volumes are cut to images."""


@dataclass(frozen=True)
class LabelTable:
    """A CSV, JSONL or parquet file of labels and other columns: a file of its own, or a member of an archive."""

    name: str
    """Its path as the user wrote it, for messages."""

    resolved: str
    """A path that means the same table from any working directory; of a member, ARCHIVE.zip/labels.csv."""

    read: Callable[[], bytes]
    """Return its content. Raises OSError, ImageError, or ValueError if it is too large."""

    columns: tuple[str, str] = ("", "")
    """Names of the columns of files and of labels; "" to find one by its usual names."""

    @classmethod
    def from_path(cls, path: Path) -> LabelTable:
        return cls(str(path), str(path.resolve()), partial(read_file, path, path.parent, _LARGEST_TABLE, follow=True))

    @classmethod
    def inside(cls, folder: Path, name: str) -> LabelTable | None:
        """Return the table of that file name in a folder, None without one."""
        path = folder / name
        return cls.from_path(path) if path.is_file() else None

    @classmethod
    def find(cls, path: str, *folders: str) -> LabelTable:
        """Return the label table at a path, absolute or in one of the folders. Raises RequestError if it is missing."""
        places = [os.path.expanduser(path), *(os.path.join(folder, os.path.basename(path)) for folder in folders)]
        table = next(filter(os.path.isfile, places), None)
        if table is None:
            raise RequestError(f"labels = {sanitize(path)} does not exist; give a .csv, .jsonl or .parquet file")
        return cls.from_path(Path(table))

    @property
    def base_name(self) -> str:
        return os.path.basename(self.resolved)

    @property
    def setting(self) -> str:
        """The value of `data.labels` that names this table from any working directory."""
        if not any(self.columns):
            return self.resolved
        named = io.StringIO()
        csv.writer(named, lineterminator="").writerow(filter(None, self.columns))
        return f"{self.resolved}:{named.getvalue()}"


class ShardFailures(Protocol):
    """Failed shards of a remote source that is read while training; see `webdataset.remote_shards.RemoteShards`.

    An image is named by its index in the source that has the shards: see `Source.shard_image`.
    """

    @property
    def failed(self) -> dict[str, str]:
        """Name -> reason of the failed shards, in the order in which they failed."""

    @property
    def cache_error(self) -> str:
        """Reason why reads are no longer cached; "" while they are, or if they never were."""

    def enable_cache(self) -> str:
        """Cache on disk what is read from now on. Return a line that says so, "" if the policy forbids it."""

    def image_count(self, name: str) -> int:
        """Return the number of images in the shard of that name."""

    def mark_failed(self, failed: Mapping[str, str]) -> None:
        """Take over the shards that failed in other processes. Raises RunError if they are too many."""

    def fail_shard_of(self, i: int, reason: str) -> None:
        """Raise FailedShardError for the shard of an unreadable image, unless no other shard can be read either.

        Raises RunError if one more shard has failed than the policy allows.
        """

    def recheck(self, i: int) -> None:
        """Drop an image that cannot be decoded from the cache, and check once that its shard is still the same.

        Raises FailedShardError if it is not, and RunError if one more shard has failed than the policy allows.
        """


class Source(ABC):
    """Images in a fixed order that depends on the data alone. It lists and opens images; it decodes nothing."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Lower-case suffixes of local files that `match` takes by default, such as (".npy",)."""

    new_runs_only: ClassVar[bool] = False
    """True if older runs read the same files through another class: a run that has begun opens this one by its prefix
    alone."""

    has_volumes: ClassVar[bool] = False
    """True if images are slices of volumes, which `OpenOptions.slices` cuts, or were cut before."""

    tables_inside: ClassVar[bool] = False
    """True if a label table may lie inside the file, so that its name is checked only once the source is open."""

    name: str
    """The source as the user wrote it, for messages."""

    resolved: str
    """A SOURCE text that means the same from any working directory. A run stores it, and a resume opens it."""

    names: Sequence[str]
    """A unique name for each image, "/" between folders; adding images leaves the others' names as they are. It may
    compute names on demand, as there may be a hundred million."""

    classes: tuple[str, ...] = ()
    """Class names in the order of `labels`; () to read classes from the folders in `names`."""

    labels: NDArray[np.int64] | None = None
    """[N], an index into `classes` for each image; None to read labels from the folders in `names`."""

    columns: Mapping[str, Column] = {}
    """What is known about each image, by name, in the order of `names`. Labels may be its column "class" instead."""

    label_column: str = ""
    """The one of the names that `values_of` reads whose values are the labels; "" if the labels have no such name."""

    held_out: frozenset[str] | None = None
    """Names of the images of an official held-out split; None to split by a hash of the names."""

    second: tuple[SecondSource, ...] | None = None
    """Second sources that are paired with the images already; None if those of the settings are to be paired."""

    ranges: Ranges | None = None
    """Ranges of values that were decided on more images than these; None to decide them on a sample of these."""

    folders: tuple[list[str], NDArray[np.int64]] | None = None
    """(each folder below the shards, [N] index of the folder of each image), where that is known without going through
    `names`."""

    ignored: Mapping[str, int] = {}
    """Number of files that are not images, by suffix, "hidden" or "without suffix"; and of `data_report.LEFT_OUT`."""

    second_names: Mapping[str, str] = {}
    """Another path of a folder -> the one under which its images are in `names`; both end in "/"."""

    unreadable: Sequence[SkippedFile] = ()
    """Files and folders that were found but are not in `names`, each with its reason."""

    found: str = ""
    """A line on what was found, for sources of other files than pictures."""

    groups: tuple[list[str], NDArray[np.int64]] | None = None
    """(names of what images are parts of, such as volumes; [N] index of that of each image), whose images are all held
    out, or none; None to hold out single images."""

    label_warning: str = ""
    """Why labels that the source has are not used; "" for nothing to say."""

    reading_warnings: Sequence[str] = ()
    """Lines on how the images were understood, where they could be meant otherwise."""

    files_differ: bool = False
    """True if each image is a local file of its own, which may hold values of another type than the others."""

    usual_image: int = 0
    """Number of an image that has as many channels as most others."""

    remote: bool = False
    """True if `read` waits for a network, so that more threads than cores read faster."""

    in_place: bool = False
    """True if `read` returns a part of a local file that is mapped, so that a copy in the cache reads no faster."""

    remote_shards: ShardFailures | None = None
    """The state of remote shards, which may fail one by one while training reads them."""

    def __init__(self, location: SourceLocation) -> None:
        self.name, self.resolved = location.name, location.resolved

    def _no_images_error(self) -> RequestError:
        """Return the error for a source without images, which names what else it holds."""
        others = sum(self.ignored.values())
        listed = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(self.ignored).most_common(3))
        editable = [kind for kind in EDITORS_FILES if kind in self.ignored]
        saved = f", or save the {' and '.join(editable)} files as PNG" if editable else ""
        closed = "".join(f"; {reason}: {sanitize(below)}" for below, reason in self.unreadable[:3])
        return RequestError(
            f"found 0 images; looked for .png .jpg .jpeg .webp .gif .tif .bmp ... in {sanitize(self.name)} "
            f"({plural(others, 'other file')}{': ' * (others > 0)}{listed}{closed}); give a folder "
            f"of images{saved}"
        )

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        """Return the location, with `paths` filled in, if it is a source of this class, else None.

        The default takes a local file with one of `suffixes`. Must be quick: look at names, do not open files.
        """
        return location if location.form == "file" and location.suffix in cls.suffixes else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> Source:
        """Open a location that `match` returned. Raises RequestError if it cannot be read or holds no image."""
        return cls(location)

    def open(self, i: int) -> Image.Image | DeepImage:
        """Return image i, decoded or not yet. Called from several threads at once. May raise ImageError or OSError."""
        raise NotImplementedError("the source has no open or read")

    def read(self, i: int) -> Image.Image | DeepImage | NDArray[Any]:
        """Return image i as `open` does, or as an array [H, W, C]; called as `open` is.

        An array of uint8 is used as it is, booleans with True as white, and other numbers as those of a `DeepImage`.
        With other channels than 1, 3 or 4, or without a usual range, it keeps its values.
        """
        return self.open(i)

    def read_image(self, i: int) -> Image.Image | DeepImage:
        """Return the result of `read`; an array becomes an image."""
        return as_image(self.read(i))

    @abstractmethod
    def stamp(self) -> tuple[str, int]:
        """Return (a digest of the source's state, its bytes in all).

        The digest names caches and is compared on resume, so it must differ when an image, a label or a column has
        changed.
        """

    def read_beside(self, i: int, suffix: str, most: int) -> bytes | None:
        """Return at most so many bytes of the file beside image i that has its name, but this suffix; None without one.

        May raise OSError or ImageError.
        """
        return None

    def value_names(self) -> Sequence[str]:
        """Return names that `values_of` reads, for messages: as many as are quickly found."""
        return ()

    def values_of(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Return the values beside the images that have these names, one for each image; a missing value is None.

        Names without values are left out. The values may become columns: see `data.columns.kinds`.
        RequestError if they cannot be read, or are not one for each image.
        """
        return {}

    def images_of(self, names: Collection[str]) -> Mapping[str, Source]:
        """Return, of these names of values beside the images, those that are an image for each image, as sources.

        Their images are in the same order. RequestError as `values_of`.
        """
        return {}

    def table(self, name: str) -> LabelTable | None:
        """Return the label table of that file name beside or among the images, None without one."""
        return None

    def decoded_dataset(self, settings: Data) -> Dataset | None:
        """Return the dataset if the source holds decoded images that fit the settings, else None: decode them."""
        return None

    def train_count(self, held_out: float) -> int | None:
        """Return the number of training images, if the source has a split of its own for that fraction, else None."""
        return None

    def fill_settings(self, settings: Data) -> Data:
        """Return the settings with automatic ones filled in that the source determines."""
        return settings

    @cached_property
    def outage(self) -> Outage:
        """The waits of all threads that read from this source."""
        return Outage()

    def folder_problem(self, i: int) -> str:
        """Return why the folder of image i is not the one that the source was opened with; "" if it is."""
        return ""

    def shard_image(self, i: int) -> int:
        """Return the index by which `remote_shards` knows image i; another one where images are left out."""
        return i


@dataclass(frozen=True, eq=False)
class SecondSource:
    """A second source, and which of its images belongs to each image."""

    name: str
    kind: str
    """"image" or "mask"."""
    source: Source
    partner: NDArray[np.int64]
    """[N], index in `source` for each image; -1 without one."""
    whole: bool = True
    """False for a bucket: its masks may all have one value, as values are checked over all buckets."""

    def rows(self, index: NDArray[np.int64]) -> SecondSource:
        """Return the second source for some of the images."""
        return replace(self, partner=self.partner[index], whole=False)


class SomeImages(Source):
    """Base of a source that has some of the images of another source.

    Args:
        source: the other source.
        rows: index in `source` of each image.
        columns: columns of all images of `source`.
    """

    def __init__(self, source: Source, rows: NDArray[np.int64], columns: Mapping[str, Column]) -> None:
        self._source, self._rows = source, rows
        self.name, self.resolved, self.remote = source.name, source.resolved, source.remote
        self.remote_shards, self.outage = source.remote_shards, source.outage
        self.names = [source.names[i] for i in rows.tolist()]
        self.columns = rows_of(columns, rows)
        self.found, self.files_differ = source.found, source.files_differ
        if source.usual_image in rows:
            self.usual_image = rows.tolist().index(source.usual_image)
        if source.groups is not None:
            kept, group = np.unique(source.groups[1][rows], return_inverse=True)
            self.groups = [source.groups[0][k] for k in kept.tolist()], group

    def read(self, i: int) -> Image.Image | DeepImage | NDArray[Any]:
        return self._source.read(int(self._rows[i]))

    def folder_problem(self, i: int) -> str:
        return self._source.folder_problem(int(self._rows[i]))

    def shard_image(self, i: int) -> int:
        return self._source.shard_image(int(self._rows[i]))


class LazyNames(Sequence[str]):
    """Names that are computed on demand.

    Args:
        name_of: returns the name of image i.
        images: the images i that this sequence names.
    """

    def __init__(self, name_of: Callable[[int], str], images: range) -> None:
        self._name_of, self._images = name_of, images

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> LazyNames: ...
    def __getitem__(self, index: int | slice) -> str | LazyNames:
        if isinstance(index, slice):
            # A range of a range: a slice costs nothing either, whatever its length.
            return LazyNames(self._name_of, self._images[index])
        return self._name_of(self._images[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]
