"""What the pixels hold: blank, equal, dark or grey images, the range of values, and their spread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.config.schema import Config
from unfog.diffusion.target import EdmF
from unfog.diffusion.weighting import Edm
from unfog.doctor.images.example_images import format_percent, format_share, image_names, images_figure, list_names
from unfog.doctor.images.near_duplicates import BLANK_DEVIATION
from unfog.doctor.images.pixel_statistics import ImageScan
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural

_NOTABLE = 0.005
"""Share of blank images, and of images too dark or too bright, from which they are a warning."""

_EQUAL = 0.9  # share of images that are one and the same
_DARK, _BRIGHT = 40, 215  # no part of an image is brighter, or darker
_DIM, _PALE, _CONTRAST = 96, 160, 96  # 99% of all values are below, above, or within so many
_GREY = 3.0  # levels by which the channels of a grey image differ after a colour conversion
_SIGMA = 1.25  # times that sigma_data may be off


def check_pixel_values(survey: ImageScan, config: Config) -> list[Finding]:
    """Findings on values; of a set that shows nothing, only that."""
    equal, span = _equal(survey), _range(survey)
    if equal.severity == "fatal" or span.severity != "fine":
        return [equal, span]
    findings = [equal, span, _blank(survey), _exposure(survey), *_grey(survey)]
    return [*findings, _channels(survey), _sigma_data(survey, config)]


def _equal(survey: ImageScan) -> Finding:
    digests = survey.statistics.digest[survey.in_train]
    _, first, counts = np.unique(digests, return_index=True, return_counts=True)
    most, looked = int(counts.max()), len(digests)
    facts = {"different": len(counts), "looked_at": looked}
    if looked < 2 or most < _EQUAL * looked:
        return Finding("data.equal", "fine", f"{len(counts):,} of {plural(looked)} looked at differ", facts=facts)
    which = survey.rows[first[[counts.argmax()]]]
    return Finding(
        "data.equal",
        "fatal",
        (
            f"{format_share(most, looked)} images looked at are one and the same "
            f"({list_names([survey.name(int(which[0]))])})"
        ),
        "give different images: there is nothing to learn from one",
        facts,
        (images_figure(survey, which, "The image"),),
    )


def _range(survey: ImageScan) -> Finding:
    highest, lowest = int(survey.statistics.highest.max()), int(survey.statistics.lowest.min())
    facts = {"lowest": lowest, "highest": highest}
    if highest > 31:
        return Finding("data.range", "fine", f"values are {lowest} to {highest} of 0 to 255", facts=facts)
    bits = max(1, highest.bit_length())
    severity: Severity = "fatal" if highest <= 1 else "warning"
    kind = "0 to 1 stored in 8 bits, or masks" if highest <= 1 else f"of {bits} bits stored in 8"
    factor = 255 if highest <= 1 else 255 // ((1 << bits) - 1)
    return Finding(
        "data.range",
        severity,
        f"no value is above {highest} of 255, so all images are black to the eye: these look like values {kind}",
        f"multiply by {factor} and save again: Image.fromarray((x * {factor}).astype('uint8'))",
        facts,
        (images_figure(survey, survey.rows[:12], "The first images"),),
    )


def _blank(survey: ImageScan) -> Finding:
    return _exceptions(
        survey,
        "data.blank",
        survey.statistics.spread < BLANK_DEVIATION,
        "blank",
        "remove them; one colour all over is learned as a picture, too",
    )


def _exposure(survey: ImageScan) -> Finding:
    seen = survey.statistics
    showing = seen.spread >= BLANK_DEVIATION
    dark, bright = showing & (seen.brightest < _DARK), showing & (seen.darkest > _BRIGHT)
    kinds = [f"{which.sum():,} {name}" for name, which in (("dark", dark), ("pale", bright)) if which.any()]
    what = f"nearly black or nearly white ({' and '.join(kinds)})"
    return _exceptions(survey, "data.exposure", dark | bright, what, "brighten, darken or remove them")


def _exceptions(survey: ImageScan, code: str, which: NDArray[np.bool_], what: str, remedy: str) -> Finding:
    rows, looked = survey.rows[which], len(survey.rows)
    if not len(rows):
        return Finding(code, "fine", f"none of {plural(looked)} is {what.split(' (')[0]}", facts={"images": 0})
    names = image_names(survey.prepared, rows)
    return Finding(
        code,
        "warning" if len(rows) >= _NOTABLE * looked else "hint",
        f"{format_share(len(rows), looked)} images are {what}: {list_names(names)}",
        remedy,
        {"images": len(rows), "looked_at": looked, "names": names},
        (images_figure(survey, rows, "These images"),),
    )


def _grey(survey: ImageScan) -> list[Finding]:
    if survey.prepared.settings.channels == 1:
        return []
    grey = survey.statistics.tint <= _GREY
    count, looked = int(grey.sum()), len(grey)
    facts: dict[str, Any] = {"grey": count, "looked_at": looked}
    if not count:
        return [Finding("data.grey_as_rgb", "fine", f"all of {plural(looked)} are in colour", facts=facts)]
    few, rows = (grey, survey.rows[grey]) if count <= looked / 2 else (~grey, survey.rows[~grey])
    facts["names"] = image_names(survey.prepared, rows)
    shown = () if count == looked else (images_figure(survey, rows, "The exceptions"),)
    if count == looked:
        evidence, remedy = (
            f"all of {plural(looked)} are grey, stored as RGB",
            "use --data.channels 1: a third of the values",
        )
    elif few is grey:
        evidence = f"{format_share(count, looked)} images are grey among coloured ones ({list_names(facts['names'])})"
        remedy = "remove them if no grey pictures are to be drawn"
    else:
        evidence = f"only {format_share(len(rows), looked)} images are in colour ({list_names(facts['names'])})"
        remedy = "use --data.channels 1 if colour does not matter, or remove those"
    return [Finding("data.grey_as_rgb", "hint", evidence, remedy, facts, shown)]


def _moments(survey: ImageScan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance of each channel [C], in [-1, 1]."""
    values = np.arange(256) / 127.5 - 1
    weights = survey.histogram / survey.histogram.sum(1, keepdims=True)
    mean = weights @ values
    return mean, weights @ values**2 - mean**2


