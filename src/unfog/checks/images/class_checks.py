"""Checks of classes: labels in both sets, balance, and folders that look like classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from unfog.checks.images.image_scan import (
    Indices,
    list_names,
)
from unfog.data.dataset import ImageSet
from unfog.data.sources.labels import SPLITS
from unfog.reporting.charts import bar_chart
from unfog.reporting.findings import Figure, Finding
from unfog.reporting.progress import plural
from unfog.text import sanitize

_SMALL_CLASS, _MODEST_CLASS = 20, 50  # images below which a class cannot be learned, and below which it hardly can
_UNEVEN, _STRONGLY_UNEVEN = 3, 10  # ratio of the largest class to the smallest
_NAMES = 1000  # read for the layout
_BARS = 40


def check_classes(train: ImageSet, held_out: ImageSet) -> list[Finding]:
    """Check labels, and then, as they count the images of each class, balance."""
    labels, aside = (np.zeros(0, np.int64) if images.labels is None else images.labels for images in (train, held_out))
    classes, every = train.classes, np.concatenate([labels, aside])
    outside = int(((every < 0) | (every >= len(classes))).sum())
    if outside:
        evidence = f"{plural(outside, 'label')} outside 0 to {len(classes) - 1}, for {plural(len(classes), 'class')}"
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


def check_folder_layout(names: Sequence[str]) -> list[Finding]:
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
