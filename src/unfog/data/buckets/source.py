"""A source with the images of one bucket of another source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import Ranges
from unfog.data.sources.base import SomeImages, Source
from unfog.values.columns import Column


class BucketSource(SomeImages):
    """Some of the images of a source, with columns and held-out images that were decided on all of them.

    Args:
        source: with all images.
        rows: indices of the images in the source, increasing.
        columns: of all images of the source.
        held_out: names of all held-out images.
        ranges: of values, for all images of the source.
    """

    def __init__(
        self,
        source: Source,
        rows: NDArray[np.int64],
        columns: Mapping[str, Column],
        held_out: frozenset[str],
        ranges: Ranges,
    ) -> None:
        super().__init__(source, rows, columns)
        self.held_out = held_out.intersection(self.names)
        self.ranges = ranges

    def stamp(self) -> tuple[str, int]:
        digest, size = self._source.stamp()
        of_bucket = hashlib.sha256(f"{digest} bucket {self.ranges}".encode())
        of_bucket.update(np.ascontiguousarray(self._rows).data)
        return of_bucket.hexdigest(), size * len(self._rows) // max(1, len(self._source.names))