def _channels(survey: ImageScan) -> Finding:
    mean, variance = _moments(survey)
    cumulative = survey.histogram.sum(0).cumsum() / survey.histogram.sum()
    low, high = (int(np.searchsorted(cumulative, q)) for q in (0.01, 0.99))
    names = ("red", "green", "blue") if len(mean) == 3 else ("grey",)
    each = ", ".join(f"{n} {m:+.2f} ± {s:.2f}" for n, m, s in zip(names, mean, np.sqrt(variance)))
    facts = {"mean": mean.tolist(), "std": np.sqrt(variance).tolist(), "low": low, "high": high}
    x = np.arange(8, 256, 16) / 127.5 - 1
    bins = survey.histogram.reshape(len(mean), 16, 16).sum(2) / survey.histogram.sum(1, keepdims=True)
    chart = line_chart({n: (x, y) for n, y in zip(names, bins)}, "value in [-1, 1]", "share of pixels", zero_y=True)
    exhibit = Figure("Values", svg=chart)
    fault = ""
    if high < _DIM:
        fault = f"dark: 99% of all values are below {high} of 255"
    elif low > _PALE:
        fault = f"pale: 99% of all values are above {low} of 255"
    elif high - low < _CONTRAST:
        fault = f"of little contrast: 98% of all values lie from {low} to {high} of 255"
    if not fault:
        return Finding("data.channels", "fine", f"channels in [-1, 1]: {each}", facts=facts, figures=(exhibit,))
    remedy = "stretch their levels in an image editor, all by the same factor, so that they use the range to 255"
    return Finding("data.channels", "warning", f"the images are {fault} ({each})", remedy, facts, (exhibit,))


def _sigma_data(survey: ImageScan, config: Config) -> Finding:
    mean, variance = _moments(survey)
    sigma, assumed = float(np.sqrt(variance.mean())), config.diffusion.sigma_data
    rms = float(np.sqrt((variance + mean**2).mean()))
    facts = {"sigma_data": sigma, "root_mean_square": rms, "configured": assumed}
    measured = f"the images deviate by {sigma:.2f} from their mean (sigma_data)"
    if config.uses_latents:
        evidence = f"{measured}; the network sees latents, which are scaled to the configured {assumed:g}"
        return Finding("data.sigma_data", "fine", evidence, facts=facts)
    diffusion = config.diffusion
    used = isinstance(diffusion.target, EdmF) or isinstance(diffusion.weighting, Edm) or diffusion.scale_input
    if not used:
        evidence = f"{measured}; the {diffusion.target.kind} target asks for none"
        return Finding("data.sigma_data", "fine", evidence, facts=facts)
    off = max(sigma / assumed, assumed / max(sigma, 1e-6))
    if off <= _SIGMA:
        return Finding("data.sigma_data", "fine", f"{measured}, and {assumed:g} is configured", facts=facts)
    return Finding(
        "data.sigma_data",
        "warning",
        (
            f"{measured}, but diffusion.sigma_data = {assumed:g}, {format_percent(off - 1)} off: noise levels are "
            f"weighted amiss"
        ),
        f"use --diffusion.sigma-data {sigma:.2g}",
        facts,
    )
