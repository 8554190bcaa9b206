"""Checks of the originals' sizes: resolution to train at, upscaling, and what the centre crop removes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.example_images import format_percent, format_share, list_names
from unfog.checks.images.near_duplicates import Indices
from unfog.checks.images.pixel_statistics import ImageScan, evenly_spread_rows
from unfog.config.schema import Config
from unfog.reporting.charts import histogram
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

# Sizes to recommend: they can be halved often, and larger images are better made by latent diffusion.
_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
_UPSCALED = 0.05  # share of images that may be upscaled
_SLIGHT = 1.1  # upscaling, or ratio of the sides, that nobody sees
_HALF = 0.5  # share of the area; an image that loses more shows another subject
_MANY_HALVES, _MUCH = 0.01, 0.2  # share of images that lose half, and mean loss, to be reported
_ROWS = 12


class _Originals(NamedTuple):
    rows: Indices
    sides: NDArray[np.int32]
    """[N, 2], width and height."""
    size: int
    """Training resolution."""


def _originals(scan: ImageScan) -> _Originals | None:
    """Return the sides of all originals, or of `scan.most_sides`; None where they are not known."""
    train, held_out = scan.prepared.train, scan.prepared.held_out
    if not len(train.sides):
        return None
    rows = evenly_spread_rows(len(train), len(held_out), scan.most_sides)
    inside = rows < len(train)
    sides = np.concatenate([train.sides[rows[inside]], held_out.sides[rows[~inside] - len(train)]])
    return _Originals(rows, sides, scan.prepared.settings.size)


def recommended_size(sides: NDArray[np.int32]) -> int:
    """Return the largest common size that upscales under 5% of the originals [N, 2], and less than half at all.

    Originals that are all one square of at most 64 pixels, divisible by 4, keep their size.
    """
    short = sides.min(1)
    if (sides == sides[0, 0]).all() and 8 <= short[0] <= 64 and short[0] % 4 == 0:
        return int(short[0])
    limit = min(np.quantile(short, _UPSCALED), np.median(short))
    return max((size for size in _SIZES if size <= limit), default=_SIZES[0])


def check_original_sizes(scan: ImageScan, config: Config) -> Finding | None:
    """Report the range of sizes, and the largest size there are pixels for."""
    if (originals := _originals(scan)) is None:
        return None
    _, sides, size = originals
    short = sides.min(1)
    best = recommended_size(sides)
    low, middle, high = (int(x) for x in (short.min(), np.median(short), short.max()))
    facts = {"shortest": low, "median": middle, "longest_short": high, "size": size, "recommended": best}
    if low == high and (sides == low).all():
        return Finding("data.sizes", "fine", f"all images are {low}x{low}; trained at {size}x{size}", facts=facts)
    evidence = f"short sides are {low:,} to {high:,} pixels, median {middle:,}; trained at {size}x{size}"
    if best > size:
        evidence += f"; there are pixels enough for --size {best}"
    ratio = np.minimum(sides.max(1) / np.maximum(short, 1), 10)
    figures = (
        Figure("Short sides", svg=histogram(short, "pixels", "images")),
        Figure("Long side / short side", svg=histogram(ratio, "ratio, 10 and more as 10", "images")),
    )
    return Finding("data.sizes", "fine", evidence, "", facts, figures)


def check_upscaling(scan: ImageScan, config: Config) -> Finding | None:
    """Check that few originals are smaller than the training resolution."""
    if (originals := _originals(scan)) is None:
        return None
    rows, sides, size = originals
    short = sides.min(1)
    upscaled = np.flatnonzero(short * _SLIGHT < size)
    best, part = recommended_size(sides), len(upscaled) / len(sides)
    facts = {"images": len(upscaled), "share": part, "size": size, "recommended": best}
    if not len(upscaled):
        return Finding("data.upscaled", "fine", f"no image is upscaled to {size}x{size}", facts=facts)
    smallest = upscaled[np.argsort(short[upscaled], kind="stable")]
    names = scan.names(rows[smallest])
    # Where few are upscaled, the size suits the others, and only those few should go.
    exceptions = part < 0.3 or best >= size
    remove = f"remove or replace those under {size} pixels" + (f", or use --size {best}" if best < size else "")
    evidence = (
        f"{format_share(len(upscaled), len(sides))} images are upscaled to {size}x{size}, the smallest from "
        f"{short[smallest[0]]} pixels ({list_names(names)}): the model learns their blur"
    )
    severity: Severity = "warning" if part >= _UPSCALED else "hint"
    remedy = remove if exceptions else f"use --size {best}"
    return Finding("data.upscaled", severity, evidence, remedy, {**facts, "names": names})


def check_crop(scan: ImageScan, config: Config) -> Finding | None:
    """Check that the centre crop to a square removes little."""
    if (originals := _originals(scan)) is None:
        return None
    rows, sides, _ = originals
    lost = 1 - sides.min(1) / np.maximum(sides.max(1), 1)
    halved = np.flatnonzero(lost > _HALF)
    halved = halved[np.argsort(-lost[halved], kind="stable")]
    mean, worst, names = float(lost.mean()), float(lost.max()), scan.names(rows[halved])
    facts = {"mean": mean, "worst": worst, "over_half": len(halved), "names": names}
    if worst < 1 - 1 / _SLIGHT:
        square = "the images are square"
        evidence = square if worst == 0 else f"the centre crop removes at most {format_percent(worst)} of an image"
        return Finding("data.crop", "fine", evidence, facts=facts)
    severity: Severity = "fine"
    if len(halved) >= max(1, _MANY_HALVES * len(sides)):
        severity = "warning"
    elif len(halved) or mean >= _MUCH:
        severity = "hint"
    evidence = f"the centre crop removes {format_percent(mean)} of an image on average, at most {format_percent(worst)}"
    if len(halved):
        evidence += f"; over half of {plural(len(halved))} ({list_names(names)})"
    order = np.argsort(-lost, kind="stable")[:_ROWS]
    table = [("image", "original", "lost")]
    for name, (width, height), part in zip(scan.names(rows[order]), sides[order].tolist(), lost[order].tolist()):
        table.append((sanitize(name), f"{width:,} x {height:,}", format_percent(part)))
    figures = (
        Figure("Share of the area that the crop removes", svg=histogram(lost, "share of the area", "images")),
        Figure("Images that lose most", table=table),
    )
    remedy = "" if severity == "fine" else "crop those to a square around their subject, or remove them"
    return Finding("data.crop", severity, evidence, remedy, facts, figures)
