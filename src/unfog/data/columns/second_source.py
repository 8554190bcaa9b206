"""Conditions that are images of a second source: paired with the images by name, and fitted to them."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import DeepImage, Ranges
from unfog.data.columns.image_setting import SECOND_KINDS, split_images
from unfog.data.decode import Fit, parse_colour, read_deep, turned_upright, upright_sides
from unfog.data.decode_pool import (
    ColourFoundError,
    DecodeStatistics,
    PixelFormat,
    Progress,
    decode_all,
    thread_count,
    with_retries,
)
from unfog.data.file_rows import map_array
from unfog.data.full_depth.choice import channels_of, first_image
from unfog.data.full_depth.ranges import find_ranges, spread
from unfog.data.settings import parse_condition
from unfog.data.sources.base import FailedShardError, ImageError, SecondSource, ShardReadError, Source
from unfog.data.sources.image_files import image_error
from unfog.data.sources.label_tables import strip_shard
from unfog.data.sources.registry import open_source
from unfog.device.cores import thread_pool
from unfog.errors import RequestError
from unfog.files.safe_files import regular_file
from unfog.text import plural, sanitize
from unfog.values.columns import Column
from unfog.values.image_format import STORED, ImageFormat, Size, StoredValues, colour_channels
from unfog.values.kinds.image_kinds import IMAGE_KINDS, MOST_MASK_VALUES

_SAMPLED = 64  # images that are looked at to find the kind of a second source
_MASKS_AT_ONCE = 256  # that are read ahead
_FEW_VALUES = 32  # a mask has fewer different values in its first images
_SIDES_CHECKED = 1000  # pairs whose sides are compared, evenly spread
_OPAQUE = 128  # of 255, from which a pixel is not missing
_BACKGROUND = "white"  # behind transparent pixels, as of training images


def _if_numbers(name: str, place: str) -> str:
    """Return the remedy for a file .npy with a number or vector for each image, and no images; "" for others."""
    if not place.endswith(".npy"):
        return ""
    try:
        path = Path(os.path.expanduser(place))
        images = map_array(regular_file(path, path.parent, follow=True)).ndim > 2
    except (OSError, ValueError):
        return ""
    if images:
        return ""
    return (
        f"; numbers for each image are a column: --condition TABLE.csv:{name} with file_name 00000000, 00000001, …; "
        f"or an array {name} of the .npz file of the images; or from Python conditions={{'{name}': …}}"
    )


def pair_sources(source: Source, condition: str, warn: Callable[[str], None]) -> tuple[SecondSource, ...]:
    """Return the second sources that `data.condition` names, paired with the images of a source.

    RequestError if one cannot be opened, most images have no partner, or sides have other proportions.
    """
    if source.second is not None:
        return source.second
    place, columns = parse_condition(condition)
    beside = {} if place else source.images_of(columns)
    wanted = {name: (second, columns[name]) for name, second in beside.items()}
    for name, (text, kind) in split_images(condition)[0].second.items():
        try:
            wanted[name] = open_source(os.path.expanduser(text)), kind
        except RequestError as error:
            raise RequestError(f"condition {name}: {error}{_if_numbers(name, text)}") from None
    return tuple(_pair(source, name, second, kind, warn) for name, (second, kind) in wanted.items())


def _pair(source: Source, name: str, second: Source, kind: str, warn: Callable[[str], None]) -> SecondSource:
    said, count, images = f"condition {name}: {sanitize(second.name)}", len(second.names), len(source.names)
    if count != images and _by_place(source.names) and _by_place(second.names):
        raise RequestError(f"{said} has {count:,} images, and there are {images:,}; give one for each, in their order")
    partner = _partners(source.names, second.names)
    found = int((partner >= 0).sum())
    if 2 * found < len(partner):
        raise RequestError(
            f"{said} has an image for {found:,} of {len(partner):,} images only; pairs have the same name but for the "
            f"extension, and there are {_first_names(source.names)} and {_first_names(second.names)}"
        )
    if unused := len(second.names) - len(set(partner[partner >= 0].tolist())):
        warn(f"{said} has {plural(unused)} without a partner, not used")
    if missing := len(partner) - found:
        first = source.names[int(np.flatnonzero(partner < 0)[0])]
        warn(f"{said} has no image for {missing:,} of {len(partner):,}, such as {sanitize(first)}: unknown for them")
    _check_proportions(source, second, partner, said)
    if kind not in ("", *SECOND_KINDS):
        raise RequestError(f"{said} are images, and not of kind {kind}; omit :{kind}")
    if not kind:
        kind, values = _find_kind(second, partner)
        if kind == "image" and values == 1:
            warn(
                f"{said}: the images that were looked at have one value, so the source is taken for pictures; if they "
                "are masks, end the condition with :mask"
            )
    return SecondSource(name, kind, second, partner)


def _by_place(names: Sequence[str]) -> bool:
    """Return True if the names are numbers, as those of the images of an array are."""
    return all(names[i] == f"{i:08}" for i in (0, len(names) - 1))


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(sanitize(names[i]) for i in range(min(2, len(names))))


def _partners(names: Sequence[str], others: Sequence[str]) -> NDArray[np.int64]:
    """Return for each name the index of the other of the same name without extension, [N]; -1 without one.

    Whole paths are compared, or paths below the folders that all share, or names without folders: whichever pairs the
    most. A name that two have is no one's.
    """
    best = np.full(len(names), -1, np.int64)
    for spell in (_whole, _below_shared, _without_folders):
        mine, theirs = spell(names), spell(others)
        ambiguous = {key for keys in (mine, theirs) for key, count in Counter(keys).items() if count > 1}
        place = {key: i for i, key in enumerate(theirs) if key not in ambiguous}
        found = np.array([-1 if key in ambiguous else place.get(key, -1) for key in mine], np.int64)
        if (found >= 0).sum() > (best >= 0).sum():
            best = found
    return best


def _whole(names: Sequence[str]) -> list[str]:
    return [unicodedata.normalize("NFC", os.path.splitext(strip_shard(name))[0]) for name in names]


def _below_shared(names: Sequence[str]) -> list[str]:
    whole = _whole(names)
    shared = os.path.commonprefix(whole).rfind("/") + 1  # noqa: RUF071  cut to a whole folder
    return [name[shared:] for name in whole]


def _without_folders(names: Sequence[str]) -> list[str]:
    return [name.rpartition("/")[2] for name in _whole(names)]


def _check_proportions(source: Source, second: Source, partner: NDArray[np.int64], said: str) -> None:
    """Raise RequestError unless pairs have the same proportions, to a pixel: they would be cut in other places."""
    paired = np.flatnonzero(partner >= 0)
    for i in paired[list(spread(len(paired), _SIDES_CHECKED))].tolist():
        ours, theirs = _sides(source, i), _sides(second, int(partner[i]))
        if ours and theirs and not _alike(ours, theirs):
            sides = " and ".join(f"{width}x{height}" for width, height in (ours, theirs))
            raise RequestError(
                f"{said}: {sanitize(source.names[i])} and {sanitize(second.names[int(partner[i])])} have other "
                f"proportions, {sides}, and would be cut in other places; give images of one shape"
            )


def _sides(source: Source, i: int) -> tuple[int, int] | None:
    try:
        with source.read_image(i) as image:
            return upright_sides(image)
    except Exception:  # found again, and counted, as it is decoded
        return None


def _alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    (width, height), (across, down) = sorted((one, other))
    return abs(down * width / across - height) <= 1 or abs(across * height / down - width) <= 1


def _find_kind(second: Source, partner: NDArray[np.int64]) -> tuple[str, int]:
    """Return the kind, and how many values a sample has, as far as they were counted.

    It is "mask" if these are few, and all of them whole numbers or colours of a palette, else "image".
    """
    found = set[int]()
    paired = partner[partner >= 0]
    for i in paired[list(spread(len(paired), _SAMPLED))].tolist():
        try:
            found |= {*np.unique(_mask_values(partial(second.read, i))[0]).tolist()}
        except (ImageError, ValueError):
            continue
        if len(found) > _FEW_VALUES:
            break
    return "mask" if 1 < len(found) <= _FEW_VALUES else "image", len(found)


def combined_stamp(source: Source, seconds: Sequence[SecondSource]) -> tuple[str, int]:
    """Return `Source.stamp` of the images together with the second sources and their pairs."""
    digest, size = source.stamp()
    parts = [(one.name, one.kind, one.source.stamp(), one.partner.tobytes()) for one in seconds]
    if parts:
        digest = hashlib.sha256(repr((digest, parts)).encode()).hexdigest()
    return digest, size + sum(part[2][1] for part in parts)


def second_columns(
    seconds: Sequence[SecondSource], size: Size, warn: Callable[[str], None], progress: Progress | None = None
) -> dict[str, Column]:
    """Decode second sources at the size of the images. Return their columns, in the order of the images.

    RequestError if a mask has too many values, or none of the images can be used; RunError if one cannot be read now.
    """
    makers = {"mask": _mask_column, "image": _image_column}
    return {one.name: makers[one.kind](one, size, warn, progress) for one in seconds}


def _image_column(one: SecondSource, size: Size, warn: Callable[[str], None], progress: Progress | None) -> Column:
    order = one.partner[one.partner >= 0]
    format = _format_of(one.source, size)
    while True:
        pixels, done = format.image.empty_stored(len(order)), 0
        statistics = DecodeStatistics.empty(len(order))
        try:
            with closing(decode_all(one.source, order, format, statistics, progress)) as chunks:
                for _, images in chunks:
                    pixels[done : done + len(images)] = images
                    done += len(images)
            break
        except ColourFoundError:
            format = format._replace(image=ImageFormat.of(colour_channels(True), size), only_grey=False)
    _check_used(one, Counter(statistics.reasons.values()), done, len(order), warn)
    rows = np.flatnonzero(one.partner >= 0)[statistics.used]
    if len(rows) == len(one.partner):
        return Column(one.name, "image", pixels)
    floating = pixels.dtype.kind == "f"
    values = np.full((len(one.partner), *pixels.shape[1:]), np.nan if floating else -1, "f4" if floating else "i2")
    values[rows] = pixels[:done]
    return Column(one.name, "image", values)


def _format_of(source: Source, size: Size) -> PixelFormat:
    """Return the format of the images: bytes, or float32 in the units of the source for deeper values."""
    background = parse_colour(_BACKGROUND)
    try:
        deep = find_ranges(source) != Ranges()
    except RequestError:  # values of no usual range
        deep = True
    first = first_image(source)
    if first is None or not (deep or _has_deep_values(first)):
        return PixelFormat(ImageFormat.of(colour_channels(False), size), background, Ranges(), True)
    usual = STORED["float32"]
    values = StoredValues("float32", usual.low, usual.high)
    return PixelFormat(ImageFormat.of(channels_of(first), size, values), background)


def _has_deep_values(image: Image.Image | DeepImage | NDArray[Any]) -> bool:
    if isinstance(image, np.ndarray):
        return image.dtype != np.uint8
    return isinstance(image, DeepImage) or image.mode[0] in "IF"


def _check_used(one: SecondSource, reasons: Counter[str], used: int, count: int, warn: Callable[[str], None]) -> None:
    """Warn of images that cannot be used; RequestError if there are no others. Buckets are warned of together later."""
    if reasons and one.whole:
        told = ", ".join(f"{n:,} {reason}" for reason, n in reasons.most_common(3))
        said = f"condition {one.name}: {count - used:,} of {count:,} images cannot be used: {told}"
        if not used:
            raise RequestError(f"{said}; replace them")
        warn(f"{said}; unknown for these")


def _mask_column(one: SecondSource, size: Size, warn: Callable[[str], None], progress: Progress | None) -> Column:
    format = ImageFormat.of(1, size)
    values = np.full((len(one.partner), 1, format.height, format.width), -1, np.int8)
    numbers, reasons, in_colour = dict[int, int](), Counter[str](), set[bool]()
    rows = np.flatnonzero(one.partner >= 0)
    with closing(_read_masks(one, rows, format)) as masks:
        for done, (row, found) in enumerate(zip(rows.tolist(), masks), 1):
            if progress and done % 64 == 0:
                progress(done, len(rows))
            if isinstance(found, str):
                reasons[found] += 1
                continue
            plane, coloured = found
            found_here, inverse = np.unique(plane, return_inverse=True)
            known = [numbers.setdefault(value, len(numbers)) for value in found_here.tolist()]
            in_colour.add(coloured)
            if len(numbers) > MOST_MASK_VALUES:
                _check_values(one.name, len(numbers))
            values[row, 0] = np.array(known, np.int8)[inverse.reshape(plane.shape)]
    _check_used(one, reasons, len(rows) - reasons.total(), len(rows), warn)
    if len(in_colour) > 1:
        raise _in_colour_and_not(one.name)
    if one.whole:
        _check_values(one.name, len(numbers))
    ordered = sorted(numbers)
    place = np.zeros(len(numbers) + 1, np.int8)
    place[-1] = -1
    for new, value in enumerate(ordered):
        place[numbers[value]] = new
    names = tuple(_mask_category(value, True in in_colour) for value in ordered)
    return Column(one.name, "mask", place[values], names)


def _in_colour_and_not(name: str) -> RequestError:
    return RequestError(f"condition {name}: some masks are in colour, and others are not; save all of them alike")


def _check_values(name: str, count: int) -> None:
    """Raise RequestError unless masks have a possible number of values."""
    if count < 2:
        raise RequestError(f"condition {name}: all masks have one value, and so say nothing; leave it out")
    if count > MOST_MASK_VALUES:
        raise RequestError(
            f"condition {name}: the masks have more than {MOST_MASK_VALUES} values; a mask has one a category, which a "
            f"JPEG does not keep; save them as PNG, or end the condition with :image if they are pictures"
        )


def unify_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of a second source, one for each part of a set, with the same labels or channels.

    The parts were decoded one by one: a mask has the labels of its part, and pictures may be grey in one part alone.
    RequestError if none of the images can be used, or all masks together have values that a mask cannot have.
    """
    if not any(IMAGE_KINDS[one.kind].known(np.asarray(one.values)).any() for one in columns):
        raise RequestError(f"condition {columns[0].name}: none of its images can be used; replace them")
    if columns[0].kind == "mask":
        return _with_shared_labels(columns)
    most = max(one.values.shape[1] for one in columns)
    return [
        one if one.values.shape[1] == most else replace(one, values=np.repeat(one.values, most, 1)) for one in columns
    ]


