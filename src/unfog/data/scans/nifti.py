"""NIfTI files through nibabel: axial slices of volumes, in the orientation of the patient."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.scans.source import ScanSource
from unfog.data.scans.stack import ImageStack, check_length, check_shape, native, scaled, scaled_type
from unfog.data.sources.base import ImageError

_MOST_UNPACKED = 2**29  # bytes of a compressed volume, of which a few are in memory at a time
_MOST_EXTENSIONS = 2**26  # bytes before the voxels
_HEADER_BYTES = 348
_OFFSETS = {348: ("f", 108), 540: ("q", 168)}  # length of a header -> type and place of the offset of its voxels
_COLOURS = {("R", "G", "B"): 3, ("R", "G", "B", "A"): 4}
_X, _Y, _Z = range(3)  # to the right, to the front and up


class NiftiSource(ScanSource):
    """Slices of NIfTI volumes, from the feet up; the front of the patient is at the top, the left at the left."""

    suffixes = (".nii", ".nii.gz")
    prefix: ClassVar[str] = "nifti"
    kind: ClassVar[str] = "NIfTI"
    package: ClassVar[str] = "nibabel"
    most_open: ClassVar[int] = 2  # a compressed one is in memory while it is open

    def open_stack(self, path: Path) -> ImageStack:
        return NiftiStack(path, self._axes)


class NiftiStack(ImageStack):
    """Slices of one volume [x, y, z], or of several [x, y, z, t], whose last axis may be channels instead."""

    def __init__(self, path: Path, axes: str) -> None:
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
        self._order = _orientation(image.affine) if len(sides) > 2 else [(0, 1), (1, 1), (2, 1)]
        self._sides = sides = sides + (1,) * (5 - len(sides))
        stored = np.dtype(self._proxy.dtype)
        self._colours = _COLOURS.get(tuple(name.upper() for name in stored.names or ()), 0)
        self._slope, self._intercept = _scaling(self._proxy)
        dtype = np.dtype(np.uint8) if self._colours else scaled_type(native(np.zeros(0, stored)).dtype, *self._scaling)
        self._volumes_are_channels = axes != "auto" and sides[3] > 1
        channels = (self._colours or 1) * sides[4] * (sides[3] if self._volumes_are_channels else 1)
        x, y, z = (sides[axis] for axis, _ in self._order)
        self.shape, self.dtype = (y, x, channels), dtype
        check_shape(self.shape, dtype)
        self._check_size(stored)
        self.count = z * (1 if self._volumes_are_channels else sides[3])
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
        elif size > _MOST_UNPACKED:
            raise ImageError(f"compressed, and over {_MOST_UNPACKED >> 20} MB unpacked: unpack it (gunzip)")

    def read(self, i: int) -> NDArray[Any]:
        depth = self._sides[self._order[_Z][0]]
        volume, place = divmod(i, depth)
        volumes = range(self._sides[3]) if self._volumes_are_channels else [volume]
        planes = [self._plane(place, t, c) for t in volumes for c in range(self._sides[4])]
        return np.concatenate(planes, -1)

    def _plane(self, place: int, t: int, c: int) -> NDArray[Any]:
        """Return a slice of a volume as [y, x, C], from the front back and from left to right."""
        (x_axis, x_sign), (y_axis, y_sign), (z_axis, z_sign) = self._order
        whole: list[Any] = [slice(None)] * 3
        whole[z_axis] = place if z_sign > 0 else self._sides[z_axis] - 1 - place
        extra = (t, c)[: max(0, len(self._proxy.shape) - 3)]
        key = (*whole[:2],) if len(self._proxy.shape) == 2 else (*whole, *extra)
        plane = np.array(self._values()[key])  # a copy of a part of a mapped file
        if x_axis < y_axis:
            plane = plane.T
        plane = plane[::-y_sign, ::x_sign]  # the first row of a picture is at its top
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
    """Raise ImageError if a header is none, or puts the voxels behind more than nibabel should read before them."""
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


def _orientation(affine: Any) -> list[tuple[int, int]]:
    """Return (axis of the volume, 1 or -1 for its direction) of x, y and z; as stored where that is unknown."""
    import nibabel

    with np.errstate(all="ignore"):
        found = nibabel.io_orientation(affine) if affine is not None and np.isfinite(affine).all() else None
    if found is None or not np.isfinite(found).all():
        return [(0, 1), (1, 1), (2, 1)]
    order = [(0, 1)] * 3
    for axis, (target, sign) in enumerate(found):
        order[int(target)] = (axis, int(sign))
    return order
