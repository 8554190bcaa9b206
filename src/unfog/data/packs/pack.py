"""A pack: decoded images in a folder of flat files, which opens at once because the files are mapped and not parsed.

    pack.json        shape, split, settings, classes, data report, statistics, a checksum of each file
    pixels.u8        [N, C, H, W] of uint8, or of the "dtype" in settings; first the training images, then the others
    labels.npy       int64 [N], an index into the classes; absent without classes
    column-0.npy …   [N, …], column k of the others, in the order of their names; entry k of "columns" in pack.json
    names.bin        the names of the images in UTF-8; names.npy int64 [N + 1] has the offset of each
    treatment.npy    int32 [N], sides.npy int32 [N, 2], grey.npy bool [N]: see `DataReport` and `ImageSet`
    chunks.json      [row behind it, sha256] of each chunk of pixels.u8

`unfog pack` and the cache write the same format (`pack_writer`). Damaged or hostile files raise errors, are never
trusted with an allocation, and nothing in them is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import DataReport
from unfog.data.dataset import Dataset, ImageSet, PixelArray
from unfog.data.file_rows import FileRows, is_local, map_array
from unfog.data.outages import Outage
from unfog.data.settings import Data
from unfog.data.sources.base import LazyNames, OpenOptions, Source, SourceLocation
from unfog.errors import RequestError
from unfog.files.safe_files import file_digest, open_file, read_file, regular_file
from unfog.settings import AUTO, is_auto
from unfog.text import sanitize
from unfog.values.arrays.slices import AXIAL
from unfog.values.columns import CLASS, MOST_COLUMNS, Column, columns_digest, name_problem, of_labels, without_class
from unfog.values.image_format import ImageFormat, sides_of

MANIFEST, JOURNAL = "pack.json", "journal.jsonl"
FORMAT = 1
# Settings that the content of a pack depends on; the others act on its images.
PACK_SETTINGS = ("size", "channels", "background", "labels", "held_out")

_LARGEST_MANIFEST = 2**28
_LONGEST_HEADER = 2**16
_LARGE_SHARE = 4  # a pack above 1/4 of the memory is read without read-ahead, which would evict needed pages
_LABELS = "labels.npy"
# Types of the values, in the byte order of x86 and ARM.
_COLUMN_TYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
COLUMN_FILES = (_LABELS, *(f"column-{k}.npy" for k in range(MOST_COLUMNS)))
"""Every file that a column may have."""


@dataclass(frozen=True, eq=False)
class Pack:
    """An open pack. Pixels, labels and names are mapped from its files."""

    path: Path
    manifest: Mapping[str, Any]
    """The content of pack.json."""
    images: ImageSet
    """All images: first the training images, then those held out."""
    report: DataReport

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Open a pack: read its manifest and check the sizes of its files. `verify` checks their content.

        RequestError if the folder is not a pack, or a damaged one.
        """
        try:
            manifest = _read_manifest(path)
            pack = cls(path, manifest, *_open_files(path, manifest))
            pack.report.line()  # reads each field of the report, so that a damaged one fails here
        except RequestError:
            raise
        # A manifest may hold any JSON, so its use may raise nearly anything.
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = " ".join(sanitize(str(error)).split())[:200] or type(error).__name__
            raise RequestError(
                f"{sanitize(str(path))} is a damaged pack ({reason}); pack the originals again"
            ) from None
        return pack

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return True if the folder is a finished pack."""
        return (path / MANIFEST).is_file()

    @staticmethod
    def is_unfinished_at(path: Path) -> bool:
        """Return True if the folder is an unfinished pack: it has a journal with our header, or an empty one."""
        try:
            with open_file(path / JOURNAL, "rb", path) as file:
                line = file.readline(_LONGEST_HEADER)
            header = json.loads(line) if line else {"format": FORMAT, "key": "", "stamp": ""}
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(header, dict) and {"format", "key", "stamp"} <= header.keys()

    @staticmethod
    def seal(manifest: Mapping[str, Any]) -> bytes:
        """Return the content of pack.json: the manifest and its digest."""
        data = json.dumps({**manifest, "digest": _digest(manifest)}, indent=1, sort_keys=True).encode()
        if len(data) > _LARGEST_MANIFEST:
            raise RequestError(
                f"the names of its classes take {len(data) / 1e6:.0f} MB; give the classes shorter names"
            )
        return data

    @property
    def train(self) -> int:
        """Number of training images, which are the first rows of the pack."""
        return int(self.manifest["train"])

    @property
    def settings(self) -> dict[str, Any]:
        """The values of PACK_SETTINGS, and of `Data.later`, that the images were prepared with, resolved."""
        return _stored_settings(self.manifest)

    @property
    def nbytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    def resolve_settings(self, settings: Data) -> Data:
        """Return the settings with those of the pack in place.

        Their `labels` are kept unless automatic, and so is the `range` that a map of floating point takes to -1 and 1.
        """
        labels = self.settings["labels"] if is_auto(settings, "labels") else settings.labels
        given = str(self.settings["dtype"]).startswith("float") and not is_auto(settings, "range")
        return replace(settings, **self.settings | {"labels": labels} | ({"range": settings.range} if given else {}))

    def dataset(self, settings: Data, source: str) -> Dataset:
        """Return the pack's images as a dataset, decoding nothing. The settings must fit; `source` is its name."""
        report, (train, held_out) = replace(self.report, source=source), self.manifest["fingerprints"]
        return Dataset.split(self.images, self.train, self.resolve_settings(settings), report, (train, held_out))

    @classmethod
    def verify(cls, path: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read all of a pack and compare checksums. Return a line for each damage, [] for none.

        `progress` is called with (bytes done, bytes in all). RequestError if it is not a pack, or cannot be opened.
        """
        pack, problems, done = cls.open(path), list[str](), 0
        try:
            for name, file in pack.manifest["files"].items():
                if name != "pixels.u8" and file_digest(path / name, path) != file["sha256"]:
                    problems.append(f"{name} is not as it was written")
            per_image, begin = pack.images.image_bytes, 0
            # In chunks, so that the message can say which images are damaged; the chunks' own file must be whole.
            chunks = json.loads(read_file(path / "chunks.json", path, _LARGEST_MANIFEST)) if not problems else []
            with open_file(path / "pixels.u8", "rb", path) as file:
                for end, expected in chunks:
                    if hashlib.sha256(file.read((end - begin) * per_image)).hexdigest() != expected:
                        problems.append(f"pixels.u8 is damaged at images {begin:,} to {end - 1:,}")
                    done, begin = end * per_image, end
                    if progress:
                        progress(done, pack.nbytes)
        except (OSError, ValueError, TypeError) as error:
            problems.append(f"it cannot be read: {error}")
        return problems

    def sample_is_whole(self, most: int) -> bool:
        """Compare the checksums of chunks of pixels drawn at random: one, and others up to `most` bytes in all."""
        size, begin, spans = self.images.image_bytes, 0, list[tuple[int, int, str]]()
        try:
            if file_digest(self.path / "chunks.json", self.path) != self.manifest["files"]["chunks.json"]["sha256"]:
                return False
            for end, expected in json.loads(read_file(self.path / "chunks.json", self.path, _LARGEST_MANIFEST)):
                spans.append((begin * size, end * size, expected))
                begin = end
            with open_file(self.path / "pixels.u8", "rb", self.path) as file:
                # From the system's generator, as the draws of training are those of its seed.
                for start, stop, expected in SystemRandom().sample(spans, len(spans)):
                    file.seek(start)
                    if hashlib.sha256(file.read(stop - start)).hexdigest() != expected:
                        return False
                    if (most := most - (stop - start)) <= 0:
                        break
        except (OSError, ValueError, TypeError):
            return False
        return True


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, indent=1, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read pack.json and check it. Raises RequestError, ValueError and others if it is damaged."""
    file = path / MANIFEST
    if not file.is_file():
        raise RequestError(
            f"{sanitize(str(path))} is not a pack: it has no {MANIFEST}; make one with unfog pack SOURCE OUT"
        )
    manifest = json.loads(read_file(file, path, _LARGEST_MANIFEST))
    if manifest.get("format") != FORMAT:
        raise RequestError(
            f"{sanitize(str(path))} is a pack of format {str(manifest.get('format'))[:20]}, and this Unfog reads "
            f"format {FORMAT}; pack the originals again"
        )
    content = {name: value for name, value in manifest.items() if name != "digest"}
    if manifest.get("digest") != _digest(content):
        raise ValueError(f"{MANIFEST} is not as it was written")
    _check_manifest(manifest)
    return content | {"digest": manifest["digest"]}


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, or another error, unless the entries have their types and fit together."""
    shape, train, classes = manifest["shape"], manifest["train"], manifest["classes"]
    labelled, fingerprints = manifest["labelled"], manifest["fingerprints"]
    valid = len(shape) == 4 and all(type(side) is int and 0 < side < 2**48 for side in shape)
    valid = valid and type(train) is int and 0 <= train <= shape[0]
    valid = valid and type(classes) is list and all(type(name) is str for name in classes)
    valid = valid and type(labelled) is bool and labelled == bool(classes)
    if not (valid and len(fingerprints) == 2 and all(type(text) is str for text in fingerprints)):
        raise ValueError("shape, split or classes are invalid")
    settings = _stored_settings(manifest)
    format = Data(**settings).image_format  # raises RequestError for values out of range
    _, channels, background, labels, held_out, *_ = settings.values()
    # By type(), as True and 1.0 equal 1, too.
    typed = type(channels) is int and type(background) is str and type(held_out) in (int, float)
    if not typed or list(format.shape) != shape[1:]:
        raise ValueError("its settings are not those of its pixels")
    if labels not in ("folders", "none"):
        raise ValueError("its labels are not resolved")


def _stored_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    stored = manifest["settings"]
    return {name: stored[name] for name in PACK_SETTINGS} | Data.later_of(stored)


def _open_files(path: Path, manifest: Mapping[str, Any]) -> tuple[ImageSet, DataReport]:
    """Map images and report. Raises ValueError and others unless all files fit the manifest."""
    n, files = manifest["shape"][0], manifest["files"]
    for name, file in files.items():
        # A name with a slash would lead out of the folder.
        if type(file["sha256"]) is not str or (path / name).name != name or name in ("", ".", ".."):
            raise ValueError(f"no file {name!r}")
        if (found := (path / name).stat().st_size) != file["bytes"]:
            raise ValueError(f"{name} has {found:,} bytes instead of {file['bytes']:,}")
    format = Data(**_stored_settings(manifest)).image_format
    if files["pixels.u8"]["bytes"] != n * format.nbytes:
        raise ValueError("pixels.u8 does not have that shape")
    offsets = mapped(path / "names.npy", (n + 1,), np.int64)
    size, names = files["names.bin"]["bytes"], path / "names.bin"
    if size and is_local(names):
        text: NDArray[np.uint8] = np.memmap(regular_file(names, path), np.uint8, "r")
    else:
        text = np.fromfile(regular_file(names, path), np.uint8)
    # The ends are enough here: `_name_at` bounds each name, and a check of all would read the whole file.
    if offsets[0] != 0 or offsets[-1] != size:
        raise ValueError("names.npy does not fit names.bin")
    images = ImageSet(
        _mapped_pixels(path / "pixels.u8", tuple(manifest["shape"]), format.dtype),
        LazyNames(partial(_name_at, np.asarray(text), offsets), range(n)),
        open_columns(path, manifest),
        sides=mapped(path / "sides.npy", (n, 2), np.int32),
        grey=mapped(path / "grey.npy", (n,), np.bool_),
    )
    report = DataReport.from_dict({**manifest["ledger"], "treatment": mapped(path / "treatment.npy", (n,), np.int32)})
    if report.used != n or report.held_out != n - manifest["train"] or sum(report.counts) != n:
        raise ValueError("its report is not of these images")
    return images, report


def _name_at(text: NDArray[np.uint8], offsets: NDArray[np.int64], i: int) -> str:
    begin, end = offsets[i : i + 2].tolist()
    # Negative offsets, in a damaged file, would count from the end.
    return text[max(0, begin) : max(0, end)].tobytes().decode("utf-8", "surrogateescape")


def _mapped_pixels(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PixelArray:
    if not is_local(path):
        return FileRows(regular_file(path, path.parent), path.parent, dtype, shape, waits=Outage())
    # Not by np.memmap, which keeps the map that madvise needs to itself.
    with open_file(path, "rb", path.parent) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM") and len(mapped) * _LARGE_SHARE > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        # Images are read in a shuffled order, so that what lies behind one is not what is wanted next.
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype).reshape(shape)


def column_arrays(columns: Mapping[str, Column]) -> dict[str, NDArray[Any]]:
    """Return file name -> array to write."""
    arrays = {_LABELS: columns[CLASS].values.astype(np.int64)} if CLASS in columns else {}
    return arrays | {f"column-{k}.npy": column.values for k, column in enumerate(without_class(columns).values())}


def column_facts(columns: Mapping[str, Column], of_source: Mapping[str, Column]) -> dict[str, Any]:
    """Return the entries of the manifest for the columns but that of the labels; {} without any.

    `of_source` are the columns of all images of the source, by which a later call knows whether they have changed.
    """
    facts = [
        {
            "name": column.name,
            "kind": column.kind,
            "categories": list(column.categories),
            "dtype": column.values.dtype.str,
            "shape": list(column.values.shape[1:]),
        }
        for column in without_class(columns).values()
    ]
    return {"columns": facts, "columns_digest": columns_digest(of_source)} if facts else {}


def open_columns(path: Path, manifest: Mapping[str, Any]) -> dict[str, Column]:
    """Map the columns of a pack. Raises ValueError, RequestError and others unless all files fit the manifest."""
    n = manifest["shape"][0]
    labels = mapped(path / _LABELS, (n,), np.int64) if manifest["labelled"] else None
    columns = of_labels(labels, tuple(manifest["classes"]))
    for k, facts in enumerate(_checked_facts(manifest.get("columns", []))):
        values = mapped(path / f"column-{k}.npy", (n, *facts["shape"]), np.dtype(facts["dtype"]))
        categories = tuple(map(sanitize, facts["categories"]))
        columns[facts["name"]] = Column(facts["name"], facts["kind"], values, categories)
    return columns


def _checked_facts(facts: Any) -> list[dict[str, Any]]:
    """Return the entries of the manifest unchanged. ValueError unless each is one that `column_facts` writes."""
    if type(facts) is not list or len(facts) > MOST_COLUMNS:
        raise ValueError(f"more than {MOST_COLUMNS:,} columns, or no list of them")
    for one in facts:
        match one:
            case {"name": str(), "kind": str(), "dtype": str(dtype), "categories": list(named), "shape": list(sides)}:
                valid = dtype in _COLUMN_TYPES and all(isinstance(name, str) for name in named)
                valid = valid and all(type(side) is int and 0 < side < 2**48 for side in sides)
            case _:
                valid = False
        if not valid:
            raise ValueError("a column is not described by name, kind, dtype, categories and shape")
        if problem := name_problem(one["name"], one["kind"]):
            raise ValueError(f"a column {one['name'][:100]!r}: {problem}")
    names = [one["name"] for one in facts]
    if CLASS in names or names != sorted(set(names)):
        raise ValueError("its columns are not in the order of their names")
    return facts


def mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return the array in a file of a pack. ValueError if it has another shape or type; OSError if it is not there."""
    # Mapping reads the header alone, and fails for a file that is shorter than its header says.
    file = regular_file(path, path.parent)
    array = map_array(file)
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} holds something else")
    # All but the pixels take a few bytes an image, so that they are read whole where mapping is not safe.
    return np.asarray(array if is_local(path) else np.load(file, allow_pickle=False))


class PackSource(Source):
    """A pack as a source, for settings other than its own: its images are resized anew."""

    has_volumes = True

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
        if settings.slices not in (AXIAL, packed["slices"]):
            raise RequestError(
                f"data.slices = {settings.slices}, but {sanitize(self.name)} holds slices that are {packed['slices']}; "
                "pack the originals again, or omit it"
            )
        fitting = {"size": (size,), "channels": (packed["channels"],), "labels": ("none", packed["labels"])}
        fits = all(is_auto(settings, name) or getattr(settings, name) in values for name, values in fitting.items())
        fits = fits and (settings.requested_dtype or settings.dtype) in (AUTO, Data(**packed).stored_values.dtype)
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