def _with_shared_labels(columns: Sequence[Column]) -> list[Column]:
    name, found = columns[0].name, {category for one in columns for category in one.categories}
    if len({category.startswith("#") for category in found}) > 1:
        raise _in_colour_and_not(name)
    _check_values(name, len(found))
    labels = tuple(sorted(found, key=lambda text: int(text[1:], 16) if text.startswith("#") else int(text)))
    unified = []
    for one in columns:
        place = np.array([*map(labels.index, one.categories), -1], np.int8)  # the last is what is not known
        unified.append(replace(one, values=place[one.values], categories=labels))
    return unified


def _read_masks(
    one: SecondSource, rows: NDArray[np.int64], format: ImageFormat
) -> Generator[tuple[NDArray[np.int64], bool] | str]:
    """Yield the mask of each row, or why it cannot be used."""

    def read(i: int) -> tuple[NDArray[np.int64], bool] | str:
        try:
            return with_retries(partial(read_mask, partial(one.source.read, i), format), one.source, i)
        except (ImageError, ValueError) as error:
            return str(error)

    partners = one.partner[rows].tolist()
    with thread_pool(thread_count(one.source)) as pool:
        for first in range(0, len(partners), _MASKS_AT_ONCE):  # so that results do not pile up
            yield from pool.map(read, partners[first : first + _MASKS_AT_ONCE])


