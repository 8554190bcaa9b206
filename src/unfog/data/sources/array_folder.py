"""A folder of .npy files, each of which is one image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.file_rows import map_array
from unfog.data.sources.base import ImageError, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import files_digest, list_only
from unfog.errors import RequestError
from unfog.files.safe_files import regular_file
from unfog.text import sanitize
from unfog.values.axes import channel_axis

_LOOKED_AT = 16  # first images, whose shapes are read when the folder is opened


class ArrayFolder(Source):
    """Images [H, W], [H, W, C] or [C, H, W], one in each .npy file of a folder without sub-folders and picture files.

    RequestError if the axes of one of the first images leave open which of them are channels.
    """

    def __init__(self, folder: Path, name: str, names: list[str], axes: str = "auto") -> None:
        self.folder, self.name, self.names, self._axes = folder, name, names, axes
        self.resolved = str(folder.resolve())
        for i in range(min(_LOOKED_AT, len(names))):
            shape = self._shape(i)
            if len(shape) == 3 and channel_axis(shape, axes=axes) is None:
                raise RequestError(
                    f"{sanitize(name)} has images of the shape {'x'.join(map(str, shape))}; say which axis is that of "
                    "channels: --data.axes NCHW (first) or NHWC (last)"
                )

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form != "folder":
            return None
        names = list_only(location.resolved, ".npy")
        return replace(location, paths=tuple(names)) if names else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ArrayFolder:
        return cls(Path(location.resolved), location.name, list(location.paths), options.axes)

    def read(self, i: int) -> NDArray[Any]:
        values = self._open(i)
        if values.ndim not in (2, 3) or values.dtype.kind not in "uifb" or 0 in values.shape:
            raise ImageError(f"an array of {values.dtype} {list(values.shape)}")
        if values.ndim == 2:
            return np.asarray(values)[..., None]
        axis = channel_axis(values.shape, axes=self._axes)
        if axis is None:
            raise ImageError(f"an array of {list(values.shape)}, whose channels are not known (--data.axes)")
        return np.asarray(values.transpose(1, 2, 0) if axis == 0 else values)

    def stamp(self) -> tuple[str, int]:
        return files_digest(self.folder, self.names)

    def _open(self, i: int) -> NDArray[Any]:
        # Mapped, as a damaged header may claim any size, and reading would make room for it.
        path = self.folder / self.names[i]
        values = map_array(regular_file(path, self.folder, follow=True))
        if not isinstance(values, np.ndarray):
            raise ImageError("an .npz file by another name")
        return values

    def _shape(self, i: int) -> tuple[int, ...]:
        try:
            return tuple(self._open(i).shape)
        except Exception:  # NumPy raises almost anything on damaged files, which decoding reports
            return ()
