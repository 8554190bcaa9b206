"""Checks of the dataset: number of images, classes, unusable files, conversions, original sizes and crop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.image_scan import MOST_NAMES, ImageScan, Indices, evenly_spread_rows, unusable_files
from unfog.config.schema import Config
from unfog.config.validate import check_buckets
from unfog.data.buckets.sizes import cropped_away, nearest_bucket
from unfog.data.data_report import ACTIONS, COMMON_ACTIONS, EDITORS_FILES
from unfog.data.dataset import ImageSet
from unfog.data.packs.pack import Pack
from unfog.data.scan import common_aspect, size_of_aspect
from unfog.data.sources.labels import SPLITS
from unfog.errors import RequestError
from unfog.reporting.charts import bar_chart, histogram
from unfog.reporting.findings import Figure, Finding, Severity, format_percent, format_share, list_names
from unfog.text import plural, sanitize
from unfog.values.columns import CLASS
from unfog.values.image_format import ImageFormat, Size, sides_of, size_of

_TOO_FEW, _FEW, _MANY = 5, 100, 1000  # images: too few to train on; soon memorized; enough to generalise from
_ROWS = 50  # of a table

# Sizes to recommend: they can be halved often, and larger images are better made by latent diffusion.
_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
_UPSCALED = 0.05  # share of images that may be upscaled
_SLIGHT = 1.1  # upscaling, or ratio of the sides, that nobody sees
_HALF = 0.5  # share of the area; an image that loses more shows another subject
_MANY_HALVES, _MUCH = 0.01, 0.2  # share of images that lose half, and mean loss, to be reported
_CROPPED = 12  # images in the table of those that lose most
_SMALL_CLASS, _MODEST_CLASS = 20, 50  # images below which a class cannot be learned, and below which it hardly can
_UNEVEN, _STRONGLY_UNEVEN = 3, 10  # ratio of the largest class to the smallest
_NAMES = 1000  # read for the layout
_BARS = 40


def check_dataset(scan: ImageScan, config: Config) -> list[Finding]:
    """Return the findings of all checks of files, sizes and classes that apply to these images."""
    found = [_check_count(scan), _check_skipped_files(scan), _check_conversions(scan), *_check_sizes(scan, config)]
    train = scan.prepared.train
    if train.labels is not None:
        found += _check_classes(train, scan.prepared.held_out)
    elif config.data.labels != "none":
        found += _check_folder_layout(train.names)
    return found


def _check_count(scan: ImageScan) -> Finding:
    """Check that there are enough training images."""
    prepared, settings = scan.prepared, scan.prepared.settings
    train, held_out = len(prepared.train), len(prepared.held_out)
    sided = " and no condition depends on left and right" * any(name != CLASS for name in prepared.train.columns)
    flip = f"--flip if mirrored images make sense{sided}, " * (not settings.flip)
    augment = "--data.augment 0.15, " * (prepared.latents is None and settings.can_be_augmented)
    more = (
        f"add images. Otherwise use {flip}{augment}--network tiny:dropout=0.2, and compare samples with their nearest "
        "training images"
    )
    repeat = f"give at least {_TOO_FEW} images, better {_FEW} or more; a model can only repeat so few"
    return Finding.graded(
        "data.count",
        f"{plural(train)} to train on, {held_out:,} held out, {settings.image_format}",
        (train < _TOO_FEW, "fatal", "", repeat),
        (train < _FEW, "warning", "", f"a model memorizes so few images: {more}"),
        (train < _MANY, "hint", "", f"a model soon memorizes so few images: {more}"),
        facts={"train": train, "held_out": held_out},
    )


def _check_skipped_files(scan: ImageScan) -> Finding:
    """List the files that could not be decoded, by reason."""
    report = scan.prepared.report
    skipped, ignored = unusable_files(scan.prepared), sum(report.others.values())
    facts = {
        "found": report.found,
        "used": report.used - (len(skipped) - len(report.skipped)),
        "quarantined": [list(one) for one in skipped[:MOST_NAMES]],
        "quarantined_in_all": len(skipped),
        "ignored": report.others,
        "captions": report.captions,
    }
    others = ""
    if ignored:
        kinds = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(report.others).most_common(3))
        others += f"; {plural(ignored, 'other file')} ignored ({kinds})"
    if editable := [kind for kind in EDITORS_FILES if kind in report.others]:
        others += f"; {' and '.join(editable)} are read once they are saved as PNG"
    if not skipped:
        used = "is used" if report.read else "is assumed to be usable until it is decoded during training"
        captions = f"; {plural(report.captions, 'caption')}" if report.captions else ""
        evidence = f"each of {plural(report.found, 'image file')} {used}{captions}{others}"
        return Finding("data.ledger", "fine", evidence, facts=facts)
    reasons = []
    for reason, count in Counter(one.reason for one in skipped).most_common(5):
        reasons.append(f"{count:,} {reason}: {list_names([one.name for one in skipped if one.reason == reason])}")
    total = format_share(len(skipped), max(report.found, len(skipped)))
    evidence = f"{total} image files cannot be used ({'; '.join(reasons)}){others}"
    remedy = "repair, convert or remove the image files that cannot be used; training goes on without them"
    table = [("file", "reason"), *((sanitize(one.name), one.reason) for one in skipped[:_ROWS])]
    caption = f"{len(skipped) - _ROWS:,} more are in findings.json." if len(skipped) > _ROWS else ""
    figure = Figure("Files that cannot be used", table=table, caption=caption)
    return Finding("data.ledger", "warning", evidence, remedy, facts, (figure,))


def _check_conversions(scan: ImageScan) -> Finding:
    """List conversions that change more than the size, such as flattened transparency or dropped colour profiles."""
    report = scan.prepared.report
    actions = report.actions
    uncommon = {key: count for key, count in actions.items() if key not in COMMON_ACTIONS}
    facts: dict[str, Any] = {"actions": actions, "modes": dict(report.modes)}
    if not report.read:
        return Finding("data.converted", "fine", "conversions are not known until all images are decoded", facts=facts)
    if not uncommon:
        common = ", ".join(f"{count:,} {report.phrase(key)}" for key, count in actions.items()) or "none was changed"
        return Finding("data.converted", "fine", f"no image needed a conversion ({common})", facts=facts)
    which = [i for i, done in enumerate(report.treatments) if uncommon.keys() & set(done)]
    facts["names"] = scan.names(np.flatnonzero(np.isin(report.treatment, which)))
    parts = [f"{format_share(uncommon[key], report.used)} {report.phrase(key)}" for key in ACTIONS if key in uncommon]
    remedy = "check on the contact sheet that this is intended"
    if "flattened" in uncommon:
        remedy += "; --data.background sets the colour behind transparent pixels"
    if "profile_ignored" in uncommon:
        remedy += "; images with unusable colour profiles were read as sRGB"
    rows = [(report.phrase(key), f"{actions[key]:,}") for key in ACTIONS if key in actions]
    figure = Figure("Conversions", table=[("conversion", "images"), *rows])
    return Finding("data.converted", "hint", ", ".join(parts), remedy, facts, (figure,))


def _check_sizes(scan: ImageScan, config: Config) -> list[Finding]:
    """Check the sides of all originals, or of `scan.most_sides`; returns nothing if they are not known."""
    train, held_out = scan.prepared.train, scan.prepared.held_out
    if not len(train.sides):
        return []
    rows = evenly_spread_rows(len(train), len(held_out), scan.most_sides)
    inside = rows < len(train)
    sides = np.concatenate([train.sides[rows[inside]], held_out.sides[rows[~inside] - len(train)]])
    crop = _check_crop(scan, rows, sides, config)
    if scan.prepared.buckets:  # whose sizes have no common short side
        return [crop]
    originals = _check_original_sizes(sides, scan.prepared.settings.image_format)
    return [originals, _check_upscaling(scan, rows, sides), crop]


def _shape(format: ImageFormat) -> tuple[int, int]:
    """Return width and height in the smallest whole numbers: (1, 1) for a square, (3, 2)."""
    common = math.gcd(format.width, format.height)
    return format.width // common, format.height // common


def short_sides(sides: NDArray[np.int32], format: ImageFormat) -> NDArray[np.int64]:
    """Return the short side of what the crop to the format's shape keeps of originals [N, 2], in pixels."""
    width, height = _shape(format)
    kept = np.minimum(sides[:, 0].astype(np.int64) * height, sides[:, 1].astype(np.int64) * width)
    return kept // max(width, height)


