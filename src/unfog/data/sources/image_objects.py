"""Images given as Python objects: how lists, datasets and generators give them, and what each becomes in storage.

An item is an image, a pair (image, label), or a dictionary of both. An image is a PIL image, an array or tensor, the
path of a file, or the bytes of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import (
    FLOAT_RANGES,
    Extent,
    OutOfRangeError,
    Ranges,
    ValueRange,
    extent_of,
    has_usual_channels,
    usual_or_outward,
)
from unfog.data.settings import Data
from unfog.data.sources.image_files import has_image_signature
from unfog.errors import RequestError
from unfog.values.arrays.axes import channel_axis
from unfog.values.image_format import to_pillow

_IMAGE_KEYS = (
    *("image", "images", "img", "pixel_values", "picture", "x", "png", "jpg"),
    *("path", "file", "file_name", "filename", "filepath"),
)
_LABEL_KEYS = ("label", "labels", "class", "target", "fine_label", "y", "cls")
# Pillow's modes that are stored as they are, and those that are converted first, without loss.
_PNG_MODES = frozenset(["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
_TIFF_MODES = frozenset(["CMYK", "F", "I", "YCbCr", "LAB"])
_CONVERTED_MODES = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "RGBX": "RGB", "HSV": "RGB"}
_LOOKED_AT = 32  # images that the range of floating-point values is read from


class _Item(NamedTuple):
    """An image as it was given, and its label, None without one."""

    image: Any
    label: Any
    """None without one."""
    values: tuple[Any, ...] = ()
    """Its values of the columns that are asked for."""


@dataclass(frozen=True)
class ImageItems:
    """Images of a list, dataset or generator, to be gone through once."""

    items: Iterator[_Item]
    kind: str
    """The object in messages: "list", "CIFAR10"."""
    count: int | None = None
    """Number of images, where that is known before."""
    classes: tuple[str, ...] = ()
    """Names of the classes that whole numbers stand for; () if the labels are names, or nothing names them."""
    unused: str = ""
    """A line on columns that are not used and may be labels; "" for nothing to say."""
    columns: tuple[str, ...] = ()
    """Names of the values of each item."""

    @classmethod
    def read(cls, source: Any, wanted: Sequence[str] = ()) -> ImageItems:
        """Return the images of a list, a torch or Hugging Face dataset, an iterable, or a generator.

        `wanted` names values beside the images, which become conditions: columns of a table or dataset, or keys of
        items that are dictionaries. Labels that are a condition are left out of the classes. Raises RequestError if the
        object is of another kind.
        """
        kind = type(source).__name__
        if isinstance(source, Image.Image):
            raise RequestError("a single image was given, and training needs many; give a list of images")
        if isinstance(source, Mapping):
            return _read_mapping(source, kind, wanted)
        if type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "features"):
            from unfog.data.sources.huggingface import HuggingFaceSource

            if (stored := HuggingFaceSource.items_of(source, wanted)) is not None:
                images, labels, classes, values = stored
                beside = _rows(list(values.values()))
                return cls(map(_Item, images, labels, beside), kind, len(source), classes, columns=tuple(values))
        if isinstance(source, Iterable) and not isinstance(source, bytes):
            items = iter(source)
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, bytes):
            # Through indices, as a torch dataset need not end an iteration by itself.
            items = (source[i] for i in range(len(source)))
        else:
            remedy = "call it, and give what it returns" if callable(source) else "give a folder, or a list of images"
            raise RequestError(f"source is of type {kind}, which gives no images; {remedy}")
        named = _named_items(items, kind)
        first = list(islice(named, 1))
        columns = tuple(name for name in wanted if any(isinstance(one, Mapping) and name in one for one in first))
        pairs = (_split(item, columns) for item in chain(first, named))
        rows = [item for item in first if isinstance(item, Mapping) and _first_value(item, _LABEL_KEYS) is None]
        others = [repr(key) for row in rows for key in row if key not in (*_IMAGE_KEYS, *_LABEL_KEYS, *columns)]
        return cls(pairs, kind, _length(source), _class_names(source), _describe_unused(others), columns)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _read_mapping(source: Mapping[Any, Any], kind: str, wanted: Sequence[str]) -> ImageItems:
    """Return the images of columns such as {"image": […], "label": […]}; refuse splits, of which one must be chosen."""
    columns = tuple(name for name in wanted if name in source)
    images, labels = _first_value(source, _IMAGE_KEYS), _first_value(source, _without(_LABEL_KEYS, columns))
    if images is None:
        names = ", ".join(repr(key) for key in list(source)[:5])
        raise RequestError(
            f"a {kind} of {names} has no column of images; give one of its values, such as its training set"
        )
    known = (*_IMAGE_KEYS, *_LABEL_KEYS, *columns)
    others = [repr(key) for key in source if key not in known] if labels is None else []
    labels = [None] * len(images) if labels is None else labels
    for name, values in [("labels", labels), *((f"values of {name}", source[name]) for name in columns)]:
        if len(images) != len(values):
            raise RequestError(f"there are {len(images):,} images and {len(values):,} {name}; give one for each image")
    rows = _rows([source[name] for name in columns])
    unused = _describe_unused(others)
    return ImageItems(map(_Item, images, labels, rows), kind, len(images), unused=unused, columns=columns)


def _describe_unused(columns: Sequence[str]) -> str:
    if not columns:
        return ""
    labels = f"labels are in a column called {' or '.join(_LABEL_KEYS[:2])}"
    return f"not used: {', '.join(columns[:5])}; {labels}, and condition={columns[0]} makes that one a condition"


def _named_items(items: Iterator[Any], kind: str) -> Iterator[Any]:
    """Go through somebody's iterator; an error of it becomes a RequestError that names the image."""
    i = 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise RequestError(f"image {i:,} of the {kind} cannot be read: {type(error).__name__}: {error}") from error
        yield item
        i += 1


