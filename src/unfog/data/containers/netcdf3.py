"""Variables of NetCDF files of version 3: classic, 64-bit offset and 64-bit data. Needs no package."""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.containers.source import unreadable
from unfog.data.containers.stored_array import Key, StoredArray, choose
from unfog.data.sources.base import ImageError
from unfog.errors import RequestError
from unfog.files.positions import fill
from unfog.files.safe_files import open_file
from unfog.text import sanitize

MAGIC = b"CDF"
"""First bytes of such a file."""
_BITS = {1: (4, 4), 2: (4, 8), 5: (8, 8)}  # version -> bytes of a count, and of an offset
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12  # tags of the lists of a header
_TYPES = dict(enumerate((">i1", "S1", ">i2", ">i4", ">f4", ">f8", ">u1", ">u2", ">u4", ">i8", ">u8"), 1))
_MOST_HEADER, _MOST_LISTED = 2**24, 100_000  # bytes of a header, and items of a list in it
_MOST_PARTS = 1024  # pieces of the file that are read for one image, before more is read in one piece
_LABELS = "labels"
_FORTH = "restore the file, or write it anew"
_MISSING = ("_FillValue", "missing_value")
_USED = ("scale_factor", "add_offset", *_MISSING)


@dataclass(frozen=True)
class _Variable:
    """Description of a variable in the header."""

    dtype: np.dtype[Any]
    begin: int
    shape: tuple[int, ...]
    names: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    record: int = 0
    """Bytes from one record to the next in the file; 0 if its values lie in one piece."""

    @property
    def each(self) -> int:
        """Bytes of the values at one place of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Byte of the file at which its values end."""
        if 0 in self.shape:
            return self.begin
        return self.begin + ((self.shape[0] - 1) * (self.record or self.each) + self.each if self.shape else 0)


def open_netcdf3(path: str, name: str) -> StoredArray:
    """Return the variable of that name, or the only one of images for "". Raises RequestError."""
    local = Path(path)
    try:
        with open_file(local, "rb", local.parent, follow=True) as file:
            length = os.fstat(file.fileno()).st_size
            variables = _Header(file.read(_MOST_HEADER)).variables
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise unreadable(path, error, _FORTH) from None
    name = name or choose({name: (one.shape, str(one.dtype)) for name, one in variables.items()}, sanitize(path))
    if name not in variables:
        listed = ", ".join(list(variables)[:8]) + (", …" if len(variables) > 8 else "")
        raise RequestError(f"{sanitize(path)} has no {sanitize(name)}; it has {sanitize(listed) or 'no variables'}")
    one, place = variables[name], sanitize(f"{path}:{name}")
    if one.end > length:
        raise RequestError(
            f"{place} is truncated: its values end at byte {one.end:,}, and the file has {length:,}; {_FORTH}"
        )
    labels = variables.get(_LABELS)
    if labels is not None and (labels.shape != one.shape[:1] or labels.dtype.kind == "S" or labels.end > length):
        labels = None
    return StoredArray(
        *(place, one.shape, one.dtype, (), length, (1, 1), _Reader(local, one)),
        names=one.names,
        attributes=one.attributes,
        labels=None if labels is None else _Reader(local, labels)((slice(None),)),
    )


class _Reader:
    """Reads parts of a variable: few large pieces of the file, or only what is needed where that is less."""

    def __init__(self, path: Path, variable: _Variable) -> None:
        self._path, self._of = path, variable

    def __call__(self, key: Key) -> NDArray[Any]:
        of, shape = self._of, (*self._of.shape, 1)
        key = (*key, slice(None))
        slices = [one if isinstance(one, slice) else slice(one, one + 1) for one in key]
        ranges = [range(length)[one] for one, length in zip(slices, shape)]
        # The dimensions before `depth` are gone through, place by place; of that one a piece is read, and cut.
        depth = max((axis for axis, one in enumerate(ranges) if len(one) < shape[axis]), default=0)
        while depth and math.prod(map(len, ranges[:depth])) > _MOST_PARTS:
            depth -= 1
        depth = max(depth, 1) if of.record else depth
        strides = [math.prod(shape[axis + 1 :]) * of.dtype.itemsize for axis in range(len(shape))]
        strides[0] = of.record or strides[0]
        pieces = np.empty((math.prod(map(len, ranges[:depth])), len(ranges[depth]), *shape[depth + 1 :]), of.dtype)
        with open(self._path, "rb", buffering=0) as file:
            for piece, before in zip(pieces, itertools.product(*ranges[:depth])):
                place = (*before, ranges[depth].start)
                _fill(file, of.begin + sum(k * stride for k, stride in zip(place, strides)), piece)
        values = pieces.reshape(*map(len, ranges[: depth + 1]), *shape[depth + 1 :])
        cut = values[(*(slice(None),) * (depth + 1), *slices[depth + 1 :])]
        return cut[tuple(slice(None) if isinstance(one, slice) else 0 for one in key)][..., 0]


