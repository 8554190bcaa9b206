"""Checks for duplicates, also across the held-out split: equal images, images saved again, and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from unfog.checks.images.duplicate_search import Duplicates, connected_groups, find_duplicates
from unfog.checks.images.image_scan import MOST_NAMES, ImageScan, Indices, Progress
from unfog.reporting.findings import Finding, Severity, format_percent, format_share, list_names
from unfog.reporting.progress import plural

_EQUAL, _RESAVED, _LEAKED = 0.01, 0.02, 0.02  # shares of images from which each kind is a warning
_REASON = "images that occur several times are memorized first"


def check_duplicates(scan: ImageScan, progress: Progress | None = None) -> list[Finding]:
    """Return data.duplicates, data.near_duplicates and, where images are held out, data.leakage.

    `progress` is called as (pairs compared, total pairs).
    """
    return _report_duplicates(scan, find_duplicates(scan, progress))


def _report_duplicates(scan: ImageScan, duplicates: Duplicates) -> list[Finding]:
    findings = [_check_equal(scan, duplicates), _check_near_duplicates(scan, duplicates)]
    return [*findings, _check_leakage(scan, duplicates)] if scan.prepared.held_out else findings


def _check_equal(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train = len(scan.prepared.train)
    equal = [inside for group in duplicates.equal if len(inside := group[group < train]) > 1]
    total = int(scan.in_train.sum())
    extra = sum(len(group) - 1 for group in equal)
    facts: dict[str, Any] = {"images": total, "copies": extra, "groups": _names(scan, equal)}
    most = f", one of them {len(equal[0])} times" if equal and len(equal[0]) > 2 else ""
    said = f"{format_share(extra, total)} training images equal another to the pixel{most}"
    severity: Severity = "warning" if extra >= _EQUAL * total else "hint"
    remedy = f"keep one of each group (`unfog doctor` lists them in findings.json): {_REASON}"
    finding = Finding("data.duplicates", severity, f"no two of {plural(total)} are equal", remedy, facts)
    return _with_kinds(scan, finding, _Kind(extra, said, equal, "Equal images", "A group a row."))


def _check_near_duplicates(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train, total = len(scan.prepared.train), int(scan.in_train.sum())
    resaved, similar = (
        connected_groups(pairs[(pairs < train).all(1)]) for pairs in (duplicates.resaved, duplicates.similar)
    )
    extra, related = (sum(len(group) - 1 for group in groups) for groups in (resaved, similar))
    facts: dict[str, Any] = {"images": total, "copies": extra, "alike": related, "complete": duplicates.complete}
    facts |= {"groups": _names(scan, resaved), "alike_groups": _names(scan, similar)}
    least = "" if duplicates.complete else "at least "
    again = "training images look like copies of others (compressed, resized or brightened)"
    said = f"{least}{format_share(extra, total)} {again}"
    near = f"{least}{format_share(related, total)} training images are near-duplicates of another"
    caption = "A group a row; each image resembles at least one other of its group."
    severity: Severity = "warning" if extra >= _RESAVED * total else "hint"
    remedy = f"check them, and remove those that add nothing: {_REASON}"
    fine = f"no two of {plural(total)} are near-duplicates"
    return _with_kinds(
        scan,
        Finding("data.near_duplicates", severity, fine, remedy, facts),
        _Kind(extra, said, resaved, "Saved again", "A group a row."),
        _Kind(related, near, similar, "Near-duplicates", caption, " ~ "),
    )


def _check_leakage(scan: ImageScan, duplicates: Duplicates) -> Finding:
    train, held_out = len(scan.prepared.train), int((~scan.in_train).sum())
    # Rows of held-out images follow those of training images, so the ends of a sorted group show whether it has both.
    equal = [group for group in duplicates.equal if group[0] < train <= group[-1]]
    exact = np.concatenate([np.zeros(0, np.int64), *(group[group >= train] for group in equal)])
    again, similar = (
        _pairs_across(pairs, train, duplicates.equal) for pairs in (duplicates.resaved, duplicates.similar)
    )
    # An image counts once, for the worst that is true of it.
    saved = np.setdiff1d([b for _, b in again], exact)
    related = np.setdiff1d([b for _, b in similar], np.concatenate([exact, saved]))
    leaked = len(exact) + len(saved)
    pairs = [np.array([group[0], group[-1]]) for group in equal] + [np.array(pair) for pair in again]
    near = [np.array(pair) for pair in similar]
    facts: dict[str, Any] = {"held_out": held_out, "equal": len(exact), "copies": len(saved), "alike": len(related)}
    facts |= {"pairs": _names(scan, pairs), "alike_pairs": _names(scan, near)}
    kinds = f"{len(exact):,} equal to the pixel, {len(saved):,} saved again"
    said = f"{format_share(leaked, held_out)} held-out images are also in the training set ({kinds})"
    like = f"{format_share(len(related), held_out)} held-out images are near-duplicates of a training image"
    left = "Left: training image."
    severity: Severity = "warning" if leaked >= _LEAKED * held_out else "hint"
    remedy = (
        "remove one of each pair (`unfog doctor` lists them in findings.json); until then the held-out loss is "
        f"too low on up to {format_percent((leaked + len(related)) / held_out)} of its images"
    )
    fine = f"none of {held_out:,} held-out images is in the training set"
    return _with_kinds(
        scan,
        Finding("data.leakage", severity, fine, remedy, facts),
        _Kind(leaked, said, pairs, "In training and held out", left),
        _Kind(len(related), like, near, "Near-duplicates across the split", left, " ~ "),
    )


class _Kind(NamedTuple):
    """One kind of duplicates of a finding; a kind without images is left out."""

    images: int
    evidence: str
    groups: list[Indices]
    title: str
    caption: str
    sign: str = " = "


def _with_kinds(scan: ImageScan, finding: Finding, *kinds: _Kind) -> Finding:
    """Return a finding, whose evidence is of a set without duplicates, for the kinds of them that there are."""
    found = [kind for kind in kinds if kind.images]
    if not found:
        return replace(finding, severity="fine", remedy="")
    said = "; ".join(f"{kind.evidence}: {_examples(scan, kind.groups, kind.sign)}" for kind in found)
    figures = tuple(scan.groups_figure(kind.groups, kind.title, kind.caption) for kind in found)
    return replace(finding, evidence=said, figures=figures)


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
        names.append([scan.name(int(row)) for row in group[: max(0, left)]])
        left -= len(group)
    return [group for group in names if group]


def _examples(scan: ImageScan, groups: Sequence[Indices], sign: str) -> str:
    """Return "a.png = b.png, c.png = d.png, ..."."""
    parts = [sign.join(list_names([scan.name(int(row))]) for row in group[:2]) for group in groups[:2]]
    return ", ".join([*parts, *["..."] * (len(groups) > 2)])