def _rows(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Return the values of each item; without columns, an endless series of ()."""
    return zip(*columns) if columns else repeat(())


def _without(keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the keys but those that are conditions."""
    return [key for key in keys if key not in columns]


def _split(item: Any, columns: Sequence[str]) -> _Item:
    if isinstance(item, Mapping):
        label = _first_value(item, _without(_LABEL_KEYS, columns))
        return _Item(_first_value(item, _IMAGE_KEYS), label, tuple(item.get(name) for name in columns))
    if isinstance(item, tuple | list) and item:
        return _Item(item[0], item[1] if len(item) > 1 else None)
    return _Item(item, None)


def _first_value(item: Mapping[Any, Any], keys: Sequence[str]) -> Any:
    return next((item[key] for key in keys if key in item), None)


def _class_names(source: Any) -> tuple[str, ...]:
    """Return the names of classes that a dataset has in `classes`, also one that it is a part of; () without."""
    # A part of a part of a data set, but not for ever: an object may name itself.
    for _ in range(8):
        names = getattr(source, "classes", None)
        if isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(name, str) for name in names):
            return tuple(names) if len(set(names)) == len(names) else ()
        source = getattr(source, "dataset", None)
    return ()


def is_array(values: Any) -> bool:
    """Return True for an array or tensor of any package that has the protocol of NumPy or DLPack."""
    return hasattr(values, "__array__") or hasattr(values, "__dlpack__")


def as_array(values: Any) -> NDArray[Any]:
    """Return a tensor, or what NumPy makes an array of, as an array. Masked values become NaN.

    RequestError if an array cannot be read from here, as one on a GPU of another package than torch.
    """
    # A tensor is recognised by its method, as importing torch would take seconds.
    if hasattr(values, "detach"):
        values = values.detach().cpu().to_dense()
        # NumPy has no bfloat16.
        values = (values.float() if values.dtype.is_floating_point else values).numpy()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values) and values.dtype.kind in "iuf":
        # Integers of 16 bits become float32, and longer ones float64.
        return np.ma.filled(values.astype(np.result_type(values.dtype, np.float32)), np.nan)
    try:
        array = np.from_dlpack(values) if not hasattr(values, "__array__") and is_array(values) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        if not is_array(values):
            raise
        raise RequestError(
            f"the {type(values).__name__} cannot be read as an array of NumPy: {error}; copy it to the memory of the "
            "host first"
        ) from error
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