def size_with_short_side(side: int, format: ImageFormat) -> Size:
    """Return a size of the format's shape with this short side, the other one a multiple of 8."""
    if format.width == format.height:
        return side
    other = max(1, round(side * max(format.height, format.width) / min(format.height, format.width) / 8)) * 8
    return size_of(*((side, other) if format.width > format.height else (other, side)))


def recommended_side(sides: NDArray[np.int32], short: NDArray[np.int64]) -> int:
    """Return the largest common size that upscales under 5% of the originals [N, 2], and less than half at all.

    Originals that are all one square of at most 64 pixels, divisible by 4, keep their size. `short` is `short_sides`.
    """
    if (sides == sides[0, 0]).all() and 8 <= short[0] <= 64 and short[0] % 4 == 0:
        return int(short[0])
    limit = min(np.quantile(short, _UPSCALED), np.median(short))
    return max((size for size in _SIZES if size <= limit), default=_SIZES[0])


def _check_original_sizes(sides: NDArray[np.int32], format: ImageFormat) -> Finding:
    """Report the range of sizes, and the largest size there are pixels for."""
    short = short_sides(sides, format)
    best = recommended_side(sides, short)
    recommended = size_with_short_side(best, format)
    low, middle, high = (int(x) for x in (short.min(), np.median(short), short.max()))
    facts = {"shortest": low, "median": middle, "longest_short": high, "size": format.size, "recommended": recommended}
    width, height = (int(side) for side in sides[0])
    if (sides == sides[0]).all() and width * format.height == height * format.width:
        said = f"all images are {width}x{height}; trained at {format.sides}"
        return Finding("data.sizes", "fine", said, facts=facts)
    evidence = f"short sides are {low:,} to {high:,} pixels, median {middle:,}; trained at {format.sides}"
    if best > min(format.height, format.width):
        evidence += f"; there are pixels enough for --size {recommended}"
    # A banner of 50 : 1 would leave the rest of the histogram in one bar.
    ratio = np.minimum(sides.max(1) / np.maximum(sides.min(1), 1), 10)
    figures = (
        Figure("Short sides", svg=histogram(short.astype(np.float64), "pixels", "images")),
        Figure("Long side / short side", svg=histogram(ratio, "ratio, 10 and more as 10", "images")),
    )
    return Finding("data.sizes", "fine", evidence, "", facts, figures)


