"""Checks of the images before training: the two ways to run all of them, and the checks of pixel values.

To add a check, write a function that returns a Finding here or in a module beside this one, and call it in
`_run_checks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images import dataset_checks
from unfog.checks.images.caption_checks import check_captions
from unfog.checks.images.condition_checks import check_conditions
from unfog.checks.images.duplicate_checks import check_duplicates
from unfog.checks.images.image_scan import BLANK_DEVIATION, ImageScan, Progress
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.full_depth.fit import suspect_filler
from unfog.data.lazy import LazyPixels
from unfog.data.settings import Data
from unfog.diffusion.target import EdmF
from unfog.diffusion.weighting import Edm
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity, format_percent, format_share, list_names
from unfog.text import plural
from unfog.values.image_format import channel_names, in_colour

# Limits that keep the quick check within a fraction of a second.
_QUICK_IMAGES = 1000
_QUICK_BYTES = 16 * 2**20
_QUICK_DECODED = 64
_QUICK_SIDES = 50_000

_MANY = 0.005  # share of blank images, or of badly exposed ones, that is a warning
_EQUAL = 0.9  # share of images that are one and the same
_DARK, _BRIGHT = 40, 215  # no part of an image is brighter, or darker
_DIM, _PALE, _CONTRAST = 96, 160, 96  # 99% of all values are below, above, or within so many
_GREY = 3.0  # levels by which the channels of a grey image differ after a colour conversion
_OTHER_RANGE = "give the values of the files that are to be black and white: --data.range 0 4095, for example"
_CONSTANT = 0.9999  # share of the pixels of a channel that are of one level
_MOST_UNKNOWN = 0.9  # share of the values
_SIGMA = 1.25  # factor by which sigma_data may be off


def check_images(prepared: Dataset, config: Config, progress: Progress | None = None) -> list[Finding]:
    """Run all checks on all images; takes seconds for 50,000 images of 32x32, and 130 bytes of memory an image.

    `progress` is called as (done, total) from the calling thread: first for the images, then for pairs of candidates.
    """
    return _run_checks(ImageScan.create(prepared, progress=progress), config, progress)


def quick_check_images(prepared: Dataset, config: Config) -> list[Finding]:
    """Run the checks on a sample of at most 1,000 images; duplicates are only searched in a set that small."""
    image = int(np.prod(prepared.train.pixels.shape[1:]))
    most = max(8, min(_QUICK_IMAGES, _QUICK_BYTES // image))
    if any(isinstance(part.train.pixels, LazyPixels) for part in prepared.buckets or (prepared,)):
        most = min(most, _QUICK_DECODED)
    return _run_checks(ImageScan.create(prepared, most, most_sides=_QUICK_SIDES), config)


def _run_checks(scan: ImageScan, config: Config, progress: Progress | None = None) -> list[Finding]:
    format = scan.prepared.settings.image_format
    train, held_out = scan.prepared.train, scan.prepared.held_out
    common = [
        *dataset_checks.check_dataset(scan, config),
        *check_captions(train, held_out, config.data.flip),
        *check_conditions(train, held_out),
    ]
    if not format.is_picture:
        said = f"brightness, colours and duplicates are checked of pictures of 8 bits, and these are {format}"
        return [
            *common,
            _check_all_equal(scan),
            Finding("data.range", "fine", said),
            _check_unknown(scan.prepared.settings)
            if scan.prepared.settings.has_unknown
            else _check_suspect(scan.prepared),
        ]
    equal, value_range = _check_all_equal(scan), _check_value_range(scan)
    found = [*common, equal, value_range]
    # Of images that are black or all the same, the other statistics would only repeat that.
    if equal.severity != "fatal" and value_range.severity == "fine":
        found += [_check_blank(scan), _check_exposure(scan), *_check_grey(scan)]
        found += [_check_channels(scan), _check_sigma_data(scan, config)]
    # A sample holds few of the duplicates, and images without content are all alike.
    if scan.complete and equal.severity != "fatal" and value_range.severity != "fatal":
        found += check_duplicates(scan, progress)
    return found


def _check_unknown(data: Data) -> Finding:
    """Say how many values are unknown, and check that there are some and that not nearly all are."""
    mask = data.known_in_samples()
    always = 0.0 if mask is None else float((~mask).mean())
    remedy = (
        "omit data.unknown, as the mask is an input of the network" if not data.unknown_share else "leave images out"
    )
    return Finding.graded(
        "data.unknown",
        f"{data.unknown_share:.2%} of the values are unknown, {always:.2%} in all images",
        (not data.unknown_share, "warning", ", so that the mask has no effect", remedy),
        (data.unknown_share > _MOST_UNKNOWN, "warning", ", so that little is learned of each image", remedy),
        facts={"unknown": data.unknown_share, "in_all": always},
    )


def _check_suspect(prepared: Dataset) -> Finding:
    """Look for a number that may stand for unknown values, such as -9999, where none was named."""
    if not prepared.settings.fitted_map:  # `suspect_filler` looks at nothing
        return Finding("data.unknown", "fine", "no value is named as unknown, and the value map depends on no values")
    suspect = suspect_filler(prepared)
    if suspect is None:
        return Finding("data.unknown", "fine", "all values are known, and none stands far from all others")
    facts = {"value": suspect.value, "share": suspect.share}
    return Finding("data.unknown", "warning", suspect.evidence, suspect.remedy, facts)


def _check_all_equal(scan: ImageScan) -> Finding:
    """Check that the training set is not one image many times."""
    digests = scan.statistics.digest[scan.in_train]
    _, first, counts = np.unique(digests, return_index=True, return_counts=True)
    most, total = int(counts.max()), len(digests)
    facts = {"different": len(counts), "looked_at": total}
    if total < 2 or most < _EQUAL * total:
        return Finding("data.equal", "fine", f"{len(counts):,} of {plural(total)} checked differ", facts=facts)
    which = scan.rows[first[[counts.argmax()]]]
    evidence = f"{format_share(most, total)} checked images are the same image ({list_names(scan.names(which))})"
    remedy = "give different images; there is nothing to learn from a single one"
    report = scan.prepared.report
    if report.actions.get("flattened", 0) >= _EQUAL * max(report.used, 1):  # white ink on nothing, laid on white
        remedy = "they are transparent, and are of the colour that is put behind them: give another --data.background"
    return Finding("data.equal", "fatal", evidence, remedy, facts, (scan.images_figure(which, "The image"),))


def _check_value_range(scan: ImageScan) -> Finding:
    """Check that values use more than the lowest bits of 8."""
    highest, lowest = int(scan.statistics.highest.max()), int(scan.statistics.lowest.min())
    facts = {"lowest": lowest, "highest": highest}
    if highest > 31:
        return Finding("data.range", "fine", f"values are {lowest} to {highest} of 0 to 255", facts=facts)
    bits, binary = max(1, highest.bit_length()), highest <= 1
    kind = "0 to 1 stored in 8 bits, or masks" if binary else f"of {bits} bits stored in 8"
    factor = 255 // ((1 << bits) - 1)
    deep = scan.prepared.report.has_deep_images
    if deep:  # these 8 bits are not those of the files
        kind = "of a smaller range than the one that became 0 to 255"
    evidence = f"no value is above {highest} of 255, so all images look black: these look like values {kind}"
    # With a type that holds the products, and cut: originals may have values above those of resized images.
    remedy = (
        f"multiply by {factor} and save again: Image.fromarray((x.astype('uint16') * {factor}).clip(0, 255)"
        ".astype('uint8'))"
    )
    if deep:
        remedy = _OTHER_RANGE
    figure = scan.images_figure(scan.rows[:12], "The first images")
    return Finding("data.range", "fatal" if binary else "warning", evidence, remedy, facts, (figure,))


def _check_blank(scan: ImageScan) -> Finding:
    """Check for images of a single colour."""
    remedy = "remove them; the model would learn to generate blank images"
    return _exceptions(scan, "data.blank", scan.statistics.spread < BLANK_DEVIATION, "blank", remedy)


def _check_exposure(scan: ImageScan) -> Finding:
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
    return Finding(code, severity, evidence, remedy, facts, (scan.images_figure(rows, "These images"),))


def _check_grey(scan: ImageScan) -> list[Finding]:
    """Check an RGB set for grey images."""
    if not in_colour(scan.prepared.settings.channels):
        return []
    grey = scan.statistics.tint <= _GREY
    count, total = int(grey.sum()), len(grey)
    facts: dict[str, Any] = {"grey": count, "looked_at": total}
    if not count:
        return [Finding("data.grey_as_rgb", "fine", f"all of {plural(total)} are in colour", facts=facts)]
    minority_is_grey = count <= total / 2
    rows = scan.rows[grey if minority_is_grey else ~grey]
    names = facts["names"] = scan.names(rows)
    figures: tuple[Figure, ...] = ()
    if count == total:
        evidence = f"all of {plural(total)} are grey, stored as RGB"
        remedy = "use --data.channels 1: a third of the values"
    elif minority_is_grey:
        evidence = f"{format_share(count, total)} images are grey among coloured ones ({list_names(names)})"
        remedy = "remove them if samples should not be grey"
    else:
        evidence = f"only {format_share(len(rows), total)} images are in colour ({list_names(names)})"
        remedy = "use --data.channels 1 if colour does not matter, or remove those"
    if count < total:
        figures = (scan.images_figure(rows, "The exceptions"),)
    return [Finding("data.grey_as_rgb", "hint", evidence, remedy, facts, figures)]


def _moments(scan: ImageScan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and variance of each channel [C], in [-1, 1]."""
    values = scan.prepared.settings.image_format.values.levels()
    weights = scan.histogram / scan.histogram.sum(1, keepdims=True)
    mean = weights @ values
    return mean, weights @ values**2 - mean**2


