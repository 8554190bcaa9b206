"""Draws for held-out images from conditions that are images, such as a smaller copy, compared with the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.evaluation.image_agreement import ImageAgreement, agreement
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, Given
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.kinds.image_kinds import IMAGE_KINDS, as_floats, image_columns

DRAWS = 4
"""Draws for each image."""
MOST_IMAGES = 64
_FEWEST_IMAGES = 2
_REACH = 2.0  # from -1 to 1

Draw: TypeAlias = Callable[[int, Given], NDArray[Any]]
"""(count, conditions that the samples cycle through) -> stored samples [N, H, W, C]."""


def compared_columns(format: ConditionFormat) -> tuple[ColumnFacts, ...]:
    """Return the conditions that are images whose truth is known: all but masks, which a judge reads."""
    return tuple(one for one in image_columns(format.columns) if IMAGE_KINDS[one.kind].smooth)


def compare_with_truth(config: Config, dataset: Dataset, draw: Draw, most: int = MOST_IMAGES) -> list[ImageAgreement]:
    """Draw `DRAWS` samples for each of at most `most` held-out images from all their conditions, and compare them.

    [] if fewer than two images are held out with such conditions, or all have values that are not known.
    """
    columns, images = compared_columns(config.conditions), dataset.held_out
    if not columns or len(images) < _FEWEST_IMAGES:
        return []
    rows = _known_rows(columns, images, evenly_spaced(len(images), max(_FEWEST_IMAGES, most)))
    if len(rows) < _FEWEST_IMAGES:
        return []
    format, taken = config.image_format, images.take(rows)
    truth = format.to_model(torch.from_numpy(np.ascontiguousarray(taken.pixels))).float()
    stored = draw(DRAWS * len(rows), config.conditions.rows(taken.columns.values(), slice(None)))
    drawn = format.to_model(torch.from_numpy(np.ascontiguousarray(stored.transpose(0, 3, 1, 2)))).float()
    draws = drawn.reshape(DRAWS, *truth.shape)
    names = ", ".join(one.name for one in columns)
    given = _as_image(columns[0], taken.columns, truth) if len(columns) == 1 else None
    return agreement(names, draws, truth, given, _REACH)


def _known_rows(columns: tuple[ColumnFacts, ...], images: ImageSet, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the rows whose images and conditions are known."""
    taken = images.take(rows)
    known = np.ones(len(rows), bool)
    for one in columns:
        known &= IMAGE_KINDS[one.kind].known(taken.columns[one.name].values)
    if taken.pixels.dtype.kind == "f":
        known &= np.isfinite(taken.pixels).all((1, 2, 3))
    return rows[known]


def _as_image(one: ColumnFacts, taken: Mapping[str, Column], truth: Tensor) -> Tensor | None:
    """Return a condition as images like `truth`, with the mean of an image where it is missing; None of other kinds."""
    if not IMAGE_KINDS[one.kind].made:
        return None
    values = torch.from_numpy(as_floats(np.asarray(taken[one.name].values[:])))
    mean = values.nanmean((2, 3), keepdim=True)
    return torch.where(values.isfinite(), values, mean).expand_as(truth)
