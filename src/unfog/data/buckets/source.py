"""A source with the images of one bucket of another source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.sources.base import Source
from unfog.data.values.deep_image import DeepImage
from unfog.data.values.value_range import Ranges
from unfog.values.columns import Column, rows_of


class BucketSource(Source):
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
        self._source, self._rows = source, rows
        self.name, self.resolved, self.remote = source.name, source.resolved, source.remote
        self.names = [source.names[i] for i in rows.tolist()]
        self.columns = rows_of(columns, rows)
        self.held_out = held_out.intersection(self.names)
        self.ranges = ranges
        self.outage = source.outage

    def read(self, i: int) -> Image.Image | DeepImage | NDArray[Any]:
        return self._source.read(int(self._rows[i]))

    def folder_problem(self, i: int) -> str:
        return self._source.folder_problem(int(self._rows[i]))

    def stamp(self) -> tuple[str, int]:
        digest, size = self._source.stamp()
        of_bucket = hashlib.sha256(f"{digest} bucket {self.ranges}".encode())
        of_bucket.update(np.ascontiguousarray(self._rows).data)
        return of_bucket.hexdigest(), size * len(self._rows) // max(1, len(self._source.names))
