"""Pictures that samples are given: files, folders and arrays, read as the images of training are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from unfog.config.schema import Config
from unfog.data.bit_depth import DeepImage, Ranges
from unfog.data.buckets.sizes import nearest_size
from unfog.data.columns.second_source import numbers_of_labels, read_mask, transparent_pixels
from unfog.data.decode import decode, parse_colour, upright_sides
from unfog.data.file_rows import map_array
from unfog.data.prepare import silence_pillow
from unfog.data.sources.arrays import ArraySource
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.image_files import SUFFIXES, open_image
from unfog.data.sources.registry import PYTHON, open_source
from unfog.errors import RequestError
from unfog.files.safe_files import regular_file
from unfog.settings import is_auto
from unfog.text import sanitize
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.condition_requests import MOST_CELLS, ConditionGrid
from unfog.values.image_format import CHANNELS, STORED, ImageFormat, Size, StoredValues, size_of, to_pillow
from unfog.values.kinds.image_kinds import IMAGE_KINDS, Picture, has_bytes, image_columns, picture_text
from unfog.values.kinds.made_conditions import enlarged, made_of

_Found = Image.Image | DeepImage | NDArray[Any]


class _Given(NamedTuple):
    """A picture as it was given: its name for messages, and how to read it."""

    name: str
    read: Callable[[], _Found]


def read_pictures(
    config: Config, given: Any, most: int, samples: Collection[int] | None = None
) -> Mapping[str, object]:
    """Return requested conditions with pictures in place of files, folders and arrays; others are unchanged.

    Args:
        config: of the run, whose size the pictures get.
        given: values by name of column: see `Run.sample`.
        most: pictures of each that are needed.
        samples: numbers of samples, whose pictures alone are read; others are hidden. None: all.

    RequestError if one cannot be read, or does not suit its column.
    """
    images = image_columns(config.columns)
    if not (images and isinstance(given, Mapping)):
        return cast(Mapping[str, object], given)  # which the conditions check
    changed = dict(given)
    for facts in images:
        if facts.name in given:
            each = _each(facts, given[facts.name], most)
            if samples is not None:
                hidden, used = _hidden(facts), {number % len(each) for number in samples}
                each = [one if i in used else hidden for i, one in enumerate(each)]
            changed[facts.name] = [_picture(config, facts, one) for one in each]
    return changed


def sizes_of_pictures(config: Config, given: Mapping[str, object], most: int) -> list[Size]:
    """Return the size of the bucket whose shape is nearest to each picture, at most `most`; [] without pictures.

    They are those of the first condition that has some, in a run with buckets. Samples cycle through them. A picture
    whose shape is not known gets the size of the run. RequestError as `read_pictures`.
    """
    sizes = [bucket.size for bucket in config.size_buckets]
    facts = next((one for one in image_columns(config.columns) if given.get(one.name) is not None), None)
    if facts is None or not sizes:
        return []
    found = []
    for one in _each(facts, given[facts.name], most):
        if isinstance(one, Picture):
            found.append(config.data.size)
            continue
        with _errors_named(facts, one):
            found.append(nearest_size(sizes, *_sides(one.read)))
    return found


def read_grid(config: Config, grid: ConditionGrid) -> ConditionGrid:
    """Return a grid with pictures in place of files, folders and arrays; RequestError as `read_pictures`."""
    return ConditionGrid(tuple(read_pictures(config, dict(grid.axes), MOST_CELLS).items()))


def _each(facts: ColumnFacts, value: object, most: int) -> Sequence[_Given | Picture]:
    """Return the pictures that a value stands for, `most` at most. RequestError if it is another value."""
    name, found = facts.name, list[_Given | Picture]()
    channels = IMAGE_KINDS[facts.kind].shape(facts)[0]
    for one in _parts(name, value, _hidden(facts), channels):
        found.extend([one] if isinstance(one, _Given | Picture) else _of_text(name, one, channels, most))
        if len(found) >= most:
            break
    if not found:
        raise RequestError(f"given {name!r} has no picture; give a file, a folder or an array")
    return found[:most]


def _hidden(facts: ColumnFacts) -> Picture:
    return Picture(IMAGE_KINDS[facts.kind].unknown(facts))


def _parts(name: str, value: object, hidden: Picture, channels: int) -> Iterator[_Given | Picture | str]:
    if value is None or isinstance(value, Picture):
        yield hidden if value is None else value
    elif isinstance(value, str | PathLike):
        yield str(value)
    elif isinstance(value, Image.Image):
        yield _Given("picture", value.copy)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            for part in _parts(name, each, hidden, channels):
                yield part._replace(name=str(i)) if isinstance(part, _Given) else part
    else:
        yield from _of_array(name, value, channels)


def _of_array(name: str, value: Any, channels: int) -> Iterator[_Given]:
    array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if array.dtype.kind not in "buif" or array.ndim not in (2, 3, 4) or not array.size:
        raise RequestError(
            f"given {name!r} is {array.dtype} {list(array.shape)}; give a file, a folder, or an array [H, W], "
            "[H, W, C] or [n, H, W, C]"
        )
    if array.ndim == 3 and array.shape[2] > max(4, channels + 1):  # one more marks values that are missing
        array = array[..., None]  # several of one channel
    elif array.ndim < 4:
        array = array[None] if array.ndim == 3 else array[None, ..., None]
    for i, each in enumerate(array):
        yield _Given(str(i), partial(_plain, each))


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    return array


def _of_text(name: str, text: str, channels: int, most: int) -> Iterator[_Given]:
    """Yield the pictures of a file, of several with commas between them, or of a source."""
    path = Path(text).expanduser()
    if not path.exists() and "," in text:
        for part in text.split(","):
            yield from _of_text(name, part.strip(), channels, most)
    elif path.is_file() and path.suffix.lower() in SUFFIXES:
        yield _Given(path.stem, partial(open_image, path))
    elif text.startswith(PYTHON):
        raise RequestError(f"given {name!r}: a source in Python is not read here; give files or an array")
    elif path.is_file() and (array := _array(path)) is not None:
        parts = [*islice(_of_array(name, array, channels), most)]
        yield from (part._replace(name=f"{path.stem}-{part.name}" if len(parts) > 1 else path.stem) for part in parts)
    else:
        try:
            source = open_source(str(path) if path.exists() else text)
        except RequestError as error:
            raise RequestError(f"given {name!r}: {error}") from None
        count, of_array = len(source.names), isinstance(source, ArraySource)
        for i in range(min(most, count)):
            # The images of an array have numbers in place of names.
            own = f"{path.stem}-{i}" if count > 1 else path.stem
            yield _Given(own if of_array else Path(source.names[i]).stem, partial(_read, source, i))


def _array(path: Path) -> NDArray[Any] | None:
    """Return the array of a .npy file of two or three axes, mapped; None for all other files, which are sources."""
    if path.suffix.lower() != ".npy":
        return None
    with suppress(OSError, ValueError):  # a source says what is wrong
        values = map_array(regular_file(path, path.parent, follow=True))
        if isinstance(values, np.ndarray) and values.ndim in (2, 3) and values.size and values.dtype.kind in "buif":
            return values
    return None


def _read(source: Source, i: int) -> _Found:
    return source.read(i)


def _picture(config: Config, facts: ColumnFacts, given: _Given | Picture) -> Picture:
    """Return the condition that a picture becomes."""
    if isinstance(given, Picture):
        return given
    with _errors_named(facts, given):
        return picture_text(_READERS[facts.kind](config, facts, _without_booleans(facts, given)), given.name)


def _without_booleans(facts: ColumnFacts, given: _Given) -> _Given:
    """Return a picture whose booleans, if it has some, are black and white, and in a mask its two labels."""

    def read() -> _Found:
        found = given.read()
        if not isinstance(found, np.ndarray) or found.dtype != bool:
            return found
        if facts.kind != "mask":
            return found.astype(np.uint8) * np.uint8(255)
        labels = [int(name) for name in facts.categories if not name.startswith("#")]
        false, true = labels if len(labels) == 2 else (0, 1)
        return np.where(found, true, false)

    return given._replace(read=read)


@contextmanager
def _errors_named(facts: ColumnFacts, given: _Given) -> Iterator[None]:
    """Turn an error while a picture is read into a RequestError that names the picture."""
    try:
        with silence_pillow():
            yield
    except (ImageError, ValueError, OSError) as error:
        raise RequestError(f"{facts.name} = {sanitize(given.name)[:60]} cannot be used: {error}") from None


def _mask(config: Config, facts: ColumnFacts, given: _Given) -> NDArray[np.float32]:
    _, height, width = IMAGE_KINDS[facts.kind].shape(facts)
    plane, coloured = read_mask(given.read, ImageFormat.of(1, size_of(height, width)))
    what = f"{facts.name} = {sanitize(given.name)[:60]}"
    return numbers_of_labels(plane, coloured, facts.categories, what)[None].astype(np.float32)


def _second(config: Config, facts: ColumnFacts, given: _Given) -> NDArray[np.float32]:
    channels, height, width = IMAGE_KINDS[facts.kind].shape(facts)
    usual = STORED["float32"]
    values = [] if has_bytes(facts) else [StoredValues("float32", usual.low, usual.high)]
    format = ImageFormat.of(channels, size_of(height, width), *values)
    found: NDArray[np.float32] = decode(_reader(given, channels), format, parse_colour("white"))[0].astype(np.float32)
    return found


def _reader(given: _Given, channels: int) -> Callable[[], _Found]:
    """Return the function that reads a picture for a condition of so many channels.

    Of one or three, grey and colour become each other, and an array of bytes is one that Pillow could have. Any other
    number has to be that of the picture. The function raises ImageError where it does not fit.
    """

    def read() -> _Found:
        found = given.read()
        count = _channels_of(found)
        if channels not in CHANNELS and (isinstance(found, Image.Image) or count != channels):
            raise ImageError(f"it has {count} channels, and the condition {channels}; give an array [H, W, {channels}]")
        if not isinstance(found, np.ndarray) or channels not in CHANNELS:
            return found
        if count not in (1, 3, 4):
            raise ImageError(f"it has {count} channels; give 1 (grey), 3 (colour) or 4 (and how opaque)")
        return to_pillow(found) if found.dtype == np.uint8 else found

    return read


def _channels_of(found: _Found) -> int:
    if isinstance(found, Image.Image):
        return len(found.getbands())
    values = found if isinstance(found, np.ndarray) else found.values
    return 1 if values.ndim == 2 else int(values.shape[2])


def _x0(config: Config, read: Callable[[], _Found], format: ImageFormat) -> torch.Tensor:
    """Return a picture as model values [1, C, H, W], with the ranges of the run."""
    data = config.data
    ranges = None if is_auto(data, "range") else Ranges.of_setting(data.range, data.clip)
    pixels, _ = decode(read, format, parse_colour(data.background), ranges)
    return format.to_model(torch.from_numpy(pixels.copy())[None]).float()


def _degraded(config: Config, facts: ColumnFacts, given: _Given) -> NDArray[np.float32]:
    """Return a picture of the low resolution enlarged, and a larger one made smaller before."""
    format, factor = config.image_format, int(facts.statistics[3])
    read = _reader(given, format.channels)
    width, height = _sides(read)
    if (height, width) == (format.height // factor, format.width // factor):
        small = replace(format, height=height, width=width)
        x = enlarged(_x0(config, read, small), format.height, format.width)
    else:
        x = made_of(_x0(config, read, format), "degrade", factor, _no_draws)
    made: NDArray[np.float32] = x[0].numpy()
    return made


def _sides(read: Callable[[], _Found]) -> tuple[int, int]:
    found = read()
    found = found.values if isinstance(found, DeepImage) else found
    return (found.shape[1], found.shape[0]) if isinstance(found, np.ndarray) else upright_sides(found)


def _grey(config: Config, facts: ColumnFacts, given: _Given) -> NDArray[np.float32]:
    x0 = _x0(config, _reader(given, config.image_format.channels), config.image_format)
    made: NDArray[np.float32] = made_of(x0, "grey", 0, _no_draws)[0].numpy()
    return made


def _holed(config: Config, facts: ColumnFacts, given: _Given) -> NDArray[np.float32]:
    """Return a picture with NaN where it is transparent, or NaN in an array."""
    found, missing = given.read(), np.zeros((0, 0), np.bool_)
    if isinstance(found, Image.Image):
        missing = transparent_pixels(found)
    else:
        values = found if isinstance(found, np.ndarray) else found.values
        values = values[..., None] if values.ndim == 2 else values
        missing = np.asarray(~np.isfinite(values).all(2))
        if values.shape[2] == config.image_format.channels + 1:  # its last channel says what is known
            alpha, values = values[..., -1], values[..., :-1]
            half = np.iinfo(values.dtype).max / 2 if values.dtype.kind in "ui" else 0.5
            missing |= np.asarray(alpha < half) | np.isnan(alpha)
        known = values[~missing]
        found = np.where(missing[..., None], known.min() if known.size else 0, values).astype(values.dtype)
    if not missing.any() or missing.all():
        raise RequestError(
            f"{facts.name} = {sanitize(given.name)[:60]}: {'all' if missing.all() else 'nothing'} of the picture is "
            "missing; make the pixels to fill in transparent, or NaN in an array"
        )
    read = _reader(_Given("", lambda: found), config.image_format.channels)
    x0 = _x0(config, read, config.image_format)[0].numpy()
    plane, _ = read_mask(lambda: missing.astype(np.uint8), ImageFormat.of(1, config.image_format.size))
    filled: NDArray[np.float32] = np.where(plane[None] > 0, np.float32(np.nan), x0)
    return filled


def _no_draws() -> torch.Tensor:
    raise AssertionError("nothing is drawn for this kind")


_READERS: dict[str, Callable[[Config, ColumnFacts, _Given], NDArray[np.float32]]] = {
    "mask": _mask,
    "image": _second,
    "degrade": _degraded,
    "grey": _grey,
    "hole": _holed,
}
