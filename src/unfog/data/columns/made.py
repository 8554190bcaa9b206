"""Columns of conditions that are made of the images themselves, computed as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.columns.image_setting import split_images
from unfog.data.dataset import Dataset, ImageSet, take_with_rows
from unfog.errors import RequestError
from unfog.values.columns import Column, in_order, without_class
from unfog.values.image_format import ImageFormat, in_colour


class MadeValues:
    """Conditions float32 [N, C, H, W] of the images of a set, which are not augmented; `made_conditions` makes them.

    Args:
        images: the set.
        format: of its images.
        kind: of the condition.
        factor: of "degrade".
        rows: rows of the set, [N]; None for all.
    """

    dtype = np.dtype(np.float32)
    is_made = True
    """So that no digest reads them: they follow from the images and the settings."""

    def __init__(
        self, images: ImageSet, format: ImageFormat, kind: str, factor: int, rows: NDArray[np.int64] | None = None
    ) -> None:
        self._images, self._format, self._kind, self.factor = images, format, kind, factor
        self._rows = np.arange(len(images)) if rows is None else rows
        channels = 1 if kind == "grey" else format.channels
        self.shape = (len(self._rows), channels, format.height, format.width)

    def at(self, rows: NDArray[np.int64]) -> MadeValues:
        """Return the conditions at these rows [M], which are computed as they are read too."""
        return MadeValues(self._images, self._format, self._kind, self.factor, self._rows[rows])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[np.float32]:
        """Return the conditions of the images that a slice, or an array of integers or booleans, selects."""
        import torch

        from unfog.values.kinds.made_conditions import fixed_draws, made_of

        rows = self._rows[key]
        pixels, used = take_with_rows(self._images.pixels, rows)
        x0 = self._format.to_model(torch.from_numpy(np.ascontiguousarray(pixels)))
        made: NDArray[np.float32] = made_of(x0, self._kind, self.factor, lambda: fixed_draws(used.tolist())).numpy()
        return made


def add_made(dataset: Dataset) -> Dataset:
    """Return the dataset with the columns that `data.condition` makes of the images.

    RequestError if the images have no such condition, as they are grey, or of another size.
    """
    made = split_images(dataset.settings.condition)[0].made
    if not made:
        return dataset
    for part in (dataset, *dataset.buckets):
        _check_made(made, part.settings.image_format)
    taken = without_class(dataset.train.columns)
    if twice := next((name for name in made if name in taken), ""):
        raise RequestError(f"condition = {twice} is made of the image, and a column has the same name; rename that")

    def added(images: ImageSet, format: ImageFormat) -> ImageSet:
        values = {name: MadeValues(images, format, name, factor or 1) for name, factor in made.items()}
        new: Mapping[str, Column] = {name: Column(name, name, each) for name, each in values.items()}  # type: ignore[arg-type]
        # The images' own fingerprint, as the settings say what is made of them.
        return replace(images, columns=in_order({**images.columns, **new}))

    def with_added(part: Dataset) -> Dataset:
        format = part.settings.image_format
        return replace(part, train=added(part.train, format), held_out=added(part.held_out, format))

    return replace(with_added(dataset), buckets=tuple(map(with_added, dataset.buckets)))


def _check_made(made: Mapping[str, int], format: ImageFormat) -> None:
    """Raise RequestError if images of a format have no such conditions."""
    if "grey" in made and not in_colour(format.channels):
        raise RequestError(f"condition = grey is the brightness of images in colour, and these are {format}; omit it")
    factor = made.get("degrade", 1)
    if not suits_factor(format.height, format.width, factor):
        raise RequestError(
            f"condition = degrade:factor={factor} needs sides that are multiples of {factor}, and two pixels a side "
            f"at least, and the images are {format.sides}; give another factor or --size"
        )


def suits_factor(height: int, width: int, factor: int) -> bool:
    """Return True if images of this size can be made smaller by a factor: it divides them, and leaves two pixels."""
    return height % factor == width % factor == 0 and min(height, width) // factor >= 2


def without_made(images: ImageSet) -> ImageSet:
    """Return the set without the columns that are made of its images."""
    kept = {name: column for name, column in images.columns.items() if not getattr(column.values, "is_made", False)}
    return images if len(kept) == len(images.columns) else replace(images, columns=kept)