def _check_upscaling(scan: ImageScan, rows: Indices, sides: NDArray[np.int32]) -> Finding:
    """Check that few originals are smaller than the training resolution."""
    format = scan.prepared.settings.image_format
    short, size = short_sides(sides, format), min(format.height, format.width)
    upscaled = np.flatnonzero(short * _SLIGHT < size)
    best, part = recommended_side(sides, short), len(upscaled) / len(sides)
    recommended = size_with_short_side(best, format)
    facts = {"images": len(upscaled), "share": part, "size": format.size, "recommended": recommended}
    if not len(upscaled):
        return Finding("data.upscaled", "fine", f"no image is upscaled to {format.sides}", facts=facts)
    smallest = upscaled[np.argsort(short[upscaled], kind="stable")]
    names = scan.names(rows[smallest])
    # Where few are upscaled, the size suits the others, and only those few should go.
    exceptions = part < 0.3 or best >= size
    remove = f"remove or replace those under {format.size} pixels" + f", or use --size {recommended}" * (best < size)
    evidence = (
        f"{format_share(len(upscaled), len(sides))} images are upscaled to {format.sides}, the smallest from "
        f"{short[smallest[0]]} pixels ({list_names(names)}): the model learns their blur"
    )
    severity: Severity = "warning" if part >= _UPSCALED else "hint"
    remedy = remove if exceptions else f"use --size {recommended}"
    return Finding("data.upscaled", severity, evidence, remedy, {**facts, "names": names})


