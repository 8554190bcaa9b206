"""`StoredArray`, an array in a container that is read by parts, and the checks of what it claims to be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.sources.arrays import free_memory
from unfog.errors import RequestError

_LISTED = 12  # arrays of a container that an error lists
_MOST_RATIO = 10_000  # times as many chunks or bytes as are stored, from which on a shape is not believed
_SMALL = 2**26  # bytes of an array whose shape is always believed
_MEMORY_SHARE = 0.5  # of the free memory, for one chunk or image

_NUMBERS = re.compile(r"[<>|=]?([biuf][1248]|bool|u?int\d+|float(16|32|64))")  # types of arrays of images

Key = tuple[int | slice, ...]


@dataclass(frozen=True)
class StoredArray:
    """An array in a container. Its values are read by parts, and never as a whole."""

    place: str
    """Its container and name, for messages."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    """Shape of its chunks, () if its values lie in one piece."""
    stored_bytes: int
    """Bytes of the file or files."""
    chunks: tuple[int, int]
    """(chunks that are stored, chunks of the shape)."""
    read: Callable[[Key], NDArray[Any]]
    """Read a part; the key has one item for each dimension. Safe in threads."""
    names: tuple[str, ...] = ()
    """Names of the dimensions, () without."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    labels: NDArray[Any] | None = None
    """[N] labels beside the array."""

    def check(self) -> None:
        """Raise RequestError if the values are not numbers, or the shape cannot be believed or read."""
        place, shape = self.place, "x".join(map(str, self.shape))
        check_type(self.dtype, place)
        if not self.shape or 0 in self.shape:
            raise RequestError(f"{place} has the shape {shape or '()'}, and so no values; give another array")
        stored, expected = self.chunks
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        most = max(_SMALL, _MOST_RATIO * self.stored_bytes)
        if nbytes > most or expected > _MOST_RATIO * max(1, stored):
            raise RequestError(
                f"{place} claims {nbytes / 1e9:,.3g} GB of values ({shape}), and {self.stored_bytes:,} bytes are "
                "stored; restore the file, or write the array anew"
            )
        if not stored:
            raise RequestError(f"no value of {place} is stored, only its shape {shape}; restore the missing chunks")
        free, chunk = free_memory(), math.prod(self.chunk) * self.dtype.itemsize if self.chunk else 0
        if free is not None and chunk > _MEMORY_SHARE * free:
            raise RequestError(
                f"{place} has chunks of {chunk / 1e9:,.1f} GB, over half of the {free / 1e9:,.1f} GB of memory that "
                "are free; write it with smaller chunks, best one image in each"
            )

    @property
    def missing_line(self) -> str:
        """A line on chunks that are not stored; "" if all are."""
        stored, expected = self.chunks
        if stored >= expected:
            return ""
        return (
            f"{expected - stored:,} of {expected:,} chunks of {self.place} are not stored, and are read as its fill "
            "value; if files are lost, restore them; NaN as fill value leaves such images out"
        )


def check_type(dtype: np.dtype[Any], place: str) -> None:
    """Raise RequestError for values that are not real numbers."""
    if dtype.names is not None:
        fields = ", ".join(map(str, dtype.names[:5]))
        raise RequestError(f"{place} holds records ({fields}); store one field as an array of its own")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        what = {"c": "complex numbers", "O": "objects or values of varying length", "S": "texts", "U": "texts"}
        remedy = "store their magnitude: np.abs(x)" if dtype.kind == "c" else "give an array of numbers"
        raise RequestError(f"{place} holds {what.get(dtype.kind, str(dtype))}; {remedy}")


def choose(found: Mapping[str, tuple[Sequence[int], str]], container: str) -> str:
    """Return the name of the only array of numbers with three dimensions or more.

    `found` has (shape, type) of each array. RequestError lists all if there are several or none.
    """
    images = [
        name for name, (shape, kind) in found.items() if len(shape) >= 3 and 0 not in shape and _NUMBERS.fullmatch(kind)
    ]
    if len(images) == 1:
        return images[0]
    if not found:
        raise RequestError(f"{container} holds no arrays; give a file that has some")
    shown = images or list(found)
    listed = ", ".join(f"{name} ({'x'.join(map(str, found[name][0]))} {found[name][1]})" for name in shown[:_LISTED])
    more = f", … ({len(shown):,} in all)" if len(shown) > _LISTED else ""
    if not images:
        raise RequestError(
            f"{container} has no array of numbers with three dimensions or more, as images need: {listed}{more}"
        )
    raise RequestError(
        f"{container} has several arrays: {listed}{more}; name one: {container}:{shown[0]}; or several as "
        "channels, from Python: one array, such as xarray.open_dataset(FILE).to_array('variable')"
    )
