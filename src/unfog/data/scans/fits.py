"""FITS files through astropy: images and cubes, with BSCALE, BZERO and BLANK."""

from __future__ import annotations

import math
import os
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.scans.source import ScanSource
from unfog.data.scans.stack import (
    MOST_BYTES,
    ImageStack,
    check_shape,
    check_unpacked,
    native,
    read_part,
    scaled,
    scaled_type,
    unpack,
)
from unfog.data.sources.base import FITS_SUFFIXES, ImageError
from unfog.files.deflate import DEFLATE_RATIO

_MOST_HDUS = 10_000
_HARMLESS = 2**28  # bytes that a tile may unpack to unlooked at


def _part(place: Path | BytesIO, offset: int, length: int) -> bytes:
    if isinstance(place, BytesIO):
        return place.getvalue()[offset : offset + length]
    return read_part(place, offset, np.dtype(np.uint8), (length,)).tobytes()


class FitsSource(ScanSource):
    """Images in the first part (HDU) of each FITS file that has any; planes of cubes are images of their own."""

    suffixes = FITS_SUFFIXES
    prefix: ClassVar[str] = "fits"
    kind: ClassVar[str] = "FITS"
    package: ClassVar[str] = "astropy"

    def open_stack(self, path: Path) -> ImageStack:
        return FitsStack(path, self._axes)


class FitsStack(ImageStack):
    """Planes of an array [..., y, x], of which the first row is at the bottom of the picture."""

    def __init__(self, path: Path, axes: str) -> None:
        from astropy.io import fits

        content = unpack(path) if path.name.lower().endswith(".gz") else None
        place = path if content is None else BytesIO(content)
        self._length = os.stat(path).st_size if content is None else len(content)
        self._file = fits.open(place, mode="readonly", memmap=False, do_not_scale_image_data=True, lazy_load_hdus=True)
        try:
            self._read_header(axes, place)
        except BaseException:
            self._file.close()
            raise

    def _first_image(self) -> Any:
        """Return the first part of the file that is an image. ImageError without one."""
        from astropy.io import fits

        for number in range(_MOST_HDUS + 1):
            try:
                part = self._file[number]
            except IndexError:
                raise ImageError("no image in it") from None
            is_image = isinstance(part, fits.PrimaryHDU | fits.ImageHDU | fits.CompImageHDU)
            if is_image and len(part.shape) >= 2:
                return part
        raise ImageError(f"no image in {_MOST_HDUS:,} parts")

    def _read_header(self, axes: str, place: Path | BytesIO) -> None:
        from astropy.io import fits

        part = self._part = self._first_image()
        header = part.header
        self._compressed = isinstance(part, fits.CompImageHDU)
        stored = np.dtype(fits.BITPIX2DTYPE[header["BITPIX"]])
        self._slope, self._intercept = float(header.get("BSCALE", 1)), float(header.get("BZERO", 0))
        if not (math.isfinite(self._slope) and math.isfinite(self._intercept)):
            raise ImageError("a header with a BSCALE or BZERO that is not finite")
        self._blank = header.get("BLANK") if stored.kind in "iu" else None
        self._sides = tuple(int(side) for side in part.shape)
        *outer, height, width = self._sides
        self._channels = outer[-1] if axes == "NCHW" and outer else 1
        self._outer = outer[:-1] if axes == "NCHW" else outer
        self.count = math.prod(self._outer)
        # Integers of 16 bits without a sign have a BZERO of 32768, as FITS has no type for them.
        self._unsigned = {8: np.int8, 16: np.uint16, 32: np.uint32}.get(header["BITPIX"]) if self._slope == 1 else None
        if self._intercept != {8: -128.0, 16: 2.0**15, 32: 2.0**31}.get(header["BITPIX"]):
            self._unsigned = None
        dtype = np.dtype(self._unsigned) if self._unsigned else scaled_type(stored, self._slope, self._intercept)
        self.dtype = np.dtype(np.float32) if self._blank is not None else dtype
        self.shape = (height, width, self._channels)
        check_shape(self.shape, self.dtype)
        start = int(part.fileinfo()["datLoc"])
        if self._compressed:
            self._check_tiles(place, start)
        elif self._length < start + math.prod(self._sides) * stored.itemsize:
            raise ImageError("truncated")
        if outer and axes == "auto" and math.prod(outer) > 1:
            self.note = "cubes, whose planes are read as images; --data.axes NCHW reads them as channels"

    def _check_tiles(self, place: Path | BytesIO, start: int) -> None:
        """Raise ImageError if a tile is too large, or unpacks to far more than its sides say.

        astropy makes room for all that a tile of gzip unpacks to. Other codecs unpack to the sides of the tile.
        """
        most = math.prod(self._part.tile_shape) * 8
        if most > 8 * MOST_BYTES:
            raise ImageError(f"tiles of over {MOST_BYTES >> 30} GB, the most that is read")
        table, columns = self._part.compressed_data, ["GZIP_COMPRESSED_DATA"]
        if "GZIP" in self._part.compression_type:
            columns.append("COMPRESSED_DATA")
        header = self._part._bintable.header  # its own header is that of the image
        heap = start + header.get("THEAP", header["NAXIS1"] * header["NAXIS2"])
        for column in set(columns) & set(table.dtype.names):
            for length, offset in np.asarray(table[column]).tolist():
                if heap + offset + length > self._length:
                    raise ImageError("truncated")
                if length * DEFLATE_RATIO > most + _HARMLESS:
                    check_unpacked(_part(place, heap + offset, length), most + _HARMLESS, 31)

    def read(self, i: int) -> NDArray[Any]:
        place = [int(k) for k in np.unravel_index(i, self._outer)] if self._outer else []
        inner = slice(None) if len(self._outer) + 2 < len(self._sides) else ()
        index = (*place, *([inner] if inner != () else []), slice(None), slice(None))
        raw = native(np.asarray(self._part.section[index]))
        values = scaled(raw, self._slope, self._intercept)
        if self._unsigned is not None:
            values = values.astype(self._unsigned)
        if self._blank is not None:
            values = np.where(raw == self._blank, np.nan, values).astype(np.float32)
        values = values[None] if values.ndim == 2 else values
        return np.ascontiguousarray(values.transpose(1, 2, 0)[::-1])

    def close(self) -> None:
        super().close()
        self._file.close()