def _check_crop(scan: ImageScan, rows: Indices, sides: NDArray[np.int32], config: Config) -> Finding:
    """Check that the centre crop to the shape of the training images removes little."""
    across, down = _shape(format := scan.prepared.settings.image_format)
    shape, frame = f"of the shape of {format.sides}", f"the shape of {format.sides}"
    if across == down:
        shape, frame = "square", "a square"
    shapes = np.array([(down, across)])
    if buckets := [bucket.settings.size for bucket in scan.prepared.buckets]:
        shape, frame = "of the shapes of their buckets", "the shape of a bucket"
        shapes = np.array([sides_of(size) for size in buckets])[nearest_bucket(buckets, sides)]
    lost = cropped_away(shapes, sides)
    # Stable, so that a repeated command names the same files.
    order = np.argsort(-lost, kind="stable")
    halved = order[lost[order] > _HALF]
    mean, worst, names = float(lost.mean()), float(lost.max()), scan.names(rows[halved])
    facts = {"mean": mean, "worst": worst, "over_half": len(halved), "names": names}
    if worst < 1 - 1 / _SLIGHT:
        removes = f"the centre crop removes at most {format_percent(worst)} of an image"
        evidence = removes if worst else f"the images are {shape}"
        return Finding("data.crop", "fine", evidence, facts=facts)
    evidence = f"the centre crop removes {format_percent(mean)} of an image on average, at most {format_percent(worst)}"
    if len(halved):
        evidence += f"; over half of {plural(len(halved))} ({list_names(names)})"
    table = [("image", "original", "lost")]
    worst_rows = order[:_CROPPED]
    for name, (width, height), part in zip(scan.names(rows[worst_rows]), sides[worst_rows], lost[worst_rows]):
        table.append((sanitize(name), f"{width:,} x {height:,}", format_percent(part)))
    less = "" if buckets else _crop_less(sides, format, _can_keep_aspects(config))
    remedy = f"{less}, or " * bool(less) + f"crop those to {frame} around their subject, or remove them"
    return Finding.graded(
        "data.crop",
        evidence,
        (len(halved) >= max(1, _MANY_HALVES * len(sides)), "warning", "", remedy),
        (len(halved) > 0 or mean >= _MUCH, "hint", "", remedy),
        facts=facts,
        figures=(
            Figure("Share of the area that the crop removes", svg=histogram(lost, "share of the area", "images")),
            Figure("Images that lose most", table=table),
        ),
    )


def _crop_less(sides: NDArray[np.int32], format: ImageFormat, can_keep: bool) -> str:
    """Return the settings under which originals [N, 2] lose less than in the shape of `format`; "" without any."""
    remedies = ["give --aspect keep, which trains on several shapes"] if can_keep else []
    aspect, short = common_aspect(sides.tolist()), min(format.height, format.width)
    if aspect and (size := size_of_aspect(short, aspect)) != format.size:
        remedies.insert(0, f"give --size {size}, which has the shape of most images")
    return "; or ".join(remedies)


def _can_keep_aspects(config: Config) -> bool:
    """Return True unless --aspect keep would be refused."""
    try:
        check_buckets(replace(config, data=replace(config.data, aspect="keep")))
    except RequestError:
        return False
    return not config.data.wrapped and not Pack.is_at(Path(config.source))


def _check_classes(train: ImageSet, held_out: ImageSet) -> list[Finding]:
    """Check labels, and then, as they count the images of each class, balance."""
    labels, aside = (np.zeros(0, np.int64) if images.labels is None else images.labels for images in (train, held_out))
    classes, every = train.classes, np.concatenate([labels, aside])
    outside = int(((every < 0) | (every >= len(classes))).sum())
    if outside:
        evidence = f"{outside:,} of the labels are outside 0 to {len(classes) - 1}, for {plural(len(classes), 'class')}"
        return [Finding("data.label_bounds", "fatal", evidence, "correct the labels", {"outside": outside})]
    counts, held = (np.bincount(one, minlength=len(classes)) for one in (labels, aside))
    return [_check_labels(classes, counts, held), _check_balance(classes, counts)]


