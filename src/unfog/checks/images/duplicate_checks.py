"""Checks for duplicates, also across the held-out split: equal images, images saved again, and near-duplicates.

A perceptual hash finds candidate pairs among millions of images, and thumbnails confirm them, because simple images
share a hash without being similar. To find close hashes in O(N log N), they are sorted by many random orders of their
bits: two hashes that differ in few bits are neighbours in some of these orders (Charikar 2002; Manku et al. 2007).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.image_scan import (
    BLANK_DEVIATION,
    MOST_NAMES,
    Floats,
    Hashes,
    ImageScan,
    Indices,
    Progress,
    luma,
    thumbnails,
)
from unfog.reporting.findings import Finding, Severity, format_percent, format_share, list_names
from unfog.text import plural

_EQUAL, _RESAVED, _LEAKED = 0.01, 0.02, 0.02  # shares of images from which each kind is a warning
_REASON = "images that occur several times are memorized first"
_BATCH_BYTES = 64 * 2**20  # of pixels, read for one batch of pairs
_MOST_PAIRS = 1_000_000  # compared; only large sets of similar subjects, such as aligned faces, have more candidates
_SMALL_SHAPE, _SMALL_SPOT = 0.93, 64.0  # of 8 x 8 thumbnails: looser than the limits at 16 x 16, so nothing is lost
_ORDERS = 20
_NEIGHBOURS = 12
_ONES = np.array([i.bit_count() for i in range(1 << 16)], np.uint8)
_MOST_BITS = 9  # of 64: hashes of an image and of its JPEG, or of it resized by a quarter, differ in up to seven

# Of CIFAR-10 and emoji saved as JPEG at quality 50 or more, or resized by a quarter, 95% stay within _COPY. All pairs
# of CIFAR-10 within _ALIKE show one image twice; in sets of similar subjects, such as trousers, some do not.
_COPY = {"shape": 0.97, "detail": 0.95, "gain": 1.2, "shift": 20.0, "patch": 8.0, "spot": 32.0}
_ALIKE = {"shape": 0.96, "detail": 0.85, "gain": 1.5, "shift": 40.0, "spot": 50.0}


def check_duplicates(scan: ImageScan, progress: Progress | None = None) -> list[Finding]:
    """Return data.duplicates, data.near_duplicates and, where images are held out, data.leakage.

    `progress` is called as (pairs compared, total pairs).
    """
    return _report_duplicates(scan, find_duplicates(scan, progress))


def _report_duplicates(scan: ImageScan, duplicates: _Duplicates) -> list[Finding]:
    findings = [_check_equal(scan, duplicates), _check_near_duplicates(scan, duplicates)]
    return [*findings, _check_leakage(scan, duplicates)] if scan.prepared.held_out else findings


def _check_equal(scan: ImageScan, duplicates: _Duplicates) -> Finding:
    """Check that no training image equals another to the pixel."""
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


def _check_near_duplicates(scan: ImageScan, duplicates: _Duplicates) -> Finding:
    """Check that few training images look like copies of others, or nearly equal them."""
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


def _check_leakage(scan: ImageScan, duplicates: _Duplicates) -> Finding:
    """Check that no held-out image equals or nearly equals a training image."""
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


@dataclass(frozen=True, eq=False)
class _Duplicates:
    """Images that repeat others, as rows of an `ImageScan`. Blank images, which are all equal, are left out."""

    equal: list[Indices]
    """Groups of rows with equal pixels."""
    resaved: Indices
    """[M, 2] rows of one image that was compressed or resized again; of equal ones only the first row appears."""
    similar: Indices
    """[M, 2] rows of near-duplicates that are not in `resaved`."""
    complete: bool
    """False if there were too many candidates to compare them all."""


def find_duplicates(scan: ImageScan, progress: Progress | None = None) -> _Duplicates:
    """Return all duplicates of a scan; `progress` is called as (pairs compared, total pairs)."""
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
    # By the first row, so that a batch reads neighbouring parts of the file.
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    resaved, similar = _compare_pairs(scan, scan.rows[pairs], progress)
    return _Duplicates(equal, scan.rows[pairs[resaved]], scan.rows[pairs[similar & ~resaved]], complete)


def _likely_pairs(hashes: NDArray[np.uint64], small: NDArray[np.uint8]) -> Indices:
    """Return pairs [M, 2] of positions, each once, that have similar hashes and similar 8 x 8 thumbnails."""
    found = [np.zeros(0, np.int64)]
    for pairs in _candidate_pairs(hashes):
        for part in np.array_split(pairs, max(1, len(pairs) // 100_000)):
            part = part[_similar(small[part[:, 0]], small[part[:, 1]])]
            found.append(part[:, 0] * len(hashes) + part[:, 1])
    return np.stack(np.divmod(np.unique(np.concatenate(found)), max(1, len(hashes))), 1)


def _similar(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.bool_]:
    x, y = (side - side.mean((1, 2), keepdims=True, dtype=np.float32) for side in (a, b))
    near: NDArray[np.bool_] = (_correlation(x, y) >= _SMALL_SHAPE) & (np.abs(x - y).max((1, 2)) <= _SMALL_SPOT)
    return near


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
        resaved[part], similar[part] = _compare_thumbnails(thumbs[ends[:, 0]], thumbs[ends[:, 1]])
        if progress:
            progress(min(start + batch, len(pairs)), len(pairs))
    return resaved, similar


def _candidate_pairs(hashes: Hashes) -> Iterator[Indices]:
    """Yield pairs [M, 2] of positions with close hashes, a batch for each order of the bits; a pair may come twice.

    Compares 12 neighbours in each of 20 orders. Of many equal hashes some pairs are missed, but each one is paired.
    """
    generator = np.random.default_rng(0)
    for _ in range(_ORDERS):
        # Low frequencies change least, so they tend to come first.
        order = np.argsort(np.arange(64) + 24 * generator.standard_normal(64))
        places = np.argsort(_permuted(hashes, order), kind="stable")
        ordered = hashes[places]
        found = []
        for ahead in range(1, min(_NEIGHBOURS, len(hashes) - 1) + 1):
            near = np.flatnonzero(_differing_bits(ordered[ahead:] ^ ordered[:-ahead]) <= _MOST_BITS)
            found.append(np.stack([places[near], places[near + ahead]], 1))
        if found:
            yield np.sort(np.concatenate(found), axis=1)


def _permuted(hashes: Hashes, order: Indices) -> Hashes:
    result = np.zeros_like(hashes)
    for to, bit in enumerate(order.tolist()):
        result |= ((hashes >> np.uint64(bit)) & np.uint64(1)) << np.uint64(to)
    return result


def _differing_bits(different: Hashes) -> NDArray[np.uint8]:
    ones = _ONES[np.ascontiguousarray(different).view(np.uint16)]
    counts: NDArray[np.uint8] = ones.reshape(-1, 4).sum(1, dtype=np.uint8)
    return counts


class _Match(NamedTuple):
    """Result of comparing pairs of thumbnails; bool [M]."""

    duplicate: NDArray[np.bool_]
    """One image saved again: smaller, compressed or slightly brighter."""
    similar: NDArray[np.bool_]
    """Nearly the same image: cropped a little, recoloured, or the next of a series. Includes all duplicates."""


def _compare_thumbnails(a: Floats, b: Floats) -> _Match:
    """Compare pairs of thumbnails [M, C, h, w], 0 to 255, after fitting brightness and contrast.

    Measured are: `shape`, the correlation of all values; `detail`, the correlation of the brightness less its
    surroundings; `gain` and `shift`, what was fitted; `patch`, the largest difference of 4 x 4 means; and `spot`, the
    largest difference of the brightness of one pixel. Compression changes the last two little, another subject a lot.
    """
    mean_a, mean_b = (x.mean((1, 2, 3), keepdims=True) for x in (a, b))
    # At least one level, or the noise of a nearly blank image would count as its content.
    spread_a, spread_b = (np.maximum(x.std((1, 2, 3), keepdims=True), 1.0) for x in (a, b))
    unit_a, unit_b = (a - mean_a) / spread_a, (b - mean_b) / spread_b
    smaller, apart = np.minimum(spread_a, spread_b), unit_a - unit_b
    measured = {
        "shape": (unit_a * unit_b).mean((1, 2, 3)),
        "detail": _correlation(_detail(luma(a)), _detail(luma(b))),
        "gain": np.maximum(spread_a / spread_b, spread_b / spread_a)[:, 0, 0, 0],
        "shift": np.abs(mean_a - mean_b)[:, 0, 0, 0],
        "patch": np.abs(thumbnails(apart * smaller, 4)).max((1, 2, 3)),
        "spot": np.abs(luma(apart) * smaller[:, 0]).max((1, 2)),
    }
    return _Match(*(_within(measured, limits) for limits in (_COPY, _ALIKE)))


def _within(measured: dict[str, Floats], limits: dict[str, float]) -> NDArray[np.bool_]:
    fits = [measured[k] >= v if k in ("shape", "detail") else measured[k] <= v for k, v in limits.items()]
    all_fit: NDArray[np.bool_] = np.logical_and.reduce(fits)
    return all_fit


def _detail(bright: Floats) -> Floats:
    """Return brightness [M, h, w] less its mean over 3 x 3 pixels."""
    height, width = bright.shape[1:]
    padded = np.pad(bright, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = sum(padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3))
    return bright - around / np.float32(9)


def _correlation(a: Floats, b: Floats) -> Floats:
    norms = np.linalg.norm(a, axis=(1, 2)) * np.linalg.norm(b, axis=(1, 2))
    correlation: Floats = (a * b).sum((1, 2)) / np.maximum(norms, 1e-6)
    return correlation


def connected_groups(pairs: Indices) -> list[Indices]:
    """Return the connected components of pairs [M, 2], the largest first, each in ascending order."""
    group_of: dict[int, list[int]] = {}
    for a, b in pairs.tolist():
        # The smaller group joins the larger, so that a member moves at most log2(N) times.
        less, more = sorted((group_of.setdefault(a, [a]), group_of.setdefault(b, [b])), key=len)
        if less is not more:
            more += less
            group_of |= dict.fromkeys(less, more)
    groups = {id(group): np.sort(group) for group in group_of.values()}
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))
