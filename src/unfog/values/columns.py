"""`Column`: what a source knows about each of its images, beside the image. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASS = "class"
"""Name and kind of the column that holds class labels."""


@dataclass(frozen=True, eq=False)
class Column:
    """One property of all images of a set, in the order of the images."""

    name: str
    kind: str
    """The kind of condition that it can become, such as "class"."""
    values: NDArray[Any]
    """[N, …], the value of each image, in the units of the source; of "class" int64 [N], an index into `categories`."""
    categories: tuple[str, ...] = ()
    """Names of the values, if they are numbers of categories."""
