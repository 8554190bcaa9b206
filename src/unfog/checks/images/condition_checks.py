"""Checks of conditions: images of each value, redundant columns, and values that nearly name images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.reporting.findings import Finding, format_share
from unfog.text import plural, sanitize
from unfog.values.columns import CLASS, Column, without_class
from unfog.values.condition_format import TEXT
from unfog.values.condition_kinds import kind_of
from unfog.values.kinds.image_kinds import IMAGE_KINDS, MADE

_FEW, _MODEST = 20, 50  # images below which a category cannot be learned, and below which it hardly can
_UNKNOWN = 0.5  # share of the images without a value
_GAP, _STEPS = 0.15, 5  # of the range of a number, and of its usual steps, that lie between two neighbours
_ALIKE, _LEAST = 0.9, 20  # correlation of two columns that is reported, and images that are needed for it
_ROWS, _COLUMNS = 20_000, 40  # evenly spaced images, and first columns, that are compared
_GROUPS, _GROUP = 10, 20  # different values at least, with so many images each at most: nearly names of images
_SHARED = 0.5  # share of held-out images whose value is also that of a training image
_AT_ONCE = 500  # masks that are counted
_SAID = 5  # columns or pairs in a line


class Comparable(NamedTuple):
    """The values of a column, [N]: numbers with NaN, or with `groups` the numbers of categories, -1 if not known."""

    values: NDArray[np.float64]
    groups: bool

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.asarray(self.values >= 0 if self.groups else np.isfinite(self.values))


def check_conditions(train: ImageSet, held_out: ImageSet) -> list[Finding]:
    """Return the findings on the columns of the images; [] without columns other than the class."""
    # Captions have `caption_checks`, and columns that are made of the images follow from them.
    columns = {name: one for name, one in train.columns.items() if one.kind not in (TEXT, *MADE)}
    others = without_class(columns)
    if not others or not len(train):
        return []
    rows = evenly_spaced(len(train), _ROWS)
    few = {name: columns[name].rows(rows) for name in list(columns)[:_COLUMNS]}
    comparable = {name: one for name, column in few.items() if (one := _comparable(column)) is not None}
    found = [_check_coverage(others), _check_pairs(comparable)]
    if CLASS in comparable:
        found.append(_check_classes(comparable))
    return [*found, *_check_groups(others, held_out.columns), *_check_images(others, held_out.columns)]


def _comparable(column: Column) -> Comparable | None:
    values = np.asarray(column.values)
    if values.ndim != 1:
        return None
    groups = bool(column.categories)
    return Comparable(values.astype(np.float64), groups) if groups or values.dtype.kind == "f" else None


def _check_coverage(columns: Mapping[str, Column]) -> Finding:
    """Check that each category has images, numbers no wide gap, and most images a value."""
    rare, scarce, gaps, unknown = list[str](), list[str](), list[str](), list[str]()
    for name, column in columns.items():
        said, known = sanitize(name), kind_of(column.kind).known(column.values)
        if known.mean() < 1 - _UNKNOWN:
            unknown.append(f"{said} is not known for {format_share(int((~known).sum()), len(known))} images")
        for category, count in _category_counts(column):
            if count < _MODEST:
                (rare if count < _FEW else scarce).append(f"{said} = {sanitize(category)} has {plural(count)}")
        if column.kind == "number" and (gap := _widest_gap(column.values[known])):
            gaps.append(f"no image has {said} between {gap[0]:g} and {gap[1]:g}")
    problems = [*rare, *gaps, *unknown, *scarce]
    evidence = f"{plural(len(columns), 'condition')}: each value has enough images, and numbers have no wide gap"
    if problems:
        evidence = "; ".join(problems[:_SAID]) + f"; and {len(problems) - _SAID:,} more" * (len(problems) > _SAID)
    remedy = "samples of such values are guesses: add images, or group rare categories in the table"
    return Finding.graded(
        "data.condition_coverage",
        evidence,
        (bool(rare), "warning", "", remedy),
        (bool(problems), "hint", "", remedy),
        facts={"rare": rare + scarce, "gaps": gaps, "unknown": unknown},
    )


def _category_counts(column: Column) -> list[tuple[str, int]]:
    """Return each category of a column with its number of images; [] without categories."""
    if not column.categories:
        return []
    values, size = np.asarray(column.values), len(column.categories)
    if column.kind in IMAGE_KINDS:  # a mask
        return list(zip(column.categories, _images_with(values, size).tolist()))
    counts = (values > 0).sum(0) if values.ndim > 1 else np.bincount(values[values >= 0], minlength=size)
    return list(zip(column.categories, counts.tolist()))


def _images_with(masks: NDArray[np.integer], categories: int) -> NDArray[np.int64]:
    """Return the number of masks [N, 1, H, W] that have each of so many categories."""
    counts = np.zeros(categories, np.int64)
    for first in range(0, len(masks), _AT_ONCE):
        part = masks[first : first + _AT_ONCE].reshape(-1, math.prod(masks.shape[1:]))
        present = np.zeros((len(part), categories + 1), bool)
        present[np.arange(len(part))[:, None], part] = True  # the last is of -1, which is not known
        counts += present[:, :categories].sum(0)
    return counts


def _widest_gap(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the ends of the widest gap between neighbours; None if it is small for the range or the usual step."""
    different = np.unique(values)
    if len(different) < 3:
        return None
    steps = np.diff(different)
    i = int(steps.argmax())
    wide = steps[i] >= _GAP * (different[-1] - different[0]) and steps[i] >= _STEPS * np.median(steps)
    return (float(different[i]), float(different[i + 1])) if wide else None