def _fill(file: Any, offset: int, out: NDArray[Any]) -> None:
    """Read the values of an array from an offset of a file. ImageError if it ends before."""
    if out.size and not fill(file.fileno(), out.reshape(-1).view(np.uint8).data, offset):
        raise ImageError("truncated")


class _Header:
    """The header of a file, from its bytes. ValueError or struct.error if it is damaged."""

    def __init__(self, data: bytes) -> None:
        if data[:3] != MAGIC or data[3] not in _BITS:
            raise ValueError("its first bytes are of no version of NetCDF")
        self._data, self._at = data, 4
        self._count, self._offset = _BITS[data[3]]
        records = self._whole(self._count)
        if records == 256**self._count - 1:
            raise ValueError("its number of records is open, as it was not closed when it was written")
        dimensions = [(self._name(), self._whole(self._count)) for _ in self._listed(_DIMENSIONS)]
        self._read_attributes()
        self.variables: dict[str, _Variable] = {}
        recorded = list[tuple[str, int]]()
        for _ in self._listed(_VARIABLES):
            name, variable, grows = self._variable(dimensions, records)
            self.variables[name] = variable
            if grows:
                recorded.append((name, variable.each))
        # Each value of a record is filled up to four bytes, but not if the records hold one variable alone.
        step = sum(-(-each // 4) * 4 for _, each in recorded) if len(recorded) > 1 else sum(n for _, n in recorded)
        for name, _ in recorded:
            one = self.variables[name]
            self.variables[name] = replace(one, record=step)

    def _variable(self, dimensions: list[tuple[str, int]], records: int) -> tuple[str, _Variable, bool]:
        """Read a variable, and return its name, itself, and True if it has a part in each record."""
        name = self._name()
        of = [dimensions[self._whole(self._count)] for _ in range(self._limited(self._whole(self._count)))]
        attributes = self._read_attributes()
        dtype = self._type()
        self._whole(self._count)  # its size in bytes, which follows from the others and is too small a field for it
        begin = self._whole(self._offset)
        grows = bool(of) and of[0][1] == 0
        shape = tuple(length for _, length in of)
        if dtype.kind == "i" and attributes.get("_Unsigned") == b"true":
            dtype = np.dtype(dtype.str.replace("i", "u"))
        used = {key: value for key, value in attributes.items() if key in _USED and isinstance(value, np.ndarray)}
        used |= {key: used[key].astype(dtype) for key in _MISSING if key in used}
        shape = (records, *shape[1:]) if grows else shape
        return name, _Variable(dtype, begin, shape, tuple(sanitize(one) for one, _ in of), used), grows

    def _read_attributes(self) -> dict[str, Any]:
        """Read a list of attributes: arrays of numbers, or bytes of texts."""
        found = dict[str, Any]()
        for _ in self._listed(_ATTRIBUTES):
            name, dtype = self._name(), self._type()
            data = self._take(self._whole(self._count) * dtype.itemsize)
            found[name] = data if dtype.kind == "S" else np.frombuffer(data, dtype)
        return found

    def _listed(self, tag: int) -> range:
        found, count = self._whole(4), self._limited(self._whole(self._count))
        if found not in (tag, 0) or (found == 0 and count):
            raise ValueError("its header is damaged")
        return range(count)

    def _limited(self, count: int) -> int:
        if count > _MOST_LISTED:
            raise ValueError("its header is damaged, or larger than 16 MB")
        return count

    def _type(self) -> np.dtype[Any]:
        number = self._whole(4)
        if number not in _TYPES:
            raise ValueError("its header is damaged")
        return np.dtype(_TYPES[number])

    def _name(self) -> str:
        return self._take(self._whole(self._count)).decode()

    def _whole(self, width: int) -> int:
        (number,) = struct.unpack_from(">I" if width == 4 else ">Q", self._data, self._at)
        self._at += width
        return int(number)

    def _take(self, count: int) -> bytes:
        """Return so many bytes, which are filled up to a multiple of four."""
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise ValueError("its header is truncated, or larger than 16 MB")
        self._at += -(-count // 4) * 4
        return data