def _check_channels(scan: ImageScan) -> Finding:
    """Check that the values of the whole set are neither dark, nor pale, nor of little contrast."""
    mean, variance = _moments(scan)
    cumulative = scan.histogram.sum(0).cumsum() / scan.histogram.sum()
    low, high = (int(np.searchsorted(cumulative, q)) for q in (0.01, 0.99))
    names = channel_names(len(mean))
    each = ", ".join(f"{n} {m:+.2f} ± {s:.2f}" for n, m, s in zip(names, mean, np.sqrt(variance)))
    facts = {"mean": mean.tolist(), "std": np.sqrt(variance).tolist(), "low": low, "high": high}
    x = scan.prepared.settings.image_format.values.levels()[8::16]
    bins = scan.histogram.reshape(len(mean), 16, 16).sum(2) / scan.histogram.sum(1, keepdims=True)
    chart = line_chart({n: (x, y) for n, y in zip(names, bins)}, "value in [-1, 1]", "share of pixels", zero_y=True)
    figures = (Figure("Values", svg=chart),)
    fault, remedy = "", "stretch the levels of all images by the same factor in an image editor, so that they reach 255"
    if constant := _constant_channels(scan.histogram):
        parts = [f"the {names[k]} channel is {level} in all images" for k, level in constant.items()]
        facts["constant"] = {names[k]: level for k, level in constant.items()}
        evidence = f"{' and '.join(parts)} ({each})"
        remedy = "check how the images were made"
        if len(live := [k for k in range(len(names)) if k not in constant]) == 1:
            remedy += f"; if only that channel counts, store it alone: Image.fromarray(x[..., {live[0]}])"
        return Finding("data.channels", "warning", evidence, remedy, facts, figures)
    if high < _DIM:
        fault = f"dark: 99% of all values are below {high} of 255"
    elif low > _PALE:
        fault = f"pale: 99% of all values are above {low} of 255"
    elif high - low < _CONTRAST:
        fault = f"of little contrast: 98% of all values lie from {low} to {high} of 255"
    if scan.prepared.report.has_deep_images:
        remedy = _OTHER_RANGE
    if not fault:
        return Finding("data.channels", "fine", f"channels in [-1, 1]: {each}", facts=facts, figures=figures)
    return Finding("data.channels", "warning", f"the images are {fault} ({each})", remedy, facts, figures)


