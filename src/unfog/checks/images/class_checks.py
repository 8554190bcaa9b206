"""Checks of classes: balance, labels out of range, and folders that look like unused classes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from unfog.checks.images.example_images import list_names
from unfog.checks.images.near_duplicates import Indices
from unfog.checks.images.pixel_statistics import ImageScan
from unfog.config.schema import Config
from unfog.data.dataset import ImageSet
from unfog.data.sources.labels import SPLITS
from unfog.reporting.charts import bar_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

_SMALL_CLASS, _MODEST_CLASS = 20, 50  # images below which a class cannot be learned, and below which it hardly can
_UNEVEN, _STRONGLY_UNEVEN = 3, 10  # ratio of the largest class to the smallest
_NAMES = 1000  # read for the layout
_BARS = 40


def check_labels(scan: ImageScan, config: Config) -> Finding | None:
    """Check that labels are in range and that every class has training images."""
    train, held_out = scan.prepared.train, scan.prepared.held_out
    if train.labels is None:
        return None
    if broken := _outside(train) + _outside(held_out):
        count = len(train.classes)
        evidence = f"{plural(broken, 'label')} outside 0 to {count - 1}, for {plural(count, 'class')}"
        return Finding("data.label_bounds", "fatal", evidence, "correct the labels", {"outside": broken})
    classes = train.classes
    counts, aside = _counts(train), _counts(held_out)
    absent = [classes[i] for i in np.flatnonzero(counts == 0)]
    facts = {"classes": len(classes), "without_training_images": absent}
    if not absent:
        evidence = f"labels are 0 to {len(classes) - 1}, each with images to train on"
        return Finding("data.label_bounds", "fine", evidence, facts=facts)
    evidence = (
        f"{plural(len(absent), 'class')} without a training image ({list_names(absent)}); "
        f"{plural(int(aside[counts == 0].sum()))} held out"
    )
    remedy = "add images of it, or train on all with --data.held-out 0; its samples would be noise"
    return Finding("data.label_bounds", "warning", evidence, remedy, facts)


def check_balance(scan: ImageScan, config: Config) -> Finding | None:
    """Check that no class is small, or much smaller than another."""
    train = scan.prepared.train
    if train.labels is None or _outside(train) or _outside(scan.prepared.held_out):
        return None
    classes, counts = train.classes, _counts(train)
    order = np.argsort(-counts, kind="stable")
    most, least = int(counts[order[0]]), int(counts[order[-1]])
    ratio = most / max(1, least)
    small = [classes[i] for i in order[::-1] if counts[i] < _SMALL_CLASS]
    facts = {"counts": {classes[i]: int(counts[i]) for i in order}, "ratio": ratio, "small": small}
    severity: Severity = "fine"
    if small or ratio >= _STRONGLY_UNEVEN:
        severity = "warning"
    elif least < _MODEST_CLASS or ratio >= _UNEVEN:
        severity = "hint"
    evidence = f"{len(classes):,} classes with {least:,} to {most:,} images"
    if severity != "fine" and ratio >= _UNEVEN:
        ends = f"{sanitize(classes[order[0]])} has {most:,}, {sanitize(classes[order[-1]])} {least:,}"
        evidence = f"{len(classes):,} uneven classes: {ends} ({ratio:.0f} : 1)"
    if small:
        evidence += f"; {len(small):,} with fewer than {_SMALL_CLASS}: {list_names(small)}"
    remedy = "add images to the small classes or merge them; or train without classes: --data.labels none"
    bars = order[:_BARS]
    names = [sanitize(classes[i]) for i in bars]
    chart = bar_chart([int(counts[i]) for i in bars], names, "class", "images to train on")
    caption = f"The {_BARS} largest of {len(classes):,} classes." if len(classes) > _BARS else ""
    figure = Figure("Images of each class", svg=chart, caption=caption)
    return Finding("data.balance", severity, evidence, "" if severity == "fine" else remedy, facts, (figure,))


def _outside(images: ImageSet) -> int:
    labels = np.zeros(0, np.int64) if images.labels is None else images.labels
    return int(((labels < 0) | (labels >= len(images.classes))).sum())


def _counts(images: ImageSet) -> Indices:
    labels = np.zeros(0, np.int64) if images.labels is None else images.labels
    return np.bincount(labels, minlength=len(images.classes))


def check_folder_layout(scan: ImageScan, config: Config) -> Finding | None:
    """Check whether the folders of an unlabelled set look like classes or like a train/test split."""
    names = scan.prepared.train.names
    if scan.prepared.train.labels is not None or config.data.labels == "none":
        return None
    step = max(1, len(names) // _NAMES)
    folders = [names[i].split("/")[:-1] for i in range(0, len(names), step)]
    shared = len(_common_folders(folders))
    tops = Counter(parts[shared] if len(parts) > shared else "" for parts in folders)
    loose = tops.pop("", 0)
    if len(tops) < 2:
        return None
    facts = {"folders": dict(tops.most_common(20)), "loose": loose, "looked_at": len(folders)}
    if all(name.lower() in SPLITS for name in tops):
        evidence = f"the folders {list_names(sorted(tops))} look like a split, but their images are used as one set"
        remedy = "give one of them as SOURCE to train on it alone; held-out images are chosen by name"
        return Finding("data.layout", "hint", evidence, remedy, facts)
    if loose and loose < tops.total() and tops.total() >= 4 * len(tops):
        example = next(names[i * step] for i, parts in enumerate(folders) if len(parts) <= shared)
        evidence = (
            f"{len(tops):,} folders ({list_names([name for name, _ in tops.most_common()])}) look like classes, "
            f"but are not used as such, because images lie beside them: {sanitize(example)}"
        )
        remedy = "to train with classes, move those images into a folder of their own; else give --data.labels none"
        return Finding("data.layout", "hint", evidence, remedy, facts)
    return None


def _common_folders(folders: list[list[str]]) -> list[str]:
    # What the smallest and the largest share in sorted order, all between them share as well.
    first, last = min(folders), max(folders)
    same = [a == b for a, b in zip(first, last)]
    return first[: same.index(False) if False in same else len(same)]