class Storing(NamedTuple):
    """Settings of storing images that are given as arrays."""

    range: tuple[float, ...] = ()
    """`data.range`; () for the range that most images of floating point have."""
    axes: str = "auto"
    """`data.axes`."""
    keeps: bool = False
    """Values are stored as they are, as `data.dtype` or `data.map` asks; else floating point becomes 8 bits."""
    may_keep: bool = False
    """Values without a usual range are stored as they are."""

    @classmethod
    def of(cls, data: Data) -> Storing:
        """Return the settings of storing for a run."""
        return cls(data.range, data.axes, data.asks_to_keep, data.may_keep)


def find_float_range(items: Iterator[_Item], storing: Storing) -> tuple[ValueRange | None, Iterator[_Item], Storing]:
    """Return the range of the first images, None without images of floating point; all items; and how to store them.

    `storing.range` decides where it is given. RequestError if most images have another range than one that images have,
    and such values are not to be kept.
    """
    if storing.keeps:
        return None, items, storing
    first = list(islice(items, _LOOKED_AT))
    arrays = [
        as_array(item.image) for item in first if is_array(item.image) and not isinstance(item.image, Image.Image)
    ]
    floats = [array for array in arrays if array.dtype.kind == "f" and array.size]
    subject = "image 0" if len(first) == 1 else f"one of the first {len(first)} images"
    found = None
    try:
        found = float_range(map(extent_of, floats), subject, storing.range) if floats else None
    except RequestError:
        if not storing.may_keep:
            raise
        storing = storing._replace(keeps=True)
    return found, chain(first, items), storing


def float_range(extents: Iterable[Extent | None], subject: str, setting: Sequence[float] = ()) -> ValueRange:
    """Return the range of images of floating point by their extents, or by `data.range`. Raises as above."""
    if setting:
        return ValueRange(*setting[-2:])
    finite = [extent for extent in extents if extent is not None]
    # Of NaN alone, each range refuses the images, with the reason.
    return ValueRange.of_floats(finite, subject) if finite else ValueRange(0, 1)


def scale_floats(values: NDArray[Any], floats: ValueRange, subject: str) -> NDArray[np.uint8]:
    """Return an image of floating point as 0 to 255. RequestError if its values are not in the range."""
    low, high = f"{floats.low:g}", f"{floats.high:g}"
    if not np.isfinite(values).all():
        raise RequestError(
            f"{subject} holds NaN or infinity; leave it out, or replace those values: "
            f"x = np.nan_to_num(x, nan={low}, posinf={high}, neginf={low}); if NaN is an unknown "
            "pixel: data={'unknown': 'nan'}"
        )
    try:
        return Ranges(floats=floats).to_uint8(values)
    except OutOfRangeError:
        extent = (float(values.min()), float(values.max()))
        raise RequestError(
            f"{subject} has values from {extent[0]:.4g} to {extent[1]:.4g}, but images before it are from {low} "
            f"to {high}; leave it out, or {cut_or_range(floats, extent)}"
        ) from None


def cut_or_range(floats: ValueRange, extent: Extent) -> str:
    """Return the remedy for values beyond a range: clip them, or, if that would destroy them, another range."""
    width = floats.high - floats.low
    if floats.low - width / 2 <= extent[0] and extent[1] <= floats.high + width / 2:
        return f"cut its values: x = x.clip({floats.low:g}, {floats.high:g})"
    low, high = usual_or_outward(min(floats.low, extent[0]), max(floats.high, extent[1]))
    return f"give the values of black and white of all images: data={{'range': ({low:.10g}, {high:.10g})}}"


