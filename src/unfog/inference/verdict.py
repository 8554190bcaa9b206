"""Verdict of an evaluation: how near the samples are to real images, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unfog.evaluation.metrics import MetricResult

# Share of the value that real images have, from which precision and recall count as reached.
_REACHED = 0.9
# Below this share of their recall, nearly all variety is lost. Then precision means nothing: samples that are all alike
# and lie amid the real images, such as noise that is nearly grey, can have a precision of 1.
_ALIKE = 0.1
_DISTANCES = ("fid", "kid", "fd", "sliced")  # the first that was measured is named
_JUDGED = {
    (True, True): "The samples look like real images and are as varied",
    (True, False): "The samples look like real images, but are less varied",
    (False, True): "The samples are as varied as real images, but many do not look like them",
    (False, False): "Many samples do not look like real images, and they are less varied",
}
_COLLAPSED = "The samples have almost nothing of the variety of real images, so that precision does not count"
_NEAR = "The samples are as close to real images as real images are to each other"
_FAR = "The samples are farther from real images than real images are from each other"


def verdict(measured: Sequence[MetricResult], copies: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the verdict; "" where no metric was measured on real images too.

    Precision says how many samples look real, and recall how much of the variety is reached. Each is judged by what
    real images reach against other real images.
    """
    known = {one.metric: one for one in measured if one.value is not None and one.real is not None}
    distance = next((known[name] for name in _DISTANCES if name in known), None)
    shares = [known[name] for name in ("precision", "recall") if name in known]
    if len(shares) == 2:
        looks_real, varied = (_reached(one) for one in shares)
        said = _JUDGED[looks_real, varied] if _reached(shares[1], _ALIKE) else _COLLAPSED
    elif distance is not None:
        said = _NEAR if _near(distance) else _FAR
    else:
        return ""
    evidence = [f"{one.metric} {one.value:.3g} (real images {one.real:.3g})" for one in (*shares, distance) if one]
    copied = "; some are nearly copies of training images" if any(c["severity"] == "warning" for c in copies) else ""
    return f"{said}: {', '.join(evidence)}{copied}."


def _near(one: MetricResult) -> bool:
    # A kernel distance may be negative; its interval tells whether it is more than that of real images.
    lowest = one.value if one.low is None else one.low
    return lowest is not None and one.real is not None and lowest <= max(one.real, one.real / _REACHED)


def _reached(one: MetricResult, share: float = _REACHED) -> bool:
    return one.value is not None and one.real is not None and one.value >= share * one.real
