"""Classes: how even they are, whether labels fit them, and folders that look like classes and are not used."""

from __future__ import annotations

from collections import Counter

import numpy as np

from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.sources.source import SPLITS
from unfog.doctor.images.example_images import list_names
from unfog.doctor.images.near_duplicates import Indices
from unfog.reporting.charts import bar_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

_SMALL_CLASS, _MODEST_CLASS = 20, 50
"""Images of a class below which it cannot be learned, and below which it hardly can."""

_UNEVEN, _STRONGLY_UNEVEN = 3, 10
"""Times that the largest class is larger than the smallest."""

_NAMES = 1000  # looked at for the layout
_BARS = 40


def check_classes(prepared: Dataset, config: Config) -> list[Finding]:
    """Labels, balance, or the layout of folders where there are no classes."""
    if prepared.train.labels is None:
        return _layout(prepared, config)
    broken = _outside(prepared.train) + _outside(prepared.held_out)
    count = len(prepared.train.classes)
    if broken:
        evidence = f"{plural(broken, 'label')} outside 0 to {count - 1}, for {plural(count, 'class')}"
        return [Finding("data.label_bounds", "fatal", evidence, "correct the labels", {"outside": broken})]
    return [_bounds(prepared), _balance(prepared)]


def _outside(images: ImageSet) -> int:
    labels = np.zeros(0, np.int64) if images.labels is None else images.labels
    return int(((labels < 0) | (labels >= len(images.classes))).sum())


def _counts(images: ImageSet) -> Indices:
    labels = np.zeros(0, np.int64) if images.labels is None else images.labels
    return np.bincount(labels, minlength=len(images.classes))


def _bounds(prepared: Dataset) -> Finding:
    classes = prepared.train.classes
    train, held_out = _counts(prepared.train), _counts(prepared.held_out)
    absent = [classes[i] for i in np.flatnonzero(train == 0)]
    facts = {"classes": len(classes), "without_training_images": absent}
    if not absent:
        evidence = f"labels are 0 to {len(classes) - 1}, each with images to train on"
        return Finding("data.label_bounds", "fine", evidence, facts=facts)
    images = plural(int(held_out[train == 0].sum()))
    return Finding(
        "data.label_bounds",
        "warning",
        f"{plural(len(absent), 'class')} without an image to train on ({list_names(absent)}); {images} held out",
        "add images of it, or train on all with --data.held-out 0; its samples would be noise",
        facts,
    )


def _balance(prepared: Dataset) -> Finding:
    classes, counts = prepared.train.classes, _counts(prepared.train)
    order = np.argsort(-counts, kind="stable")
    most, least = int(counts[order[0]]), int(counts[order[-1]])
    ratio = most / max(1, least)
    small = [i for i in order[::-1] if counts[i] < _SMALL_CLASS]
    facts = {
        "counts": {classes[i]: int(counts[i]) for i in order},
        "ratio": ratio,
        "small": [classes[i] for i in small],
    }
    severity: Severity = "fine"
    if small or ratio >= _STRONGLY_UNEVEN:
        severity = "warning"
    elif least < _MODEST_CLASS or ratio >= _UNEVEN:
        severity = "hint"
    ends = f"{sanitize(classes[order[0]])} has {most:,}, {sanitize(classes[order[-1]])} {least:,}"
    evidence = f"{len(classes):,} classes with {least:,} to {most:,} images"
    if severity != "fine":
        evidence = f"{len(classes):,} uneven classes: {ends} ({ratio:.0f} : 1)" if ratio >= _UNEVEN else evidence
        if small:
            evidence += f"; {len(small):,} with fewer than {_SMALL_CLASS}: {list_names([classes[i] for i in small])}"
    remedy = "add images of the small ones or merge them; or leave classes out with --data.labels none"
    bars = order[:_BARS]
    chart = bar_chart(
        [int(counts[i]) for i in bars], [sanitize(classes[i]) for i in bars], "class", "images to train on"
    )
    rest = f"The {_BARS} largest of {len(classes):,} classes." if len(classes) > _BARS else ""
    exhibit = Figure("Images of each class", svg=chart, caption=rest)
    return Finding("data.balance", severity, evidence, "" if severity == "fine" else remedy, facts, (exhibit,))


def _layout(prepared: Dataset, config: Config) -> list[Finding]:
    """Whether the folders look like classes, or like a split, and are taken for neither."""
    if config.data.labels == "none":
        return []
    names = prepared.train.names
    step = max(1, len(names) // _NAMES)
    folders = [names[i].split("/")[:-1] for i in range(0, len(names), step)]
    shared = len(_common(folders))
    tops = Counter(parts[shared] if len(parts) > shared else "" for parts in folders)
    loose = tops.pop("", 0)
    if len(tops) < 2:
        return []
    facts = {"folders": dict(tops.most_common(20)), "loose": loose, "looked_at": len(folders)}
    if all(name.lower() in SPLITS for name in tops):
        return [
            Finding(
                "data.layout",
                "hint",
                f"the folders {list_names(sorted(tops))} look like a split, but their images are taken together",
                "give one of them as SOURCE to train on it alone; what is held out is chosen by name",
                facts,
            )
        ]
    if loose and loose < tops.total() and tops.total() >= 4 * len(tops):
        which = next(names[i * step] for i, parts in enumerate(folders) if len(parts) <= shared)
        evidence = f"{len(tops):,} folders ({list_names([name for name, _ in tops.most_common()])}) look like classes"
        evidence += f", but are not used, as images lie beside them: {sanitize(which)}"
        remedy = (
            "move those into a folder of their own to train with classes, or give --data.labels none if none are meant"
        )
        return [Finding("data.layout", "hint", evidence, remedy, facts)]
    return []


def _common(folders: list[list[str]]) -> list[str]:
    """The folders that all share, from the top."""
    first, last = min(folders), max(folders)
    same = [a == b for a, b in zip(first, last)]
    return first[: same.index(False) if False in same else len(same)]
