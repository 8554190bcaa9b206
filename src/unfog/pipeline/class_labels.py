"""Class labels for samples that are compared with a data set, in its class proportions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unfog.errors import RequestError

_GOLDEN = (5**0.5 - 1) / 2


def proportional_labels(labels: NDArray[np.integer] | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return labels for `count` samples, in the class proportions of a data set.

    Sample i gets the class at the fraction (i + 1/2) / golden ratio (mod 1) of the data set sorted by class, so its
    label depends on i alone. After n samples the share of a class is off by about log(n) / n, against 1 / sqrt(n) for
    random labels, whose scatter would add to a Frechet distance.

    Args:
        labels: of the data set, integers from 0; None without classes, which returns ().
        count: number of samples.

    Raises:
        RequestError: `labels` is empty.
    """
    if labels is None:
        return ()
    present = np.asarray(labels, dtype=np.int64)
    if present.ndim != 1 or not len(present):
        raise RequestError("labels like those of a data set need one that has labels; without classes, give none")
    cumulative = np.bincount(present).cumsum() / len(present)
    fractions = (np.arange(count) + 0.5) * _GOLDEN % 1
    return tuple(np.searchsorted(cumulative, fractions, side="right").tolist())