def _constant_channels(histogram: NDArray[Any]) -> dict[int, int]:
    """Return (channel -> its level) of the channels of [C, 256] that have next to no other level, if others have."""
    shares = histogram / histogram.sum(1, keepdims=True)
    level = shares.argmax(1)
    # Within one level, as JPEG rounds.
    around = [float(share[max(0, at - 1) : at + 2].sum()) for share, at in zip(shares, level)]
    dead = {k: int(level[k]) for k, share in enumerate(around) if share >= _CONSTANT}
    return dead if len(dead) < len(shares) else {}


def _check_sigma_data(scan: ImageScan, config: Config) -> Finding:
    """Compare the standard deviation of the images with `diffusion.sigma_data`."""
    mean, variance = _moments(scan)
    diffusion, assumed = config.diffusion, config.diffusion.sigma_data
    sigma, rms = float(np.sqrt(variance.mean())), float(np.sqrt((variance + mean**2).mean()))
    facts = {"sigma_data": sigma, "root_mean_square": rms, "configured": assumed}
    evidence = f"the standard deviation of the images (sigma_data) is {sigma:.2f}"
    off = max(sigma / assumed, assumed / max(sigma, 1e-6))
    if note := config.representation.scale_note():
        evidence += f"; {note}"
    elif not (isinstance(diffusion.target, EdmF) or isinstance(diffusion.weighting, Edm) or diffusion.scale_input):
        evidence += f"; the {diffusion.target.kind} target does not use it"
    elif off <= _SIGMA:
        evidence += f", and {assumed:g} is configured"
    else:
        wrong = f"diffusion.sigma_data = {assumed:g} is {format_percent(off - 1)} off"
        evidence += f", but {wrong}: noise levels get the wrong weights"
        return Finding("data.sigma_data", "warning", evidence, f"use --diffusion.sigma-data {sigma:.2g}", facts)
    return Finding("data.sigma_data", "fine", evidence, facts=facts)