def _check_labels(classes: tuple[str, ...], counts: Indices, held_out: Indices) -> Finding:
    """Check that every class has training images."""
    absent = [classes[i] for i in np.flatnonzero(counts == 0)]
    facts = {"classes": len(classes), "without_training_images": absent}
    if not absent:
        evidence = f"labels are 0 to {len(classes) - 1}, each with images to train on"
        return Finding("data.label_bounds", "fine", evidence, facts=facts)
    evidence = (
        f"{plural(len(absent), 'class')} without a training image ({list_names(absent)}); "
        f"{plural(int(held_out[counts == 0].sum()))} held out"
    )
    remedy = (
        "add images of it, or train on all images with --data.held-out 0; otherwise samples of that class are noise"
    )
    return Finding("data.label_bounds", "warning", evidence, remedy, facts)


def _check_balance(classes: tuple[str, ...], counts: Indices) -> Finding:
    """Check that no class is small, or much smaller than another."""
    order = np.argsort(-counts, kind="stable")
    most, least = int(counts[order[0]]), int(counts[order[-1]])
    ratio = most / max(1, least)
    small = [classes[i] for i in order[::-1] if counts[i] < _SMALL_CLASS]
    severe = bool(small) or ratio >= _STRONGLY_UNEVEN
    evidence = f"{len(classes):,} classes with {least:,} to {most:,} images"
    if ratio >= _UNEVEN:
        ends = f"{sanitize(classes[order[0]])} has {most:,}, {sanitize(classes[order[-1]])} {least:,}"
        evidence = f"{len(classes):,} uneven classes: {ends} ({ratio:.0f} : 1)"
    if small:
        evidence += f"; {len(small):,} with fewer than {_SMALL_CLASS}: {list_names(small)}"
    remedy = "add images to the small classes or merge them; or train without classes: --data.labels none"
    bars = order[:_BARS]
    names = [sanitize(classes[i]) for i in bars]
    chart = bar_chart([int(counts[i]) for i in bars], names, "class", "images to train on")
    caption = f"The {_BARS} largest of {len(classes):,} classes." if len(classes) > _BARS else ""
    return Finding.graded(
        "data.balance",
        evidence,
        (severe, "warning", "", remedy),
        (least < _MODEST_CLASS or ratio >= _UNEVEN, "hint", "", remedy),
        facts={"counts": {classes[i]: int(counts[i]) for i in order}, "ratio": ratio, "small": small},
        figures=(Figure("Images of each class", svg=chart, caption=caption),),
    )


def _check_folder_layout(names: Sequence[str]) -> list[Finding]:
    """Check whether the folders of an unlabelled set look like classes or like a train/test split."""
    step = max(1, len(names) // _NAMES)
    folders = [names[i].split("/")[:-1] for i in range(0, len(names), step)]
    # Names of folders that all images lie below say nothing about classes.
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*folders)))
    tops = Counter(parts[shared] if len(parts) > shared else "" for parts in folders)
    loose = tops.pop("", 0)
    facts = {"folders": dict(tops.most_common(20)), "loose": loose, "looked_at": len(folders)}
    if len(tops) >= 2 and all(name.lower() in SPLITS for name in tops):
        evidence = f"the folders {list_names(sorted(tops))} look like a split, but their images are used as one set"
        remedy = "give one of them as SOURCE to train on it alone; held-out images are chosen by name"
        return [Finding("data.layout", "hint", evidence, remedy, facts)]
    if len(tops) < 2 or not 0 < loose < tops.total() or tops.total() < 4 * len(tops):
        return []
    example = next(names[i * step] for i, parts in enumerate(folders) if len(parts) <= shared)
    evidence = (
        f"{len(tops):,} folders ({list_names([name for name, _ in tops.most_common()])}) look like classes, "
        f"but are not used as classes, because there are images next to them: {sanitize(example)}"
    )
    remedy = "to train with classes, move those images into a folder of their own; else give --data.labels none"
    return [Finding("data.layout", "hint", evidence, remedy, facts)]
