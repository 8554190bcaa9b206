"""TIFF files with many pages and channels: OME-TIFF, stacks of ImageJ, and others, through tifffile."""

from __future__ import annotations

import math
import os
import struct
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from unfog.data.scans.source import ScanSource, first_files, silence
from unfog.data.scans.stack import (
    ImageStack,
    check_length,
    check_shape,
    check_unpacked,
    native,
    read_part,
)
from unfog.data.sources.base import ImageError
from unfog.errors import RequestError
from unfog.files.deflate import DEFLATE_RATIO
from unfog.text import plural, sanitize
from unfog.values.arrays.axes import USUAL
from unfog.values.image_format import MOST_CHANNELS

_SEPARATE, _GREY = 2, (0, 1)  # values of PlanarConfiguration and PhotometricInterpretation
_PLAIN, _DEFLATE = 1, (8, 32946)
_WITHOUT_CODECS = (_PLAIN, *_DEFLATE, 32773)  # compressions that tifffile reads by itself
_HARMLESS = 2**26  # bytes
_LOOKED_AT = 8  # files of a folder, by which it is known whether they are pictures
_UNNAMED = "QI"  # axes of which a file does not say what they are
_MOST_PAGES = 1_000_000


class TiffSource(ScanSource):
    """Images in TIFF files: all pages, and all channels.

    A folder of TIFF files of one page each, in grey or colours that Pillow reads, remains one of pictures; so does one
    with few others among its first files.
    """

    suffixes = (".tif", ".tiff")
    prefix: ClassVar[str] = "tiff"
    kind: ClassVar[str] = "TIFF"
    package: ClassVar[str] = "tifffile"
    new_runs_only = True

    @classmethod
    def is_folder_of(cls, folder: str) -> bool:
        if find_spec(cls.package) is None:
            return False
        silence(cls.package)
        files = sorted(path for path in first_files(folder) if cls.has_name(os.path.basename(path)))[:_LOOKED_AT]
        return 2 * sum(map(_is_stack, files)) > len(files)

    def open_stack(self, path: Path) -> ImageStack:
        return TiffStack(path, self._axes)


def _is_stack(path: str) -> bool:
    """Return True for a TIFF file of several pages or unusual channels, or one that Pillow cannot read."""
    import tifffile

    if not os.path.isfile(path):  # a pipe, which would wait for its writer
        return False
    try:
        with tifffile.TiffFile(path, _multifile=False) as file:
            page = file.pages.first
            with suppress(IndexError):  # without a look at all pages
                return bool(file.pages[1])
            if _is_cut_off(file):
                return True
            if page.samplesperpixel not in (1, 2, 3, 4) or (file.is_imagej and len(file.series[0].pages) > 1):
                return True
            # Bands that lie one after the other, deeper than 8 bits: Pillow reads the header and not the pixels.
            bands = page.samplesperpixel > 1 and page.planarconfig == _SEPARATE and page.photometric in _GREY
            if bands and page.bitspersample > 8:
                return True
        return not _is_picture(path)
    except Exception:  # damaged, which the reader of pictures reports
        return False


def _is_cut_off(file: Any) -> bool:
    """Return True if the last page that can be read names a next one beyond the end of the file."""
    last, form, handle = file.pages[len(file.pages) - 1], file.tiff, file.filehandle
    handle.seek(last.offset)
    tags = int(struct.unpack(form.tagnoformat, handle.read(form.tagnosize))[0])
    handle.seek(last.offset + form.tagnosize + tags * form.tagsize)
    following = handle.read(form.offsetsize)
    # 0 ends the chain.
    return len(following) < form.offsetsize or int(struct.unpack(form.offsetformat, following)[0]) >= int(handle.size)


def _is_picture(path: str) -> bool:
    try:
        Image.open(path, formats=["TIFF"]).close()
    except UnidentifiedImageError:
        return False
    return True


