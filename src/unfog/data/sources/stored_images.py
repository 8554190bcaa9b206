"""Images given from Python, stored in the cache as a file that a run and its resume read."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import DeepImage, Ranges, ValueRange, extent_of
from unfog.data.cache import remove_stale_entries
from unfog.data.data_report import SkippedFile
from unfog.data.sources.arrays import ArraySource, free_memory
from unfog.data.sources.base import SourceLocation
from unfog.data.sources.image_files import open_bytes
from unfog.data.sources.image_objects import (
    ImageItems,
    Storing,
    as_array,
    cut_or_range,
    encode_image,
    find_float_range,
    float_range,
    is_array,
)
from unfog.data.sources.zip_archive import ZipSource
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, hold, make_room
from unfog.files.safe_files import move, open_file, remove
from unfog.text import sanitize
from unfog.values.arrays.axes import USUAL, channel_axis
from unfog.values.arrays.dimensions import LATITUDES, arranged, layout_of

_LABELS, _VALUES = "labels.json", "conditions.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # so that the same images make the same file
_CHUNK = 1024  # images that are converted at a time
_NAMED = 5  # images that a message names
USUAL_STORING = Storing()


class Report(NamedTuple):
    """Functions that are called while images are stored."""

    say: Callable[[str], None] = lambda line: None
    """With a line on how the images were understood."""
    progress: Callable[[int, int | None], None] = lambda done, total: None
    """With the number of images stored, and of all where that is known. It may raise to stop."""


class StoredImages(ZipSource):
    """Images that `store` wrote: a zip archive with the classes in labels.json, and other values in conditions.json."""

    suffixes = (".images",)
    tables_inside = False

    def __init__(self, location: SourceLocation) -> None:
        self._stored: dict[str, zipfile.ZipInfo] = {}
        super().__init__(location)
        if _LABELS in self._stored:
            self._read_labels(self._stored[_LABELS])
            self.label_column = "label"

    def read(self, i: int) -> Image.Image | NDArray[Any]:
        image = self.open(i)
        return image.values if isinstance(image, DeepImage) else image

    def open(self, i: int) -> Image.Image | DeepImage:
        name = self.names[i]
        data = self._content(self._members[name])
        return DeepImage.from_npy(data) if data.startswith(MAGIC_PREFIX) else open_bytes(data, name)

    @staticmethod
    def store(
        source: Any,
        labels: Any = None,
        report: Report | None = None,
        storing: Storing = USUAL_STORING,
        conditions: Mapping[str, Any] | None = None,
        wanted: Sequence[str] = (),
    ) -> Path:
        """Write images given as objects into the cache, once, and return the path of the file, which is a SOURCE.

        The name of the file is a digest of the images and labels, so that the same list is the same file. Images are
        gone through once and written one by one, so that they need not fit into memory.

        Args:
            source: an array or tensor of all images, or what `ImageItems.read` takes.
            labels: a whole number or a text for each image, where the source has none itself.
            report: functions to call meanwhile.
            storing: how arrays are stored.
            conditions: a number, text, list or vector for each image, by name.
            wanted: names of such values that the images may come with, such as columns of a dataset.

        Raises:
            RequestError: an item is not an image, or there are no items; the labels do not fit; the cache cannot be
                written.
        """
        report = report or Report()
        source = _plain_source(source)
        if type(source).__module__.partition(".")[0] == "xarray":
            source, storing = _from_xarray(source, storing, report)
        _check_memory(source)
        if is_array(source):
            first = hasattr(source, "detach")
            pixels = _without_floats(as_array(source), first, report, storing)
            return ArraySource.store(pixels, labels, report.say, first, storing.axes, conditions)
        beside = {name: plain_values(values, name) for name, values in (conditions or {}).items()}
        items = ImageItems.read(source, [name for name in wanted if name not in beside])
        return _into_cache(lambda partial: _write(partial, items, labels, beside, report, storing))

    def _read_labels(self, info: zipfile.ZipInfo) -> None:
        try:
            stored = json.loads(self._read_table(info))
            self.classes, labels = tuple(stored["classes"]), np.asarray(stored["labels"])
            # None of its values is trusted, as the file may be somebody else's.
            whole = labels.dtype.kind == "i" and all(type(name) is str for name in self.classes)
            if labels.shape != (len(self.names),) or not whole:
                raise ValueError("its labels are not of its images")
        except Exception as error:  # any JSON is possible
            raise RequestError(f"{sanitize(self.name)} is damaged: {error}; give the images again") from None
        self.labels = labels.astype(np.int64)

    def value_names(self) -> Sequence[str]:
        return [*self._values(), *filter(None, [self.label_column])]

    def values_of(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        values, found = self._values(), dict[str, Sequence[Any]]()
        for name in names:
            if name in values:
                found[name] = values[name]
            elif name == self.label_column and self.labels is not None:
                found[name] = [self.classes[label] for label in self.labels.tolist()]
        return found

    def _values(self) -> dict[str, list[Any]]:
        """Return the stored values by name. RequestError if they are not of the images."""
        if _VALUES not in self._stored:
            return {}
        try:
            stored = dict(json.loads(self._read_table(self._stored[_VALUES])))
            if not all(isinstance(values, list) and len(values) == len(self.names) for values in stored.values()):
                raise ValueError("its conditions are not of its images")
        except Exception as error:  # any JSON is possible
            raise RequestError(f"{sanitize(self.name)} is damaged: {error}; give the images again") from None
        return stored

    def _leave_out_own(self, directory: list[zipfile.ZipInfo], ignored: Counter[str]) -> None:
        """Leave all in: these images were chosen one by one."""

    def _add(self, info: zipfile.ZipInfo, ignored: Counter[str], unreadable: list[SkippedFile]) -> None:
        if info.filename in (_LABELS, _VALUES):
            self._stored[info.filename] = info
        else:
            super()._add(info, ignored, unreadable)


def _plain_source(source: Any) -> Any:
    """Return a table of pandas or polars as its columns, an array of objects or texts as a list, others unchanged."""
    if type(source).__module__.partition(".")[0] in ("pandas", "polars"):
        if hasattr(source, "columns"):
            return {str(name): list(source[name]) for name in source.columns}
        source = list(source)
    if isinstance(source, np.ndarray) and source.dtype.kind in "OUT":
        return list(source)
    return source


def _check_memory(array: Any) -> None:
    """Raise RequestError if an array that is computed when it is read, as by Dask, does not fit into memory."""
    if isinstance(array, np.ndarray) or hasattr(array, "detach"):
        return
    nbytes, free = getattr(array, "nbytes", 0), free_memory()
    if free is None or not isinstance(nbytes, int) or nbytes <= free / 2:
        return
    raise RequestError(
        f"the {type(array).__name__} has {nbytes / 1e9:,.1f} GB, over half of the {free / 1e9:,.1f} GB of memory that "
        "are free; give its file, which is read by parts: FILE.nc:VARIABLE, FILE.zarr:VARIABLE or FILE.npy"
    )


def _from_xarray(array: Any, storing: Storing, report: Report) -> tuple[NDArray[Any], Storing]:
    """Return an xarray.DataArray as [N, H, W, C] if the names of its dimensions show these, and how it is stored then.

    Latitudes that go from south to north are reported. RequestError if it is a Dataset, has four dimensions of unknown
    names, or does not fit into memory.
    """
    if hasattr(array, "data_vars"):
        names = ", ".join(sanitize(str(name)) for name in list(array.data_vars)[:8]) or "none"
        raise RequestError(
            f"an xarray.Dataset has variables: {names}; give one of them: dataset['NAME'], "
            "or all as channels: dataset.to_array('variable')"
        )
    _check_memory(array)
    layout = layout_of([str(name) for name in array.dims]) if storing.axes == "auto" else None
    values = as_array(array)
    if layout is not None:
        rows = array.dims[layout.row]
        places = np.asarray(array.coords[rows]) if rows in array.coords else np.zeros(0)
        if str(rows).lower() in LATITUDES and places.ndim == 1 and len(places) > 1 and places[0] < places[-1]:
            report.say(
                f"  {sanitize(str(rows))} goes from south to north, so that north is below in views; turn it: "
                f"array.sortby({str(rows)!r}, ascending=False)"
            )
        return arranged(values, layout), storing._replace(axes="NHWC")
    if storing.axes == "auto" and values.ndim > 3:
        raise RequestError(
            f"the DataArray has the dimensions {sanitize(', '.join(map(str, array.dims)))}, of which the names do not "
            "show images, rows, columns and channels; rename them to time, y, x and channel, or give "
            "data={'axes': 'NCHW'} or 'NHWC'"
        )
    return values, storing


def _without_floats(array: NDArray[Any], channels_first: bool, report: Report, storing: Storing) -> NDArray[Any]:
    """Return an array of floating point as uint8, and others unchanged. RequestError names images out of range.

    Values that are kept are unchanged: those without a usual range, and those of other channels than pictures have.
    """
    if array.dtype.kind != "f" or array.ndim < 3 or not array.size or storing.keeps:
        return array
    axis = channel_axis(array.shape[1:], channels_first, storing.axes) if array.ndim == 4 else None
    if array.ndim == 4 and (axis is None or array.shape[1 + axis] not in USUAL):
        return array
    extents = [extent_of(image[..., None]) for image in array]
    try:
        floats = float_range(extents, "the array", storing.range)
    except RequestError:
        if not storing.may_keep:
            raise
        return array
    low, high = f"{floats.low:g}", f"{floats.high:g}"
    if broken := [i for i, extent in enumerate(extents) if extent is None]:
        raise RequestError(
            f"{_named(broken)} of the array hold NaN or infinity; leave them out: "
            f"x = x[np.isfinite(x).all({tuple(range(1, array.ndim))})], or replace those values: "
            f"x = np.nan_to_num(x, nan={low}, posinf={high}, neginf={low}); if NaN is an unknown "
            "pixel: data={'unknown': 'nan'}"
        )
    if beyond := {i: extent for i, extent in enumerate(extents) if extent is not None and not floats.holds(extent)}:
        widest = min(low for low, _ in beyond.values()), max(high for _, high in beyond.values())
        raise RequestError(
            f"{_named(list(beyond))} of the array have values beyond {low} to {high}, the range of the others; leave "
            f"them out, or {cut_or_range(floats, widest)}"
        )
    report.say(_float_line(floats))
    # The channels, of which the last may be transparency, are the last axis meanwhile.
    turned = axis == 0
    last, ranges = np.moveaxis(array, 1, -1) if turned else array, Ranges(floats=floats)
    parts = [_scaled(last[i : i + _CHUNK], ranges) for i in range(0, len(array), _CHUNK)]
    pixels: NDArray[Any] = np.concatenate(parts)
    return np.moveaxis(pixels, -1, 1) if turned else pixels


def _scaled(images: NDArray[Any], ranges: Ranges) -> NDArray[np.uint8]:
    """Return images, [N, H, W] or [N, H, W, C], as 0 to 255."""
    if images.ndim == 4 and images.shape[3] == 4:
        return np.stack([ranges.to_uint8(image) for image in images])
    return ranges.to_uint8(images[..., None])[..., 0]


def _float_line(floats: ValueRange) -> str:
    low, high = f"{floats.low:g}", f"{floats.high:g}"
    kept = "data={'dtype': 'float32'} keeps them"
    return f"  images of floating point, from {low} to {high}, are stored as uint8, from 0 to 255 ({kept})"


def _named(images: Sequence[int]) -> str:
    """Name images by their numbers: "images 3, 7, ... (12 in all)"."""
    more = f", ... ({len(images):,} in all)" if len(images) > _NAMED else ""
    return f"images {', '.join(map(str, images[:_NAMED]))}{more}"


def _into_cache(write: Callable[[Path], str]) -> Path:
    """Return the file in the cache that `write` writes to the path it is given; it returns the digest of the content.

    RequestError if the cache cannot be written.
    """
    folder = cache_folder()
    partial = folder / f"images-{os.getpid()}-{time.time_ns()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_entries(folder)
        try:
            path = folder / f"images-{write(partial)}.images"
            hold(path)
            # The name is a digest of the content: one that is there is the same file.
            if not path.exists():
                move(partial, path, folder)
        finally:
            with suppress(OSError):
                remove(partial, folder)
        make_room()
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({error.strerror}); set UNFOG_CACHE to another") from None
    return path


def _write(
    partial: Path, source: ImageItems, labels: Any, beside: Mapping[str, list[Any]], report: Report, storing: Storing
) -> str:
    """Write the archive, and return the digest of images, labels and the values beside them."""
    given = None if labels is None else [_plain_label(label, i) for i, label in enumerate(labels)]
    found: list[int | str | None] = []
    columns: dict[str, list[Any]] = {name: [] for name in source.columns}
    digest = hashlib.sha256()
    # Stored without compression, as PNGs are compressed already.
    with open_file(partial, "xb", partial.parent) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        if source.unused:
            report.say(f"  {source.unused}")
        floats, items, storing = find_float_range(source.items, storing)
        if floats is not None:
            report.say(_float_line(floats))
        for i, (image, label, values) in enumerate(items):
            content = encode_image(image, i, floats, storing)
            for name, value in zip(columns, values):
                columns[name].append(plain_value(value, name))
            digest.update(hashlib.sha256(content).digest())
            archive.writestr(zipfile.ZipInfo(f"{i:08}.png", _EPOCH), content)
            found.append(_plain_label(label, i))
            report.progress(i + 1, source.count)
        if not found:
            raise RequestError(f"the {source.kind} has no images; give at least one")
        classes, index = _index_labels(_chosen(found, given), source.classes)
        if index is not None:
            stored = json.dumps({"classes": classes, "labels": index}).encode()
            digest.update(stored)
            archive.writestr(zipfile.ZipInfo(_LABELS, _EPOCH), stored)
        if columns := columns | dict(beside):
            _check_counts(columns, len(found))
            stored = json.dumps(columns).encode()
            digest.update(stored)
            archive.writestr(zipfile.ZipInfo(_VALUES, _EPOCH), stored)
        archive.close()
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file under the name
    return digest.hexdigest()[:32]


def _chosen(found: list[int | str | None], given: list[int | str | None] | None) -> list[int | str | None]:
    """Return the labels that came with the images, or those given beside them. RequestError if they do not fit."""
    if given is None:
        return found
    if any(label is not None for label in found):
        raise RequestError("labels are given, and the images have labels of their own; give one of them")
    if len(given) != len(found):
        raise RequestError(f"there are {len(found):,} images and {len(given):,} labels; give one for each image")
    return given


def plain_values(values: Any, name: str) -> list[Any]:
    """Return a condition as a list of values of JSON, one for each image. RequestError if it cannot be one."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise RequestError(
            f"the condition {name} is of type {type(values).__name__}; give a list or array with a value for each image"
        )
    values = as_array(values) if is_array(values) else values
    return [plain_value(value, name) for value in values]