def encode_image(image: Any, i: int, floats: ValueRange | None, storing: Storing) -> bytes:
    """Return an image as the content of a file: an image file unchanged, others encoded without loss.

    Arrays deeper than 8 bits, or of other channels, become a .npy file, [H, W, C], as Pillow has no file for them.

    Args:
        image: a PIL image, an array or tensor, a path, or the bytes of a file.
        i: its number, for messages.
        floats: the range of images of floating point.
        storing: how arrays are stored.

    Raises:
        RequestError: it is not an image.
    """
    subject = f"image {i:,}"
    if isinstance(image, str | os.PathLike):
        try:
            image = Path(image).read_bytes()
        except OSError as error:
            raise RequestError(f"{subject}, {image}, cannot be read: {error.strerror}; give images or paths") from None
    if isinstance(image, bytes):
        if not has_image_signature(image[:64]):
            raise RequestError(f"{subject} is {len(image):,} bytes of something else; give the content of image files")
        return image
    if not isinstance(image, Image.Image):
        pixels = _to_pixels(image, subject, floats, storing)
        if pixels.dtype != np.uint8 or not has_usual_channels(pixels):
            file = BytesIO()
            np.lib.format.write_array(file, pixels, (1, 0), allow_pickle=False)
            return file.getvalue()
        image = to_pillow(pixels)
    try:
        return _encode_pil(image, subject)
    except (OSError, SyntaxError, ValueError) as error:  # a file that Pillow opened and that is damaged further on
        raise RequestError(f"{subject} cannot be read: {error}; leave it out") from error


def _to_pixels(image: Any, subject: str, floats: ValueRange | None, storing: Storing) -> NDArray[Any]:
    """Return an array or tensor as [H, W, C]: uint8, deeper integers, or what keeps its values."""
    if not is_array(image):
        found = "missing" if image is None else f"of type {type(image).__name__}"
        raise RequestError(
            f"{subject} is {found}; give PIL images, arrays, tensors or paths, each alone, as (image, label), "
            "or as {'image': …, 'label': …}"
        )
    pixels = as_array(image)
    shape = "x".join(map(str, pixels.shape))
    if pixels.ndim == 4:
        raise RequestError(f"{subject} is a batch of shape {shape}; give single images, of a DataLoader its .dataset")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind not in "iuf" and pixels.size:
        raise RequestError(
            f"{subject} is {pixels.dtype}; images are integers, booleans, or floating point {FLOAT_RANGES}"
        )
    # Where both sides could be channels, tensors have theirs first and arrays theirs last.
    axis = channel_axis(pixels.shape, hasattr(image, "detach"), storing.axes) if pixels.ndim == 3 else None
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or (pixels.ndim == 3 and axis is None):
        ask = "; say which axis is that of channels: data={'axes': 'NCHW'} or 'NHWC'" * (pixels.ndim == 3)
        raise RequestError(f"{subject} has the shape {shape}; images are [H, W], [H, W, C] or [C, H, W]{ask}")
    if axis == 0:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype.kind == "f" and not storing.keeps:  # the last of the channels may be transparency
        pixels = scale_floats(pixels, floats or float_range([extent_of(pixels)], subject), subject)
    return np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[..., None])


def _encode_pil(image: Image.Image, subject: str) -> bytes:
    kept = image
    if image.mode.startswith("I;16"):  # in any order of bytes
        kept = Image.fromarray(np.asarray(image).astype(np.uint16))
        kept.info = image.info
    elif image.mode in _CONVERTED_MODES:
        kept = image.convert(_CONVERTED_MODES[image.mode])
    elif image.mode not in _PNG_MODES | _TIFF_MODES:
        raise RequestError(
            f"{subject} has Pillow's mode {image.mode}, of which Unfog does not know the values; convert it: "
            "image.convert('RGB')"
        )
    # With its colour profile and orientation, which decoding applies as it does to a file.
    extra: dict[str, Any] = {name: image.info[name] for name in ("icc_profile",) if image.info.get(name)}
    if exif := image.getexif():
        extra["exif"] = exif
    file = BytesIO()
    if kept.mode in _PNG_MODES:
        kept.save(file, "PNG", compress_level=1, **extra)
    else:
        kept.save(file, "TIFF", **extra)
    return file.getvalue()
