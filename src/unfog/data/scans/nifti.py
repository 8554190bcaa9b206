"""NIfTI files through nibabel: slices of volumes along any axis, in the orientation of the patient."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.scans.source import ScanSource
from unfog.data.scans.stack import (
    MOST_UNPACKED,
    TOO_MUCH,
    ImageStack,
    check_length,
    check_shape,
    native,
    scaled,
    scaled_type,
)
from unfog.data.sources.base import NIFTI_SUFFIXES, ImageError
from unfog.values.arrays.slices import AXIAL, Slices

_MOST_EXTENSIONS = 2**26  # bytes before the voxels
_HEADER_BYTES = 348
_OFFSETS = {348: ("f", 108), 540: ("q", 168)}  # length of a header -> type and place of the offset of its voxels
_COLOURS = {("R", "G", "B"): 3, ("R", "G", "B", "A"): 4}
_RIGHT, _FRONT, _UP = range(3)  # directions of the patient
# Plane -> directions of its columns, of its rows from the lowest, and of one slice to the next.
_PLANES = {"axial": (_RIGHT, _FRONT, _UP), "coronal": (_RIGHT, _UP, _FRONT), "sagittal": (_FRONT, _UP, _RIGHT)}

Cut = list[tuple[int, int]]
"""(axis of the volume, 1 or -1 for its direction) of the columns, of the rows from the lowest, and of the slices."""


class NiftiSource(ScanSource):
    """Slices of NIfTI volumes. The head or the front of the patient is at the top, the left or the back at the left."""

    has_volumes = True

    suffixes = NIFTI_SUFFIXES
    mixes_scales = False
    prefix: ClassVar[str] = "nifti"
    kind: ClassVar[str] = "NIfTI"
    package: ClassVar[str] = "nibabel"

    def open_stack(self, path: Path) -> ImageStack:
        return NiftiStack(path, self._axes, self._slices)


class NiftiStack(ImageStack):
    """Slices of one volume [x, y, z], or of several [x, y, z, t], whose last axis may be channels instead.

    With neighbours, an image has the channels of all slices together, from the lowest. The slices at both ends, which
    have too few neighbours, have no image.
    """

    def __init__(self, path: Path, axes: str, slices: Slices) -> None:
        import nibabel

        self._packed = path.name.lower().endswith(".gz")
        _check_offset(path, self._packed)
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            raise ImageError("not NIfTI")
        self._proxy = image.dataobj
        self._path = path
        self._raw: NDArray[Any] | None = None
        sides = tuple(int(side) for side in self._proxy.shape)
        if not 2 <= len(sides) <= 5 or min(sides, default=0) < 1:
            raise ImageError(f"a header with the shape {list(sides)}")
        if len(sides) == 2 and slices != Slices.of(AXIAL):
            raise ImageError("one slice, and no volume that data.slices could cut")
        self._cut = cut_axes(sides, image.affine, slices.plane)
        self._sides = sides = sides + (1,) * (5 - len(sides))
        stored = np.dtype(self._proxy.dtype)
        self._colours = _COLOURS.get(tuple(name.upper() for name in stored.names or ()), 0)
        self._slope, self._intercept = _scaling(self._proxy)
        dtype = np.dtype(np.uint8) if self._colours else scaled_type(native(np.zeros(0, stored)).dtype, *self._scaling)
        self._volumes_are_channels = axes != "auto" and sides[3] > 1
        channels = (self._colours or 1) * sides[4] * (sides[3] if self._volumes_are_channels else 1)
        width, height, depth = (sides[axis] for axis, _ in self._cut)
        if depth < slices.thickness:
            raise ImageError(f"a volume of {depth} slices, fewer than the {slices.thickness} of an image (data.slices)")
        self._together, self._images = slices.thickness, depth - slices.thickness + 1  # of one volume
        self.shape, self.dtype = (height, width, channels * slices.thickness), dtype
        check_shape(self.shape, dtype)
        self._check_size(stored)
        self.count = self._images * (1 if self._volumes_are_channels else sides[3])
        if sides[3] > 1 and axes == "auto":
            self.note = (
                f"volumes of {sides[3]} time points, which are read as so many volumes; --data.axes NHWC reads them as "
                "channels"
            )

    @property
    def _scaling(self) -> tuple[float, float]:
        return self._slope, self._intercept

    def _check_size(self, stored: np.dtype[Any]) -> None:
        """Raise ImageError if the file is shorter than its header says, or unpacks to too much."""
        size = math.prod(self._sides) * stored.itemsize
        if not self._packed:
            check_length(self._path, int(self._proxy.offset) + size)
        elif size > MOST_UNPACKED:
            raise ImageError(TOO_MUCH)

    def read(self, i: int) -> NDArray[Any]:
        volume, first = divmod(i, self._images)
        volumes = range(self._sides[3]) if self._volumes_are_channels else [volume]
        places = range(first, first + self._together)
        planes = [self._plane(place, t, c) for place in places for t in volumes for c in range(self._sides[4])]
        return np.concatenate(planes, -1)

    def _plane(self, place: int, t: int, c: int) -> NDArray[Any]:
        """Return a slice of a volume as [rows from the top, columns, C]."""
        (across, across_sign), (up, up_sign), (depth, depth_sign) = self._cut
        whole: list[Any] = [slice(None)] * 3
        whole[depth] = place if depth_sign > 0 else self._sides[depth] - 1 - place
        extra = (t, c)[: max(0, len(self._proxy.shape) - 3)]
        key = (*whole[:2],) if len(self._proxy.shape) == 2 else (*whole, *extra)
        plane = np.array(self._values()[key])  # a copy of a part of a mapped file
        if across < up:
            plane = plane.T
        plane = plane[::-up_sign, ::across_sign]  # the first row of a picture is at its top
        if self._colours:
            return np.stack([plane[name] for name in plane.dtype.names or ()], -1)
        return scaled(native(plane), *self._scaling)[..., None]

    def _values(self) -> NDArray[Any]:
        """Return the stored values: mapped, or in memory if they are compressed."""
        if self._raw is not None:
            return self._raw
        if not self._packed:
            raw: NDArray[Any] = np.memmap(
                self._path, self._proxy.dtype, "r", int(self._proxy.offset), self._proxy.shape, order="F"
            )
            return raw
        size = math.prod(self._sides) * self._proxy.dtype.itemsize
        with gzip.open(self._path) as file:
            file.seek(int(self._proxy.offset))
            content = file.read(size)
        if len(content) < size:
            raise ImageError("truncated")
        values: NDArray[Any] = np.frombuffer(content, self._proxy.dtype).reshape(self._proxy.shape, order="F")
        self._raw = values
        return values

    def close(self) -> None:
        super().close()
        self._raw = None


def _check_offset(path: Path, packed: bool) -> None:
    """Raise ImageError if a header is invalid, or puts the voxels behind more than nibabel should read before them."""
    with gzip.open(path) if packed else open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
    if len(head) < _HEADER_BYTES:
        raise ImageError("truncated" if head else "empty")
    for order in "<>":
        (size,) = struct.unpack_from(f"{order}i", head)
        if size in _OFFSETS:
            kind, at = _OFFSETS[size]
            (offset,) = struct.unpack_from(f"{order}{kind}", head, at)
            if not 0 <= offset <= _MOST_EXTENSIONS:
                raise ImageError(f"a header that puts its voxels at byte {offset:g}")
            return
    raise ImageError("not NIfTI")


def _scaling(proxy: Any) -> tuple[float, float]:
    """Return slope and intercept; 1 and 0 where the header has none."""
    slope, intercept = float(proxy.slope), float(proxy.inter)
    return (slope, intercept) if math.isfinite(slope) and math.isfinite(intercept) and slope != 0 else (1.0, 0.0)


def cut_axes(shape: Sequence[int], affine: Any, plane: str) -> Cut:
    """Return the axes of slices: those of the patient as the affine says, or of the file for "0", "1" or "2".

    Of axis k, a slice is volume.take(place, k) as NumPy has it, with the first axis down. A file of two axes is one
    slice, as stored.
    """
    if len(shape) < 3:
        return [(0, 1), (1, 1), (2, 1)]
    if plane not in _PLANES:
        down, across = (axis for axis in range(3) if axis != int(plane))
        return [(across, 1), (down, -1), (int(plane), 1)]
    order = _orientation(affine)
    return [order[direction] for direction in _PLANES[plane]]


def _orientation(affine: Any) -> Cut:
    """Return (axis of the volume, 1 or -1 for its direction) to the right, front and up; as stored if unknown."""
    import nibabel

    with np.errstate(all="ignore"):
        found = nibabel.io_orientation(affine) if affine is not None and np.isfinite(affine).all() else None
    if found is None or not np.isfinite(found).all():
        return [(0, 1), (1, 1), (2, 1)]
    order = [(0, 1)] * 3
    for axis, (target, sign) in enumerate(found):
        order[int(target)] = (axis, int(sign))
    return order