def plain_value(value: Any, name: str) -> Any:
    """Return the value of an image as JSON has it: a text, a number, or a list of them; None if it is not known."""
    if is_array(value):
        value = as_array(value).tolist()
    if type(value).__name__ in ("NAType", "NaTType"):  # missing values of pandas
        return None
    try:
        if isinstance(value, set | frozenset):
            value = sorted(value)
        json.dumps(value)
    except (TypeError, ValueError):
        raise RequestError(
            f"the condition {name} holds a {type(value).__name__}; give numbers, texts, or lists of them"
        ) from None
    return value


def _check_counts(columns: Mapping[str, list[Any]], count: int) -> None:
    for name, values in columns.items():
        if len(values) != count:
            raise RequestError(
                f"the condition {name} has {len(values):,} values, and there are {count:,} images; give one for each"
            )


def _plain_label(label: Any, i: int) -> int | str | None:
    """Return a label as a whole number or a text, None without one. RequestError if it is something else.

    An empty text is not a label, as in a table.
    """
    if label is None or isinstance(label, str):
        return label if label is not None and label.strip() else None
    values = as_array(label)
    if values.size == 1 and values.dtype.kind in "iub":
        return int(values.reshape(()))
    if values.size == 1 and values.dtype.kind == "f" and float(values.reshape(())).is_integer():
        return int(values.reshape(()))
    if values.size == 1 and values.dtype.kind == "U":
        return _plain_label(str(values.reshape(())), i)
    found = f"{values.dtype} of shape {values.shape}" if values.dtype.kind in "iubf" else type(label).__name__
    raise RequestError(f"the label of image {i:,} is {found}; give a whole number or a text for each image, or none")


def _index_labels(labels: Sequence[int | str | None], names: Sequence[str]) -> tuple[tuple[str, ...], list[int] | None]:
    """Return (classes, the class of each image), or ((), None) if no image has a label.

    `names` are those of the classes that whole numbers stand for, where they are known. RequestError if some images
    have a label and others none.
    """
    if all(label is None for label in labels):
        return (), None
    if None in labels:
        without = labels.index(None)
        raise RequestError(f"image {without:,} has no label, and others have one; give a label for each image, or none")
    present = set(labels)
    numbers = [label for label in present if isinstance(label, int)]
    # Numbers and texts mixed: all are taken as texts, which have an order among themselves.
    if len(numbers) < len(present):
        order = sorted({str(label) for label in present})
    elif names and 0 <= min(numbers) <= max(numbers) < len(names):
        order = list(names)
        labels = [names[label] for label in labels if isinstance(label, int)]
    else:
        order = [str(number) for number in sorted(numbers)]
    position = {name: i for i, name in enumerate(order)}
    return tuple(order), [position[str(label)] for label in labels]