def read_mask(
    read: Callable[[], Image.Image | DeepImage | NDArray[Any]], format: ImageFormat
) -> tuple[NDArray[np.int64], bool]:
    """Return a mask [H, W] of this format, cut as an image and resized by the nearest pixel; and if it is in colour.

    Raises as `_mask_values`.
    """
    plane, coloured = _mask_values(read)
    height, width = plane.shape
    fit = Fit.of(width, height, format, 1)
    places = []
    for whole, part, result in zip(fit.original, fit.kept, fit.result):
        at = (np.arange(result) + 0.5) * part / result
        places.append((whole - part) // 2 + at.astype(np.int64))
    across, down = places
    return plane[down[:, None], across], coloured


def _mask_values(read: Callable[[], Image.Image | DeepImage | NDArray[Any]]) -> tuple[NDArray[np.int64], bool]:
    """Return the mask from `read` as whole numbers [H, W], colours as 0xrrggbb; and if it is in colour.

    Raises ImageError, as errors of shards, and ValueError if its values are not whole numbers.
    """
    try:
        values = _stored_values(read())
    except (FailedShardError, ShardReadError):
        raise
    except Exception as error:  # decoders raise almost anything on damaged files, as in `decode`
        raise image_error(error) from error
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.round(values))).all():
        raise ValueError("values that are not whole numbers")
    if values.ndim == 3 and values.shape[2] in (1, 2):
        values = values[..., 0]
    if values.ndim == 3 and values.shape[2] in (3, 4):
        red, green, blue = (values[..., c].astype(np.int64) for c in range(3))
        return red * 65536 + green * 256 + blue, True
    if values.ndim != 2:
        raise ValueError(f"a mask of shape {list(values.shape)}")
    return values.astype(np.int64), False