def _check_pairs(columns: Mapping[str, Comparable]) -> Finding:
    """Check that no two conditions are strongly correlated."""
    names = [name for name in columns if name != CLASS]
    strengths = {(a, b): association(columns[a], columns[b]) for a, b in combinations(names, 2)}
    alike = sorted((pair for pair in strengths if strengths[pair] >= _ALIKE), key=lambda pair: -strengths[pair])
    facts = {"pairs": [[*pair, round(strengths[pair], 3)] for pair in alike]}
    said = [f"{sanitize(a)} and {sanitize(b)} ({strengths[a, b]:.2f})" for a, b in alike]
    if not said:
        return Finding("data.condition_pairs", "fine", "no two conditions are strongly correlated", facts=facts)
    more = f", and {len(said) - _SAID:,} more" * (len(said) > _SAID)
    return Finding(
        "data.condition_pairs",
        "hint",
        f"conditions are strongly correlated: {', '.join(said[:_SAID])}{more}",
        "few images have other combinations of them: give both when you draw, or leave one out of --condition",
        facts,
    )


def _check_classes(columns: Mapping[str, Comparable]) -> Finding:
    """Check that no condition repeats the classes."""
    same = [name for name, column in columns.items() if name != CLASS and _is_function(column, columns[CLASS])]
    facts = {"columns": same}
    if not same:
        evidence = "no condition is the same for all images of each class"
        return Finding("data.condition_classes", "fine", evidence, facts=facts)
    has = "has" if len(same) == 1 else "have"
    evidence = f"{', '.join(map(sanitize, same[:_SAID]))} {has} one value for all images of each class"
    remedy = "it adds nothing to the class: leave it out of --condition, or train without classes: --data.labels none"
    return Finding("data.condition_classes", "hint", evidence, remedy, facts)


def _is_function(column: Comparable, classes: Comparable) -> bool:
    """Return True if all images of a class have one value, and each class several images."""
    known = column.known & classes.known
    if known.sum() < _LEAST:
        return False
    pairs = np.unique(np.stack([classes.values[known], column.values[known]]), axis=1)
    count = len(np.unique(pairs[0]))
    return bool(1 < count == pairs.shape[1] <= known.sum() / 2)


def _check_groups(train: Mapping[str, Column], held_out: Mapping[str, Column]) -> list[Finding]:
    """Check whether held-out images share a value that only few images have, such as a patient."""
    found = []
    for name, column in train.items():
        ours, theirs = (_names_of_groups(each) for each in (column, held_out.get(name)))
        groups = len(np.unique(ours))
        # Unique values are not shared, and a large group is rarely one subject.
        if groups < _GROUPS or not 2 * groups <= len(ours) <= _GROUP * groups or not len(theirs):
            continue
        shared = np.isin(theirs, ours)
        facts = {"column": name, "groups": groups, "shared": int(shared.sum()), "held_out": len(theirs)}
        evidence = (
            f"{sanitize(name)} has {groups:,} values of {len(ours) / groups:.1f} images each, and "
            f"{format_share(int(shared.sum()), len(theirs))} held-out images have one of a training image"
        )
        if shared.mean() >= _SHARED:
            evidence += ": if it names a subject, such as a patient, the held-out loss does not measure new ones"
            remedy = (
                f"to measure new ones, keep images of some values of {sanitize(name)} out of the source, and "
                "compare samples with them: unfog evaluate RUN --reference FOLDER"
            )
            found.append(Finding("data.condition_groups", "hint", evidence, remedy, facts))
    return found


