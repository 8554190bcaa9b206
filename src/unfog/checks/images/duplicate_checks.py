"""Checks for duplicates: equal images, images saved again, and near-duplicates; also across the held-out split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.example_images import format_percent, format_share, groups_figure, list_names
from unfog.checks.images.near_duplicates import (
    BLANK_DEVIATION,
    Floats,
    Indices,
    candidate_pairs,
    compare_thumbnails,
    connected_groups,
    thumbnails,
)
from unfog.checks.images.pixel_statistics import MOST_NAMES, ImageScan, Progress
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural

_EQUAL, _RESAVED, _LEAKED = 0.01, 0.02, 0.02  # shares of images from which each kind is a warning

_BATCH_BYTES = 64 * 2**20  # of pixels, read for one batch of pairs
_MOST_PAIRS = 1_000_000  # compared; only large sets of similar subjects, such as aligned faces, have more candidates
_SMALL_SHAPE, _SMALL_SPOT = 0.93, 64.0  # of 8 x 8 thumbnails: looser than the limits at 16 x 16, so nothing is lost

_SIMILAR = " ~ "
_REASON = "images that occur often are memorized first"


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Images that repeat others, as rows of an `ImageScan`. Blank images, which are all equal, are left out."""

    equal: list[Indices]
    """Groups of rows with equal pixels."""

    resaved: Indices
    """[M, 2] rows of one image that was compressed or resized again; of equal ones only the first row appears."""

    similar: Indices
    """[M, 2] rows of near-duplicates that are not in `resaved`."""

    complete: bool
    """False where there were too many candidates to compare them all."""


