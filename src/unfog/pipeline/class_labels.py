"""Labels for pictures that are compared with a data set: each class as often as it is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unfog.errors import RequestError

_GOLDEN = (5**0.5 - 1) / 2


def proportional_labels(labels: NDArray[np.integer] | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Labels for `count` pictures, in the proportions of a data set's own.

    Picture i is the class at the fraction (i + 1/2) / golden ratio of the data set, put in order of class. Its label so
    depends on i alone, not on `count`, and the share of each class is met as closely as can be: after n pictures it is
    off by about log(n) / n, against 1 / sqrt(n) for labels drawn at random, whose scatter a Frechet distance would see.

    Args:
        labels: of the images that the pictures are compared with, whole numbers from 0; None without classes, which
            gives ().
        count: of the pictures.

    Raises:
        RequestError: there are no labels.
    """
    if labels is None:
        return ()
    present = np.asarray(labels, dtype=np.int64)
    if present.ndim != 1 or not len(present):
        raise RequestError("labels like those of a data set need one that has labels; without classes, give none")
    cumulative = np.bincount(present).cumsum() / len(present)
    fractions = (np.arange(count) + 0.5) * _GOLDEN % 1
    return tuple(np.searchsorted(cumulative, fractions, side="right").tolist())