def _check_images(train: Mapping[str, Column], held_out: Mapping[str, Column]) -> list[Finding]:
    """Check whether the images that are conditions of held-out images are also those of training images."""
    found = []
    for name, column in train.items():
        theirs = held_out.get(name)
        if column.kind not in IMAGE_KINDS or theirs is None or not (wanted := _digests(theirs)):
            continue
        ours = {*_digests(column)}
        shared = sum(each in ours for each in wanted)
        facts = {"column": name, "shared": shared, "held_out": len(wanted), "different": len(ours)}
        said = f"{format_share(shared, len(wanted))} held-out images have the {sanitize(name)} of a training image"
        remedy = "the held-out loss and the metric obeys then do not test new ones; give each image its own"
        is_shared = shared >= _SHARED * len(wanted)
        found.append(Finding.graded("data.condition_images", said, (is_shared, "hint", "", remedy), facts=facts))
    return found


def _digests(column: Column) -> list[bytes]:
    """Return a digest of each image of a column that is known."""
    known = np.flatnonzero(kind_of(column.kind).known(column.values))
    return [hashlib.sha256(np.ascontiguousarray(column.values[i]).data).digest() for i in known.tolist()]


def _names_of_groups(column: Column | None) -> NDArray[np.float64]:
    """Return the known values of a category or of whole numbers; [] of others."""
    comparable = None if column is None else _comparable(column)
    if comparable is None:
        return np.zeros(0)
    values = comparable.values[comparable.known]
    return values if comparable.groups or bool((values == values.round()).all()) else np.zeros(0)


def association(a: Comparable, b: Comparable) -> float:
    """Return the strength of the association of two columns, 0 to 1, over the images of which both are known.

    Of two numbers |Pearson's r|; of two categories Cramér's V, and of one of each the correlation ratio, both without
    the bias of few images. 0 of fewer than 20 images.
    """
    known = a.known & b.known
    count = int(known.sum())
    if count < _LEAST:
        return 0.0
    one, other = a.values[known], b.values[known]
    if a.groups and b.groups:
        return _cramer(one, other)
    if a.groups or b.groups:
        return _correlation_ratio(*((one, other) if a.groups else (other, one)))
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(abs(np.corrcoef(one, other)[0, 1]))


def _cramer(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return Cramér's V of two columns of categories, with the correction of Bergsma 2013."""
    (_, i), (_, j) = (np.unique(each, return_inverse=True) for each in (one, other))
    rows, columns, count = i.max() + 1, j.max() + 1, len(one)
    table = np.bincount(i * columns + j, minlength=rows * columns).reshape(rows, columns).astype(np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / count
    phi = float(((table - expected) ** 2 / expected).sum() / count)
    phi = max(0.0, phi - (rows - 1) * (columns - 1) / (count - 1))
    shrunk = min(each - (each - 1) ** 2 / (count - 1) for each in (rows, columns))
    return min(1.0, (phi / (shrunk - 1)) ** 0.5) if shrunk > 1 else 0.0


def _correlation_ratio(groups: NDArray[np.float64], numbers: NDArray[np.float64]) -> float:
    """Return the correlation ratio of numbers in groups, adjusted for the number of groups."""
    _, i = np.unique(groups, return_inverse=True)
    counts = np.bincount(i)
    means = np.bincount(i, numbers) / counts
    within, total = float(((numbers - means[i]) ** 2).sum()), float(((numbers - numbers.mean()) ** 2).sum())
    free = len(numbers) - len(counts)
    if total == 0 or free < 1:
        return 0.0
    return float(max(0.0, 1 - (within / free) / (total / (len(numbers) - 1))) ** 0.5)
