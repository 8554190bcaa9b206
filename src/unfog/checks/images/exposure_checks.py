"""Checks of pixel values: blank, equal, dark or grey images, the value range, and the standard deviation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.example_images import format_percent, format_share, images_figure, list_names
from unfog.checks.images.near_duplicates import BLANK_DEVIATION
from unfog.checks.images.pixel_statistics import ImageScan
from unfog.config.schema import Config
from unfog.diffusion.target import EdmF
from unfog.diffusion.weighting import Edm
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural

_MANY = 0.005  # share of blank images, or of badly exposed ones, that is a warning
_EQUAL = 0.9  # share of images that are one and the same
_DARK, _BRIGHT = 40, 215  # no part of an image is brighter, or darker
_DIM, _PALE, _CONTRAST = 96, 160, 96  # 99% of all values are below, above, or within so many
_GREY = 3.0  # levels by which the channels of a grey image differ after a colour conversion
_SIGMA = 1.25  # factor by which sigma_data may be off


def check_all_equal(scan: ImageScan, config: Config) -> Finding:
    """Check that the training set is not one image many times."""
    digests = scan.statistics.digest[scan.in_train]
    _, first, counts = np.unique(digests, return_index=True, return_counts=True)
    most, total = int(counts.max()), len(digests)
    facts = {"different": len(counts), "looked_at": total}
    if total < 2 or most < _EQUAL * total:
        return Finding("data.equal", "fine", f"{len(counts):,} of {plural(total)} checked differ", facts=facts)
    which = scan.rows[first[[counts.argmax()]]]
    same = f"one and the same ({list_names(scan.names(which))})"
    evidence = f"{format_share(most, total)} images checked are {same}"
    remedy = "give different images: there is nothing to learn from one"
    return Finding("data.equal", "fatal", evidence, remedy, facts, (images_figure(scan, which, "The image"),))


def check_value_range(scan: ImageScan, config: Config) -> Finding:
    """Check that values use more than the lowest bits of 8."""
    highest, lowest = int(scan.statistics.highest.max()), int(scan.statistics.lowest.min())
    facts = {"lowest": lowest, "highest": highest}
    if highest > 31:
        return Finding("data.range", "fine", f"values are {lowest} to {highest} of 0 to 255", facts=facts)
    bits = max(1, highest.bit_length())
    binary = highest <= 1
    kind = "0 to 1 stored in 8 bits, or masks" if binary else f"of {bits} bits stored in 8"
    factor = 255 if binary else 255 // ((1 << bits) - 1)
    evidence = f"no value is above {highest} of 255, so all images look black: these look like values {kind}"
    remedy = f"multiply by {factor} and save again: Image.fromarray((x * {factor}).astype('uint8'))"
    figure = images_figure(scan, scan.rows[:12], "The first images")
    return Finding("data.range", "fatal" if binary else "warning", evidence, remedy, facts, (figure,))


def check_blank(scan: ImageScan, config: Config) -> Finding:
    """Check for images of a single colour."""
    remedy = "remove them; the model learns a blank image like any other"
    return _exceptions(scan, "data.blank", scan.statistics.spread < BLANK_DEVIATION, "blank", remedy)


def check_exposure(scan: ImageScan, config: Config) -> Finding:
    """Check for images that are nearly black or nearly white."""
    statistics = scan.statistics
    content = statistics.spread >= BLANK_DEVIATION
    dark, bright = content & (statistics.brightest < _DARK), content & (statistics.darkest > _BRIGHT)
    kinds = [f"{which.sum():,} {name}" for name, which in (("dark", dark), ("pale", bright)) if which.any()]
    description = f"nearly black or nearly white ({' and '.join(kinds)})"
    return _exceptions(scan, "data.exposure", dark | bright, description, "brighten, darken or remove them")


def _exceptions(scan: ImageScan, code: str, which: NDArray[np.bool_], description: str, remedy: str) -> Finding:
    rows, total = scan.rows[which], len(scan.rows)
    if not len(rows):
        evidence = f"none of {plural(total)} is {description.split(' (')[0]}"
        return Finding(code, "fine", evidence, facts={"images": 0})
    names = scan.names(rows)
    facts = {"images": len(rows), "looked_at": total, "names": names}
    severity: Severity = "warning" if len(rows) >= _MANY * total else "hint"
    evidence = f"{format_share(len(rows), total)} images are {description}: {list_names(names)}"
    return Finding(code, severity, evidence, remedy, facts, (images_figure(scan, rows, "These images"),))


def check_grey(scan: ImageScan, config: Config) -> Finding | None:
    """Check an RGB set for grey images."""
    if scan.prepared.settings.channels == 1:
        return None
    grey = scan.statistics.tint <= _GREY
    count, total = int(grey.sum()), len(grey)
    facts: dict[str, Any] = {"grey": count, "looked_at": total}
    if not count:
        return Finding("data.grey_as_rgb", "fine", f"all of {plural(total)} are in colour", facts=facts)
    minority_is_grey = count <= total / 2
    rows = scan.rows[grey if minority_is_grey else ~grey]
    names = facts["names"] = scan.names(rows)
    if count == total:
        evidence = f"all of {plural(total)} are grey, stored as RGB"
        return Finding("data.grey_as_rgb", "hint", evidence, "use --data.channels 1: a third of the values", facts)
    if minority_is_grey:
        evidence = f"{format_share(count, total)} images are grey among coloured ones ({list_names(names)})"
        remedy = "remove them if no grey images should be generated"
    else:
        evidence = f"only {format_share(len(rows), total)} images are in colour ({list_names(names)})"
        remedy = "use --data.channels 1 if colour does not matter, or remove those"
    return Finding("data.grey_as_rgb", "hint", evidence, remedy, facts, (images_figure(scan, rows, "The exceptions"),))


def _moments(scan: ImageScan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and variance of each channel [C], in [-1, 1]."""
    values = np.arange(256) / 127.5 - 1
    weights = scan.histogram / scan.histogram.sum(1, keepdims=True)
    mean = weights @ values
    return mean, weights @ values**2 - mean**2


