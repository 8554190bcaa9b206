"""A folder of .npy files, each of which is one image; sub-folders are classes, as those of pictures."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.file_rows import map_array
from unfog.data.sources.base import ImageError, LabelTable, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import files_digest, list_only
from unfog.data.sources.image_files import SUFFIXES, os_error_reason
from unfog.errors import RequestError
from unfog.files.safe_files import regular_file
from unfog.text import sanitize
from unfog.values.arrays.axes import channel_axis

_LOOKED_AT = 16  # first images, whose shapes are read when the folder is opened
_GRID = "grid.png"  # of all samples in a folder of them
_SAMPLE = re.compile(r"\d{6}.*")
_NAMES_LOOKED_AT = 1000  # files without a .npy file among them, after which a folder is not one of arrays


class ArrayFolder(Source):
    """Images [H, W], [H, W, C] or [C, H, W], one in each .npy file of a folder without picture files.

    A folder that `unfog sample` wrote has a picture beside each array, which shows some channels of it.

    RequestError if the axes of one of the first images leave open which of them are channels.
    """

    files_differ = True

    def __init__(self, folder: Path, name: str, names: list[str], axes: str = "auto") -> None:
        self.folder, self.name, self.names, self._axes = folder, name, names, axes
        self.resolved = str(folder.resolve())
        if not names:
            self.names, self.unreadable = _list_below(self.resolved)
            names = self.names
        channels = list[int]()
        for i in range(min(_LOOKED_AT, len(names))):
            shape = self._shape(i)
            axis = channel_axis(shape, axes=axes) if len(shape) == 3 else None
            channels.append(1 if axis is None else shape[axis])
            if len(shape) == 3 and axis is None:
                raise RequestError(
                    f"{sanitize(name)} has images of the shape {'x'.join(map(str, shape))}; say which axis is that of "
                    "channels: --data.axes NCHW (first) or NHWC (last)"
                )
        self.usual_image = channels.index(Counter(channels).most_common(1)[0][0]) if channels else 0

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form != "folder":
            return None
        names = list_only(location.resolved, ".npy") or _samples_with_views(location.resolved)
        below = not names and bool(_list_below(location.resolved, _NAMES_LOOKED_AT)[0])
        return replace(location, paths=tuple(names)) if names or below else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ArrayFolder:
        folder = Path(location.resolved)
        of_samples = bool(location.paths) and (folder / _GRID).exists()
        axes = "NHWC" if of_samples and options.axes == "auto" else options.axes
        return cls(folder, location.name, list(location.paths), axes)

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

    def table(self, name: str) -> LabelTable | None:
        return LabelTable.inside(self.folder, name)

    def stamp(self) -> tuple[str, int]:
        return files_digest(self.folder, self.names)

    def _open(self, i: int) -> NDArray[Any]:
        # Mapped, as a damaged header may claim any size, and reading would make room for it.
        path = self.folder / self.names[i]
        try:
            values = map_array(regular_file(path, self.folder, follow=True))
        except ValueError as error:
            raise ImageError(str(error)[:120]) from error
        if not isinstance(values, np.ndarray):
            raise ImageError("an .npz file by another name")
        return values

    def _shape(self, i: int) -> tuple[int, ...]:
        try:
            return tuple(self._open(i).shape)
        except Exception:  # NumPy raises almost anything on damaged files, which decoding reports
            return ()


def _samples_with_views(folder: str) -> list[str]:
    """Return the sorted names of the arrays in a folder that `unfog sample` wrote with pictures of them, else []."""
    if not os.path.isfile(os.path.join(folder, _GRID)):
        return []
    arrays, views = set[str](), set[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, ending = os.path.splitext(entry.name)
            if _SAMPLE.fullmatch(stem):
                arrays |= {stem} if ending.lower() == ".npy" else set()
                views |= {stem} if ending.lower() in SUFFIXES else set()
    return sorted(f"{stem}.npy" for stem in arrays) if arrays == views else []


def _list_below(folder: str, patience: int | None = None) -> tuple[list[str], list[SkippedFile]]:
    """Return (the .npy files in a folder and below it, sorted; folders left out).

    No files if there is a picture, as it is a folder of pictures then, or if the first `patience` files are others.
    """
    found, left_out, others, pending = list[str](), list[SkippedFile](), 0, [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(os.path.join(folder, prefix)) as found_here:
                entries = list(found_here)
        except OSError as error:
            left_out.append(SkippedFile(prefix, f"a folder {os_error_reason(error)}"))
            continue
        for entry in entries:
            name, ending = prefix + entry.name, os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                continue
            # os.path.isdir is False for links in a circle, of which entry.is_dir is an error.
            linked = entry.is_symlink()
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                if linked:
                    left_out.append(SkippedFile(f"{name}/", "a link to a folder, which is not followed among arrays"))
                else:
                    pending.append(f"{name}/")
            elif ending in SUFFIXES:
                return [], []
            elif ending == ".npy":
                found.append(name)
            else:
                others += 1
                if patience is not None and not found and others > patience:
                    return [], []
    return sorted(found), sorted(left_out)
