"""Find images, rows, columns and channels among the named dimensions of an array, as NetCDF, Zarr and xarray have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LATITUDES = frozenset(["lat", "latitude", "rlat"])
_ROWS = {"y", *LATITUDES, "height", "row", "rows", "yc", "northing", "south_north"}
_COLUMNS = {"x", "lon", "longitude", "width", "col", "column", "columns", "rlon", "xc", "easting", "west_east"}
_CHANNELS = {"channel", "channels", "c", "band", "bands", "variable", "variables", "feature", "features", "wavelength"}
_IMAGES = {
    *("time", "t", "n", "sample", "samples", "image", "images", "batch", "member", "ensemble", "number"),
    *("realization", "init_time", "step", "valid_time", "frame", "index"),
}


class Layout(NamedTuple):
    """Positions of the dimensions of an array: those of images, rows, columns and channels."""

    images: tuple[int, ...]
    row: int
    column: int
    channel: int | None

    def count(self, shape: Sequence[int]) -> int:
        """Return the number of images in an array of a shape."""
        found = 1
        for axis in self.images:
            found *= shape[axis]
        return found

    def as_image(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return one image, whose dimensions of images have a length of 1, as [H, W, C]."""
        order = (*self.images, self.row, self.column, *(() if self.channel is None else (self.channel,)))
        turned = values.transpose(order).reshape([values.shape[axis] for axis in order[len(self.images) :]])
        return turned[..., None] if self.channel is None else turned


def layout_of(names: Sequence[str]) -> Layout | None:
    """Return the layout that the names of dimensions show; None if they leave it open.

    Rows and columns need known names, such as y and x or lat and lon. One more dimension is that of images, unless it
    is named as channels. Of two, one is named as channels, or both as images, such as member and time.
    """
    plain = [name.lower() for name in names]
    rows, columns, channels = (
        [axis for axis, name in enumerate(plain) if name in known] for known in (_ROWS, _COLUMNS, _CHANNELS)
    )
    if len(rows) != 1 or len(columns) != 1 or len(channels) > 1:
        return None
    rest = [axis for axis in range(len(plain)) if axis not in (*rows, *columns, *channels)]
    if not rest or (len(rest) > 1 and any(plain[axis] not in _IMAGES for axis in rest)):
        return None
    return Layout(tuple(rest), rows[0], columns[0], channels[0] if channels else None)


def arranged(values: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """Return an array of such a layout as [N, H, W, C], a view where that is possible."""
    order = (*layout.images, layout.row, layout.column, *(() if layout.channel is None else (layout.channel,)))
    count, turned = layout.count(values.shape), np.transpose(values, order)
    sides = turned.shape[len(layout.images) :]
    return turned.reshape(count, *sides, *([1] if layout.channel is None else []))
