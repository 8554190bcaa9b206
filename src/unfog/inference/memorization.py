"""Memorization checks: generated images that copy training images, by pixels and by metric features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.inference.nearest_images import (
    FEWEST,
    NearestImages,
    check_memorization,
    find_nearest,
    find_nearest_features,
)
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import Pixels

_REAL = 256
"""Number of real images that show how near unseen images usually are."""
DRAWN = 500
"""Generated images that are checked, at most."""
_ENOUGH = 20
"""Fewest held-out images for a comparison."""


class UnseenImages:
    """Real images to compare with: held-out images, or too few of those, training images among the others."""

    def __init__(self, prepared: Dataset):
        self.enough = len(prepared.held_out) >= _ENOUGH
        self.images: ImageSet = prepared.held_out if self.enough else prepared.train
        self.rows: NDArray[np.int64] = evenly_spaced(len(self.images), _REAL)
        self.what = "held-out images" if self.enough else "training images among the others"

    @property
    def pixels(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.images.pixels[self.rows])

    @property
    def own(self) -> list[int]:
        """Index of each among the training images; -1 for none."""
        return [-1] * len(self.rows) if self.enough else self.rows.tolist()


def check_memorization_by_pixels(drawn: Pixels, prepared: Dataset, progress: Callable[[int], None]) -> Finding:
    """Compare generated images [N, H, W, C] with all training images by pixels."""
    unseen, train = UnseenImages(prepared), prepared.train
    queries = torch.cat([torch.from_numpy(drawn).permute(0, 3, 1, 2), torch.from_numpy(unseen.pixels)])
    both = find_nearest(queries, train.pixels, [-1] * len(drawn) + unseen.own, progress)
    found, usual = _split_queries(both, len(drawn))
    matches = train.pixels[found.image[:, 0].numpy()].transpose(0, 2, 3, 1)
    return check_memorization(drawn, found, usual, matches, unseen.what, len(train))


def check_memorization_by_features(
    drawn: Pixels, features: Tensor, real: Tensor, rows: NDArray[np.int64], unseen: Tensor, prepared: Dataset
) -> Finding:
    """Compare features of generated images [N, D], of training images `rows` [R, D], and of `UnseenImages`."""
    usual = UnseenImages(prepared)
    place = {int(row): i for i, row in enumerate(rows)}
    own = [place.get(row, -1) for row in usual.own]
    both = find_nearest_features(torch.cat([features, unseen]), real, [-1] * len(features) + own)
    found, other = _split_queries(both, len(features))
    matches = prepared.train.pixels[rows[found.image[:, 0].numpy()]].transpose(0, 2, 3, 1)
    # Distance of equal images in this scale: a thousandth of the distance of real images to their neighbours.
    same = 1e-3 * float(other.distance[:, 1:].median())
    return check_memorization(drawn, found, other, matches, usual.what, len(rows), same)


def enough_images(prepared: Dataset) -> bool:
    """Return True where there are enough training images to tell copies from similar images."""
    return len(prepared.train) >= FEWEST


def _split_queries(both: NearestImages, count: int) -> tuple[NearestImages, NearestImages]:
    return (
        NearestImages(both.distance[:count], both.image[:count]),
        NearestImages(both.distance[count:], both.image[count:]),
    )
