"""Fit the value map of a run to its training images, from a bounded sample of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.data.settings import Data
from unfog.text import plural
from unfog.values import value_maps
from unfog.values.unknown import Suspect, find_unknown, mask_to_text, suspect_unknown

_VALUES_READ = 2**24  # of the training images: 64 MB
_VALUES_SUSPECTED = 2**22
_BLOCK = 64  # images that are read at once


def fit_values(
    dataset: Dataset, on_suspect: Callable[[Suspect], None] = lambda suspect: None
) -> tuple[Dataset, list[str]]:
    """Return the dataset with its value map fitted and its unknown values counted, and a line on each that is new.

    Both are of all training images, or of evenly spread ones that have 17 million values in all. `on_suspect` is called
    with a number of them that may stand for unknown values, if none was named. RequestError if a map does not fit the
    values.
    """
    settings = dataset.settings
    to_fit = settings.fitted_map and not settings.map_values
    to_find = settings.has_unknown and not settings.unknown_share
    if not (to_fit or to_find) or not len(dataset.train):
        return dataset, []
    rows = _sampled_rows(dataset.train)
    values = _read(dataset.train, rows)
    of = f"{len(values):,} of " * (len(values) < len(dataset.train)) + f"{len(dataset.train):,} training images"
    lines = []
    if settings.filler is not None:
        # Floating point is stored with NaN, whatever stood for it.
        unknown = np.isnan(values) | find_unknown(values, settings.filler)
        values[unknown] = np.nan
        settings = replace(settings, unknown_share=float(unknown.mean()), unknown_mask=mask_to_text(np.all(unknown, 0)))
        lines.append(_unknown_line(settings, unknown, of))
    elif (suspect := suspect_unknown(values)) is not None:
        on_suspect(suspect)
    if to_fit:
        maps = value_maps.fit(settings.fitted_map, values)
        ends = tuple(float(end(values[:, c])) for c in range(values.shape[1]) for end in (np.nanmin, np.nanmax))
        settings = replace(settings, map=settings.fitted_map, map_values=value_maps.flat(maps), map_range=ends)
        lines.append(_line(settings, values, of))
    return replace(dataset, settings=settings), lines


def suspect_filler(dataset: Dataset) -> Suspect | None:
    """Return the number that may stand for unknown values of a fitted dataset, if none was named; None without.

    At most four million values are read. Only maps that are fitted to the values suffer from such a number, of which
    `fit_values` says it as it fits them.
    """
    settings = dataset.settings
    if not settings.fitted_map or settings.has_unknown or not len(dataset.train):
        return None
    return suspect_unknown(_read(dataset.train, _sampled_rows(dataset.train, _VALUES_SUSPECTED)))


def _sampled_rows(images: ImageSet, values: int = _VALUES_READ) -> NDArray[np.int64]:
    each = int(np.prod(images.pixels.shape[1:]))
    return np.asarray(evenly_spaced(len(images), max(1, values // each)), np.int64)


def _read(images: ImageSet, rows: NDArray[np.int64]) -> NDArray[Any]:
    values = np.empty((len(rows), *images.pixels.shape[1:]), np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        values[start : start + len(block)] = images.take(block).pixels
    return values


def _unknown_line(settings: Data, unknown: NDArray[np.bool_], of: str) -> str:
    images, always = int(unknown.any((1, 2, 3)).sum()), float(unknown.all(0).mean())
    if not images:
        return f"data.unknown = {settings.unknown}: all values are known in {of}"
    said = f"{settings.unknown_share:.2%} of the values are unknown, in {plural(images)} of {of}"
    complete = ", and samples are complete"
    return f"data.unknown = {settings.unknown}: {said}" + (
        f"; {always:.2%} are unknown in all of them, and in samples: `unfog sample --measure` must not use these"
        if always
        else complete
    )


def _line(settings: Data, values: NDArray[Any], of: str) -> str:
    found = f"{np.nanmin(values):,.6g} to {np.nanmax(values):,.6g}"
    ends = value_maps.describe(settings.stored_values.maps)
    return f"data.map = {settings.map}: values from {found} in {of}; -1 to 1 for the network is {ends}"