def check_channels(scan: ImageScan, config: Config) -> Finding:
    """Check that the values of the whole set are neither dark, nor pale, nor of little contrast."""
    mean, variance = _moments(scan)
    cumulative = scan.histogram.sum(0).cumsum() / scan.histogram.sum()
    low, high = (int(np.searchsorted(cumulative, q)) for q in (0.01, 0.99))
    names = ("red", "green", "blue") if len(mean) == 3 else ("grey",)
    each = ", ".join(f"{n} {m:+.2f} ± {s:.2f}" for n, m, s in zip(names, mean, np.sqrt(variance)))
    facts = {"mean": mean.tolist(), "std": np.sqrt(variance).tolist(), "low": low, "high": high}
    x = np.arange(8, 256, 16) / 127.5 - 1
    bins = scan.histogram.reshape(len(mean), 16, 16).sum(2) / scan.histogram.sum(1, keepdims=True)
    chart = line_chart({n: (x, y) for n, y in zip(names, bins)}, "value in [-1, 1]", "share of pixels", zero_y=True)
    figures = (Figure("Values", svg=chart),)
    fault = ""
    if high < _DIM:
        fault = f"dark: 99% of all values are below {high} of 255"
    elif low > _PALE:
        fault = f"pale: 99% of all values are above {low} of 255"
    elif high - low < _CONTRAST:
        fault = f"of little contrast: 98% of all values lie from {low} to {high} of 255"
    if not fault:
        return Finding("data.channels", "fine", f"channels in [-1, 1]: {each}", facts=facts, figures=figures)
    remedy = "stretch their levels in an image editor, all by the same factor, so that they reach 255"
    return Finding("data.channels", "warning", f"the images are {fault} ({each})", remedy, facts, figures)


def check_sigma_data(scan: ImageScan, config: Config) -> Finding:
    """Compare the standard deviation of the images with `diffusion.sigma_data`."""
    mean, variance = _moments(scan)
    sigma, assumed = float(np.sqrt(variance.mean())), config.diffusion.sigma_data
    rms = float(np.sqrt((variance + mean**2).mean()))
    facts = {"sigma_data": sigma, "root_mean_square": rms, "configured": assumed}
    measured = f"the standard deviation of the images (sigma_data) is {sigma:.2f}"
    if config.uses_latents:
        evidence = f"{measured}; the network sees latents, which are scaled to the configured {assumed:g}"
        return Finding("data.sigma_data", "fine", evidence, facts=facts)
    diffusion = config.diffusion
    if not (isinstance(diffusion.target, EdmF) or isinstance(diffusion.weighting, Edm) or diffusion.scale_input):
        evidence = f"{measured}; the {diffusion.target.kind} target does not use it"
        return Finding("data.sigma_data", "fine", evidence, facts=facts)
    off = max(sigma / assumed, assumed / max(sigma, 1e-6))
    if off <= _SIGMA:
        return Finding("data.sigma_data", "fine", f"{measured}, and {assumed:g} is configured", facts=facts)
    wrong = f"diffusion.sigma_data = {assumed:g} is {format_percent(off - 1)} off"
    evidence = f"{measured}, but {wrong}: noise levels get the wrong weights"
    return Finding("data.sigma_data", "warning", evidence, f"use --diffusion.sigma-data {sigma:.2g}", facts)