def _stored_values(found: Image.Image | DeepImage | NDArray[Any]) -> NDArray[Any]:
    """Return the values of a mask, [H, W] or [H, W, C], and close its file."""
    if not isinstance(found, Image.Image):
        return found.values if isinstance(found, DeepImage) else found
    with found:
        if found.mode[0] in "IF":
            return read_deep(lambda: found)
        return np.asarray(turned_upright(found.convert("RGB") if _is_coloured(found) else _plain(found)))


def transparent_pixels(image: Image.Image) -> NDArray[np.bool_]:
    """Return where an image is transparent, as it is shown upright, bool [H, W]."""
    return np.asarray(turned_upright(image.convert("RGBA").getchannel("A"))) < _OPAQUE


def _is_coloured(image: Image.Image) -> bool:
    return image.mode not in ("1", "L", "LA", "P", "PA")


def _plain(image: Image.Image) -> Image.Image:
    """Return an image of one channel: the numbers of a palette, or greys without transparency."""
    return image.getchannel(0) if image.mode in ("LA", "PA") else image


def numbers_of_labels(
    plane: NDArray[np.int64], coloured: bool, categories: Sequence[str], what: str
) -> NDArray[np.int64]:
    """Return, for a mask [H, W] from `read_mask`, the number of the category of each pixel, [H, W].

    RequestError, which begins with `what`, if a value is not in the masks of the run.
    """
    found, inverse = np.unique(plane, return_inverse=True)
    names = [_mask_category(value, coloured) for value in found.tolist()]
    if unknown := [name for name in names if name not in categories]:
        raise RequestError(
            f"{what} has the value {unknown[0]}, and the masks of the run have {', '.join(categories[:12])}; use these"
        )
    numbers = np.array([categories.index(name) for name in names], np.int64)
    return numbers[inverse.reshape(plane.shape)]


def _mask_category(value: int, coloured: bool) -> str:
    """Return the name of the category that a value of a mask stands for: the number, or the colour."""
    return f"#{value:06x}" if coloured else str(value)
