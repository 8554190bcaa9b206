"""Fit the value map of a run to its training images, from a bounded sample of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.data.settings import Data
from unfog.values import value_maps

_VALUES_READ = 2**24  # of the training images: 64 MB
_BLOCK = 64  # images that are read at once


def fit_values(dataset: Dataset) -> tuple[Dataset, str]:
    """Return the dataset with the value map of its settings fitted, and a line on it; (dataset, "") if none is to fit.

    The map is fitted to all training images, or to evenly spread ones that have 17 million values in all. RequestError
    if a map does not fit the values.
    """
    settings = dataset.settings
    if not settings.fitted_map or settings.map_values or not len(dataset.train):
        return dataset, ""
    rows = _sampled_rows(dataset.train)
    values = _read(dataset.train, rows)
    maps = value_maps.fit(settings.fitted_map, values)
    fitted = replace(settings, map=settings.fitted_map, map_values=value_maps.flat(maps))
    return replace(dataset, settings=fitted), _line(fitted, values, len(dataset.train))


def _sampled_rows(images: ImageSet) -> NDArray[np.int64]:
    each = int(np.prod(images.pixels.shape[1:]))
    return np.asarray(evenly_spaced(len(images), max(1, _VALUES_READ // each)), np.int64)


def _read(images: ImageSet, rows: NDArray[np.int64]) -> NDArray[Any]:
    values = np.empty((len(rows), *images.pixels.shape[1:]), np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        values[start : start + len(block)] = images.take(block).pixels
    return values


def _line(settings: Data, values: NDArray[Any], images: int) -> str:
    found = f"{values.min():,.6g} to {values.max():,.6g}"
    of = f"{images:,} training images" if len(values) == images else f"{len(values):,} of {images:,} training images"
    ends = value_maps.describe(settings.stored_values.maps)
    return f"data.map = {settings.map}: values from {found} in {of}; -1 to 1 for the network is {ends}"
