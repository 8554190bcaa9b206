"""Sides of the originals: which size suits them, what is enlarged, and what the centre crop throws away."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import Dataset
from unfog.doctor.images.example_images import format_percent, format_share, image_names, list_names
from unfog.doctor.images.near_duplicates import Indices
from unfog.doctor.images.pixel_statistics import evenly_spread_rows
from unfog.reporting.charts import histogram
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""What is recommended: they can be halved often, and pixels beyond the last are better drawn by other means."""

_ENLARGED = 0.05
"""Share of images that may be enlarged."""

_SLIGHT = 1.1  # times that an image may be enlarged, or its sides differ, without anybody seeing it
_HALF = 0.5  # share of an image's area; what loses more shows another subject
_MANY_HALVES, _MUCH = 0.01, 0.2
_ROWS = 12


class _Originals(NamedTuple):
    """Sides of the original images that are looked at."""

    prepared: Dataset
    rows: Indices
    """[N], which they are, counting the training images first."""

    sides: NDArray[np.int32]
    """[N, 2], width and height."""

    def names(self, which: Indices) -> list[str]:
        """Names of some of `rows`, the first MOST_NAMES."""
        return image_names(self.prepared, self.rows[which])


def check_sizes(prepared: Dataset, most: int | None = None) -> list[Finding]:
    """Sides, enlarged images and the crop of all images, or of `most` evenly spread ones.

    Nothing where the sides of the originals are not known.
    """
    train, held_out = prepared.train, prepared.held_out
    if not len(train.sides):
        return []
    rows = evenly_spread_rows(len(train), len(held_out), most)
    inside = rows < len(train)
    sides = np.concatenate([train.sides[rows[inside]], held_out.sides[rows[~inside] - len(train)]])
    originals = _Originals(prepared, rows, sides)
    return [_sizes(originals), _upscaled(originals), _crop(originals)]


def recommended_size(sides: NDArray[np.int32]) -> int:
    """The largest of SIZES that enlarges under 5% of originals [N, 2] and at most half by a hair; their own size if
    that is one square of at most 64 that can be halved twice."""
    short = sides.min(1)
    if (sides == sides[0, 0]).all() and 8 <= short[0] <= 64 and short[0] % 4 == 0:
        return int(short[0])
    limit = min(np.quantile(short, _ENLARGED), np.median(short))
    return max((size for size in _SIZES if size <= limit), default=_SIZES[0])


def _sizes(originals: _Originals) -> Finding:
    sides, size = originals.sides, originals.prepared.settings.size
    short = sides.min(1)
    best = recommended_size(sides)
    low, middle, high = (int(x) for x in (short.min(), np.median(short), short.max()))
    facts = {"shortest": low, "median": middle, "longest_short": high, "size": size, "recommended": best}
    if low == high and (sides == low).all():
        return Finding("data.sizes", "fine", f"all images are {low}x{low}; trained at {size}x{size}", facts=facts)
    evidence = f"short sides are {low:,} to {high:,} pixels, half of them under {middle:,}; trained at {size}x{size}"
    if best > size:
        evidence += f"; up to --size {best} there are pixels for it"
    ratio = sides.max(1) / np.maximum(short, 1)
    exhibits = (
        Figure("Short sides", svg=histogram(short, "pixels", "images")),
        Figure("Long side / short side", svg=histogram(np.minimum(ratio, 10), "ratio, 10 and more as 10", "images")),
    )
    return Finding("data.sizes", "fine", evidence, "", facts, exhibits)


def _upscaled(originals: _Originals) -> Finding:
    sides, size = originals.sides, originals.prepared.settings.size
    short = sides.min(1)
    enlarged = np.flatnonzero(short * _SLIGHT < size)
    best, part = recommended_size(sides), len(enlarged) / len(sides)
    facts = {"images": len(enlarged), "share": part, "size": size, "recommended": best}
    if not len(enlarged):
        return Finding("data.upscaled", "fine", f"no image is enlarged to {size}x{size}", facts=facts)
    smallest = enlarged[np.argsort(short[enlarged], kind="stable")]
    names = originals.names(smallest)
    few = part < 0.3 or best >= size  # then they are the exception, and the size is right for the others
    remedy = f"remove or replace those under {size} pixels" + (f", or use --size {best}" if best < size else "")
    return Finding(
        "data.upscaled",
        "warning" if part >= _ENLARGED else "hint",
        f"{format_share(len(enlarged), len(sides))} images are enlarged to {size}x{size}, the smallest "
        f"{short[smallest[0]]} pixels ({list_names(names)}): blur is learned from them",
        remedy if few else f"use --size {best}",
        {**facts, "names": names},
    )


def _crop(originals: _Originals) -> Finding:
    sides = originals.sides
    lost = 1 - sides.min(1) / np.maximum(sides.max(1), 1)
    halved = np.flatnonzero(lost > _HALF)
    halved = halved[np.argsort(-lost[halved], kind="stable")]
    mean, worst, names = float(lost.mean()), float(lost.max()), originals.names(halved)
    facts = {"mean": mean, "worst": worst, "over_half": len(halved), "names": names}
    if worst < 1 - 1 / _SLIGHT:
        evidence = (
            "the images are square" if worst == 0 else f"the centre crop takes away at most {format_percent(worst)}"
        )
        return Finding("data.crop", "fine", evidence, facts=facts)
    severity: Severity = "fine"
    if len(halved) >= max(1, _MANY_HALVES * len(sides)):
        severity = "warning"
    elif len(halved) or mean >= _MUCH:
        severity = "hint"
    order = np.argsort(-lost, kind="stable")[:_ROWS]
    rows = [
        (sanitize(name), f"{width:,} x {height:,}", format_percent(part))
        for name, (width, height), part in zip(originals.names(order), sides[order].tolist(), lost[order].tolist())
    ]
    evidence = (
        f"the centre crop takes away {format_percent(mean)} of an image on average, {format_percent(worst)} "
        f"of the worst"
    )
    if len(halved):
        evidence += f"; more than half of {plural(len(halved))} ({list_names(names)})"
    exhibits = (
        Figure("Share of the area that the crop takes away", svg=histogram(lost, "share of the area", "images")),
        Figure("Those that lose most", table=[("image", "original", "lost"), *rows]),
    )
    remedy = "" if severity == "fine" else "crop those to a square around their subject yourself, or remove them"
    return Finding("data.crop", severity, evidence, remedy, facts, exhibits)
