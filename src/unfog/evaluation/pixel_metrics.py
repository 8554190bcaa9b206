"""Metrics of pixels themselves, which need no features: sliced Wasserstein distance and detail by frequency."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unfog.errors import RequestError
from unfog.evaluation.detail import compare_detail
from unfog.evaluation.metrics import MetricResult
from unfog.evaluation.sliced_wasserstein import compare_sliced

PIXEL_METRICS = ("sliced", "detail")


def compare_pixels(names: Sequence[str], real: Tensor, fake: Tensor) -> list[MetricResult]:
    """Return metrics of pixels uint8 [N, C, H, W], [M, C, H, W]: of each name its value, then its parts by scale.

    Raises:
        RequestError: a name that is no such metric; images that are too small, too few or of two shapes.
    """
    results = list[MetricResult]()
    for name in names:
        if name not in PIXEL_METRICS:
            raise RequestError(f"metric = {name!r} of pixels is unknown; give one of {', '.join(PIXEL_METRICS)}")
        results += compare_sliced(real, fake) if name == "sliced" else compare_detail(real, fake)
    return results