class TiffStack(ImageStack):
    """Images of the first series of a TIFF file: all axes but channels, height and width count images."""

    def __init__(self, path: Path, axes: str) -> None:
        import tifffile

        self._path = path
        self._file = tifffile.TiffFile(path, _multifile=False)  # else an OME-TIFF may name other files, which are read
        try:
            self._read_header(axes)
        except BaseException:
            self._file.close()
            raise

    def _read_header(self, axes: str) -> None:
        first = self._file.pages.first
        check_pixels(first.imagewidth, first.imagelength)
        if first.compression not in _WITHOUT_CODECS and find_spec("imagecodecs") is None:
            name = first.compression.name
            raise ImageError(f"compressed by {name}, which needs a package: pip install imagecodecs")
        if len(self._file.pages) > _MOST_PAGES:
            raise ImageError(f"over {_MOST_PAGES:,} pages")
        if _is_cut_off(self._file):  # of which tifffile would read the other pages, as if there were no more
            raise ImageError("truncated")
        series = self._series = self._file.series[0]
        names, sides = series.axes, series.shape
        inner = self._inner = series.keyframe.ndim if series.dataoffset is None else _inner_axes(names)
        if "".join(sorted(names[-inner:])) not in ("XY", "SXY"):
            raise ImageError(f"axes {sanitize(names)}, which are not pages of an image")
        outer, lengths = names[:-inner], sides[:-inner]
        at = self._channel_axis(outer, lengths, axes)
        self._outer, self._at = lengths, at
        self.count = math.prod(length for k, length in enumerate(lengths) if k != at)
        self._samples = names[-inner:].find("S")
        size = dict(zip(names[-inner:], sides[-inner:]))
        channels = size.get("S", 1) * (1 if at is None else lengths[at])
        self.dtype = np.dtype(series.dtype).newbyteorder("=")
        self.shape = (size["Y"], size["X"], channels)
        if len(self._file.series) > 1:
            unused = sum(len(other.pages) for other in self._file.series[1:])
            self.note = f"{plural(unused, 'page')} of other sizes or types are not used"

    def _channel_axis(self, outer: str, lengths: tuple[int, ...], axes: str) -> int | None:
        """Return the axis of the pages that are channels of one image; None without such an axis."""
        if "C" in outer:
            return outer.index("C")
        unnamed = [k for k, name in enumerate(outer) if name in _UNNAMED]
        if not unnamed or self._series.axes.count("S"):
            return None
        if axes == "NCHW":
            return unnamed[-1]
        shape = "x".join(map(str, self._series.shape))
        if len(unnamed) > 1 and axes == "auto" and 1 < lengths[unnamed[-1]] <= MOST_CHANNELS:
            raise RequestError(
                f"{sanitize(self._path.name)} has the shape {shape}, which does not show whether the {lengths[-1]} are "
                "channels or further images; say so: --data.axes NCHW (channels) or NHWC (images)"
            )
        if axes == "auto" and 1 < lengths[unnamed[-1]] <= max(USUAL):
            self.note = (
                f"files of {lengths[unnamed[-1]]} pages, which are read as so many images; --data.axes NCHW reads them "
                "as channels of one"
            )
        return None

    def read(self, i: int) -> NDArray[Any]:
        pages = self._pages_of(i)
        planes = [native(self._page(number)) for number in pages]
        if self._samples >= 0:
            planes = [np.moveaxis(plane, self._samples, -1) for plane in planes]
            return planes[0] if len(planes) == 1 else np.concatenate(planes, -1)
        return np.stack(planes, -1)

    def _pages_of(self, i: int) -> list[int]:
        """Return the numbers of the pages of image i, one for each channel."""
        if not self._outer:
            return [0]
        lengths = [length for k, length in enumerate(self._outer) if k != self._at]
        place = [int(k) for k in np.unravel_index(i, lengths)] if lengths else []
        if self._at is None:
            return [int(np.ravel_multi_index(place, self._outer))]
        places = ([*place[: self._at], c, *place[self._at :]] for c in range(self._outer[self._at]))
        return [int(np.ravel_multi_index(one, self._outer)) for one in places]

    def _page(self, number: int) -> NDArray[Any]:
        series, shape = self._series, self._series.shape[-self._inner :]
        if series.dataoffset is not None:
            dtype = np.dtype(series.keyframe.dtype).newbyteorder(self._file.byteorder)
            return read_part(self._path, series.dataoffset + number * math.prod(shape) * dtype.itemsize, dtype, shape)
        page = series.pages[number]
        if page is None:
            raise ImageError("a page that is missing")
        for offset, length in zip(page.dataoffsets, page.databytecounts):
            if not length:
                raise ImageError("a page with a part that is missing")
            check_length(self._path, offset + length)
        if series.keyframe.compression in _DEFLATE:
            self._check_deflated(page)
        values: NDArray[Any] = page.asarray(maxworkers=1)
        return values

    def _check_deflated(self, page: Any) -> None:
        """Raise ImageError if a part of a page unpacks to far more than the page has."""
        most = 2 * math.prod(self._series.keyframe.shape) * self.dtype.itemsize + _HARMLESS
        for offset, length in zip(page.dataoffsets, page.databytecounts):
            if length * DEFLATE_RATIO > most:
                check_unpacked(read_part(self._path, offset, np.dtype(np.uint8), (length,)).tobytes(), most)

    def close(self) -> None:
        super().close()
        self._file.close()


def check_pixels(width: int, height: int) -> None:
    """Raise ImageError for sides that are too large, before anything else is read."""
    check_shape((height, width, 1), np.dtype(np.uint8))


def _inner_axes(names: str) -> int:
    """Return the number of the last axes that are those of one page."""
    return 3 if "S" in names[-3:] else 2