def find_duplicates(scan: ImageScan, progress: Progress | None = None) -> Duplicates:
    """Search all scanned images; `progress` is called as (pairs compared, total pairs)."""
    content = np.flatnonzero(scan.statistics.spread >= BLANK_DEVIATION)
    digests = scan.statistics.digest[content]
    _, first, kind, count = np.unique(digests, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(kind, kind="stable")
    groups = np.split(scan.rows[content[order]], np.cumsum(count)[:-1]) if len(content) else []
    equal = sorted((group for group in groups if len(group) > 1), key=len, reverse=True)

    distinct = content[np.sort(first)]
    pairs = distinct[_likely_pairs(scan.statistics.hash[distinct], scan.statistics.small[distinct])]
    complete = len(pairs) <= _MOST_PAIRS
    if not complete:
        pairs = pairs[np.random.default_rng(0).choice(len(pairs), _MOST_PAIRS, replace=False)]
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    resaved, similar = _compare_pairs(scan, scan.rows[pairs], progress)
    return Duplicates(equal, scan.rows[pairs[resaved]], scan.rows[pairs[similar & ~resaved]], complete)


def _likely_pairs(hashes: NDArray[np.uint64], small: NDArray[np.uint8]) -> Indices:
    """Return pairs [M, 2] of positions, each once, that have similar hashes and similar 8 x 8 thumbnails."""
    found = [np.zeros(0, np.int64)]
    for pairs in candidate_pairs(hashes):
        for part in np.array_split(pairs, max(1, len(pairs) // 100_000)):
            part = part[_similar(small[part[:, 0]], small[part[:, 1]])]
            found.append(part[:, 0] * len(hashes) + part[:, 1])
    return np.stack(np.divmod(np.unique(np.concatenate(found)), max(1, len(hashes))), 1)


def _similar(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.bool_]:
    x, y = (_centred(side) for side in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    shape: Floats = (x * y).sum(1) / np.maximum(norms, 1e-6)
    near: NDArray[np.bool_] = np.logical_and(shape >= _SMALL_SHAPE, np.abs(x - y).max(1) <= _SMALL_SPOT)
    return near


def _centred(small: NDArray[np.uint8]) -> Floats:
    x = small.reshape(len(small), small.shape[1] * small.shape[2]).astype(np.float32)
    centred: Floats = np.subtract(x, x.mean(1, keepdims=True))
    return centred


def _compare_pairs(
    scan: ImageScan, pairs: Indices, progress: Progress | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks of the pairs of rows [M, 2]: saved again, and similar."""
    resaved, similar = np.zeros(len(pairs), np.bool_), np.zeros(len(pairs), np.bool_)
    image = int(np.prod(scan.prepared.train.pixels.shape[1:]))
    batch = max(1, min(4096, _BATCH_BYTES // (2 * image)))
    for start in range(0, len(pairs), batch):
        part = slice(start, start + batch)
        rows, ends = np.unique(pairs[part], return_inverse=True)
        thumbs = thumbnails(scan.pixels(rows))
        ends = ends.reshape(-1, 2)
        resaved[part], similar[part] = compare_thumbnails(thumbs[ends[:, 0]], thumbs[ends[:, 1]])
        if progress:
            progress(min(start + batch, len(pairs)), len(pairs))
    return resaved, similar


def check_duplicates(scan: ImageScan, duplicates: Duplicates) -> list[Finding]:
    """Return data.duplicates, data.near_duplicates and, where images are held out, data.leakage."""
    findings = [_check_equal(scan, duplicates), _check_near_duplicates(scan, duplicates)]
    return [*findings, _check_leakage(scan, duplicates)] if scan.prepared.held_out else findings


def _check_equal(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train = len(scan.prepared.train)
    equal = [inside for group in duplicates.equal if len(inside := group[group < train]) > 1]
    total = int(scan.in_train.sum())
    extra = sum(len(group) - 1 for group in equal)
    facts: dict[str, Any] = {"images": total, "copies": extra, "groups": _names(scan, equal)}
    if not extra:
        return Finding("data.duplicates", "fine", f"no two of {plural(total)} are equal", facts=facts)
    most = f", one of them {len(equal[0])} times" if len(equal[0]) > 2 else ""
    evidence = (
        f"{format_share(extra, total)} training images equal another to the pixel{most}: {_examples(scan, equal)}"
    )
    remedy = f"keep one of each group (`unfog doctor` lists them in findings.json): {_REASON}"
    severity: Severity = "warning" if extra >= _EQUAL * total else "hint"
    figure = groups_figure(scan, equal, "Equal images", "A group a row.")
    return Finding("data.duplicates", severity, evidence, remedy, facts, (figure,))


def _check_near_duplicates(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train, total = len(scan.prepared.train), int(scan.in_train.sum())
    resaved, similar = (
        connected_groups(pairs[(pairs < train).all(1)]) for pairs in (duplicates.resaved, duplicates.similar)
    )
    extra, related = (sum(len(group) - 1 for group in groups) for groups in (resaved, similar))
    facts: dict[str, Any] = {"images": total, "copies": extra, "alike": related, "complete": duplicates.complete}
    facts |= {"groups": _names(scan, resaved), "alike_groups": _names(scan, similar)}
    if not extra and not related:
        evidence = f"no two of {plural(total)} are near-duplicates"
        return Finding("data.near_duplicates", "fine", evidence, facts=facts)
    least = "" if duplicates.complete else "at least "
    parts: list[str] = []
    figures: list[Figure] = []
    if extra:
        again = "look like another saved again (compressed, resized or brightened)"
        parts.append(f"{least}{format_share(extra, total)} training images {again}: {_examples(scan, resaved)}")
        figures.append(groups_figure(scan, resaved, "Saved again", "A group a row."))
    if related:
        near = f"{least}{format_share(related, total)} training images are near-duplicates of another"
        parts.append(f"{near}: {_examples(scan, similar, _SIMILAR)}")
        caption = "A group a row; each image resembles at least one other of its group."
        figures.append(groups_figure(scan, similar, "Near-duplicates", caption))
    remedy = f"look at them, and remove those that add nothing: {_REASON}"
    severity: Severity = "warning" if extra >= _RESAVED * total else "hint"
    return Finding("data.near_duplicates", severity, "; ".join(parts), remedy, facts, tuple(figures))


def _check_leakage(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train = len(scan.prepared.train)
    held_out = int((~scan.in_train).sum())
    equal = [group for group in duplicates.equal if group[0] < train <= group[-1]]
    exact = np.concatenate([np.zeros(0, np.int64), *(group[group >= train] for group in equal)])
    again, similar = (
        _pairs_across(pairs, train, duplicates.equal) for pairs in (duplicates.resaved, duplicates.similar)
    )
    saved = np.setdiff1d([b for _, b in again], exact)
    related = np.setdiff1d([b for _, b in similar], np.concatenate([exact, saved]))
    leaked = len(exact) + len(saved)
    pairs = [np.array([group[0], group[-1]]) for group in equal] + [np.array(pair) for pair in again]
    near = [np.array(pair) for pair in similar]
    facts: dict[str, Any] = {"held_out": held_out, "equal": len(exact), "copies": len(saved), "alike": len(related)}
    facts |= {"pairs": _names(scan, pairs), "alike_pairs": _names(scan, near)}
    if not leaked and not len(related):
        evidence = f"none of {held_out:,} held-out images is in the training set"
        return Finding("data.leakage", "fine", evidence, facts=facts)
    parts: list[str] = []
    figures: list[Figure] = []
    if leaked:
        kinds = f"{len(exact):,} equal to the pixel, {len(saved):,} saved again"
        inside = f"{format_share(leaked, held_out)} held-out images are in the training set as well ({kinds})"
        parts.append(f"{inside}: {_examples(scan, pairs)}")
        figures.append(groups_figure(scan, pairs, "In training and held out", "Left: training image."))
    if len(related):
        inside = f"{format_share(len(related), held_out)} held-out images are near-duplicates of a training image"
        parts.append(f"{inside}: {_examples(scan, near, _SIMILAR)}")
        figures.append(groups_figure(scan, near, "Near-duplicates across the split", "Left: training image."))
    remedy = (
        "remove one of each pair (`unfog doctor` lists them in findings.json); until then the held-out loss is too "
        f"low on up to {format_percent((leaked + len(related)) / held_out)} of its images"
    )
    severity: Severity = "warning" if leaked >= _LEAKED * held_out else "hint"
    return Finding("data.leakage", severity, "; ".join(parts), remedy, facts, tuple(figures))


def _pairs_across(pairs: Indices, train: int, equal: list[Indices]) -> list[tuple[int, int]]:
    """Return (training row, held-out row) of the pairs across the split, also for images equal to those of a pair."""
    members = {int(group[0]): group.tolist() for group in equal}
    found = []
    for one, other in np.sort(pairs, axis=1).tolist():
        # The first row stands for its group of equal images; a group in both sets is stood for by a training row.
        if one < train <= other:
            found += [(one, row) for row in members.get(other, [other])]
    return found


def _names(scan: ImageScan, groups: Sequence[Indices]) -> list[list[str]]:
    names: list[list[str]] = []
    left = MOST_NAMES
    for group in groups:
        if left <= 0:
            break
        names.append([scan.name(int(row)) for row in group[:left]])
        left -= len(names[-1])
    return names


def _examples(scan: ImageScan, groups: Sequence[Indices], sign: str = " = ", most: int = 2) -> str:
    """Return "a.png = b.png, c.png = d.png, ..."."""
    parts = [sign.join(list_names([scan.name(int(row))]) for row in group[:2]) for group in groups[:most]]
    return ", ".join([*parts, *["..."] * (len(groups) > most)])
