"""Images that are there twice: equal to the pixel, saved again, or nearly so; in training, and across the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.doctor.images.example_images import MOST_NAMES, format_percent, format_share, groups_figure, list_names
from unfog.doctor.images.near_duplicates import (
    BLANK_DEVIATION,
    Floats,
    Indices,
    candidate_pairs,
    compare_thumbnails,
    connected_groups,
    thumbnails,
)
from unfog.doctor.images.pixel_statistics import ImageScan, Progress
from unfog.reporting.findings import Finding, Severity
from unfog.reporting.progress import plural

_EQUAL, _RESAVED, _LEAKED = 0.01, 0.02, 0.02
"""Share of images from which their being there twice is a warning: equal ones, those saved again, and held-out ones."""

_BATCH_BYTES = 64 * 2**20  # of pixels, read for one batch of pairs
_MOST_PAIRS = 1_000_000  # looked at closely: reached by large sets that are alike by nature, such as aligned faces
_SMALL_SHAPE, _SMALL_SPOT = 0.93, 64.0  # of 8 x 8 thumbnails; what is alike at 16 x 16 stays well within

_LIKE = " ~ "
_REASON = "what is there often is learned by heart first"


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Which images repeat others; blank ones, which equal each other, are left out. Rows as in `Survey.rows`."""

    equal: list[Indices]
    """Groups of rows that are equal to the pixel."""

    resaved: Indices
    """[M, 2] rows of one picture that was saved again; of equal ones only the first row appears."""

    similar: Indices
    """[M, 2] rows of pictures nearly the same, and not in `again`."""

    complete: bool
    """Whether all pairs that could be alike were looked at."""


def find_duplicates(survey: ImageScan, progress: Progress | None = None) -> Duplicates:
    """Search all that was looked at; `progress` is called with (pairs, pairs in all)."""
    showing = np.flatnonzero(survey.statistics.spread >= BLANK_DEVIATION)
    _, first, kind, count = np.unique(
        survey.statistics.digest[showing], return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(kind, kind="stable")
    equal = np.split(survey.rows[showing[order]], np.cumsum(count)[:-1]) if len(showing) else []
    same = sorted((group for group in equal if len(group) > 1), key=len, reverse=True)

    distinct = showing[np.sort(first)]
    pairs = distinct[_likely(survey.statistics.hash[distinct], survey.statistics.small[distinct])]
    complete = len(pairs) <= _MOST_PAIRS
    if not complete:
        pairs = pairs[np.random.default_rng(0).choice(len(pairs), _MOST_PAIRS, replace=False)]
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    again, alike = _compared(survey, survey.rows[pairs], progress)
    return Duplicates(same, survey.rows[pairs[again]], survey.rows[pairs[alike & ~again]], complete)


def _likely(hashes: NDArray[np.uint64], small: NDArray[np.uint8]) -> Indices:
    """Pairs [M, 2] of positions, each once, that have similar hashes and similar small thumbnails."""
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


def _compared(
    survey: ImageScan, pairs: Indices, progress: Progress | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each pair of rows [M, 2] is a copy, and alike."""
    again, alike = np.zeros(len(pairs), np.bool_), np.zeros(len(pairs), np.bool_)
    image = int(np.prod(survey.prepared.train.pixels.shape[1:]))
    batch = max(1, min(4096, _BATCH_BYTES // (2 * image)))
    for start in range(0, len(pairs), batch):
        part = slice(start, start + batch)
        rows, ends = np.unique(pairs[part], return_inverse=True)
        thumbs = thumbnails(survey.pixels(rows))
        ends = ends.reshape(-1, 2)
        again[part], alike[part] = compare_thumbnails(thumbs[ends[:, 0]], thumbs[ends[:, 1]])
        if progress:
            progress(min(start + batch, len(pairs)), len(pairs))
    return again, alike


def check_duplicates(survey: ImageScan, copies: Duplicates) -> list[Finding]:
    """What the search says of the training set, and of the split."""
    findings = [_duplicates(survey, copies), _near_duplicates(survey, copies)]
    if survey.prepared.held_out:
        findings.append(_leakage(survey, copies))
    return findings


def _duplicates(survey: ImageScan, copies: Duplicates) -> Finding:
    train = len(survey.prepared.train)
    same = [inside for group in copies.equal if len(inside := group[group < train]) > 1]
    looked = int(survey.in_train.sum())
    extra = sum(len(group) - 1 for group in same)
    facts: dict[str, Any] = {"images": looked, "copies": extra, "groups": _names(survey, same)}
    if not extra:
        return Finding("data.duplicates", "fine", f"no two of {plural(looked)} are equal", facts=facts)
    most = f", one of them {len(same[0])} times" if len(same[0]) > 2 else ""
    return Finding(
        "data.duplicates",
        "warning" if extra >= _EQUAL * looked else "hint",
        f"{format_share(extra, looked)} training images repeat another to the pixel{most}: {_equations(survey, same)}",
        f"keep one of each group (`unfog doctor` lists them in findings.json): {_REASON}",
        facts,
        (groups_figure(survey, same, "Equal images", "A group a row."),),
    )


def _near_duplicates(survey: ImageScan, copies: Duplicates) -> Finding:
    train, looked = len(survey.prepared.train), int(survey.in_train.sum())
    again, alike = (connected_groups(pairs[(pairs < train).all(1)]) for pairs in (copies.resaved, copies.similar))
    extra, related = (sum(len(group) - 1 for group in found) for found in (again, alike))
    facts: dict[str, Any] = {"images": looked, "copies": extra, "alike": related, "complete": copies.complete}
    facts |= {"groups": _names(survey, again), "alike_groups": _names(survey, alike)}
    if not extra and not related:
        evidence = f"no two of {plural(looked)} are nearly the same"
        return Finding("data.near_duplicates", "fine", evidence, facts=facts)
    least = "" if copies.complete else "at least "
    parts, exhibits = [], []
    if extra:
        parts.append(
            f"{least}{format_share(extra, looked)} training images differ from another as if it had been saved again "
            f"(compressed, resized or brightened): {_equations(survey, again)}"
        )
        exhibits.append(groups_figure(survey, again, "Saved again", "A group a row."))
    if related:
        like = f"{least}{format_share(related, looked)} training images are nearly like another"
        parts.append(f"{like}: {_equations(survey, alike, _LIKE)}")
        exhibits.append(groups_figure(survey, alike, "Nearly alike", "A group a row, whose members form a chain."))
    remedy = f"look at them, and keep one of each that is no picture of its own: {_REASON}"
    severity: Severity = "warning" if extra >= _RESAVED * looked else "hint"
    return Finding("data.near_duplicates", severity, "; ".join(parts), remedy, facts, tuple(exhibits))


def _leakage(survey: ImageScan, copies: Duplicates) -> Finding:
    train = len(survey.prepared.train)
    held = int((~survey.in_train).sum())
    equal = [group for group in copies.equal if group[0] < train <= group[-1]]
    exact = np.concatenate([np.zeros(0, np.int64), *(group[group >= train] for group in equal)])
    again, alike = (_across(pairs, train, copies.equal) for pairs in (copies.resaved, copies.similar))
    saved = np.setdiff1d([b for _, b in again], exact)
    related = np.setdiff1d([b for _, b in alike], np.concatenate([exact, saved]))
    leaked = len(exact) + len(saved)
    pairs = [np.array([group[0], group[-1]]) for group in equal] + [np.array(pair) for pair in again]
    facts: dict[str, Any] = {"held_out": held, "equal": len(exact), "copies": len(saved), "alike": len(related)}
    facts |= {"pairs": _names(survey, pairs), "alike_pairs": _names(survey, [np.array(pair) for pair in alike])}
    if not leaked and not len(related):
        return Finding("data.leakage", "fine", f"none of {held:,} held-out images is trained on", facts=facts)
    parts = []
    if leaked:
        parts.append(
            f"{format_share(leaked, held)} held-out images are trained on as well ({len(exact):,} equal to the pixel, "
            f"{len(saved):,} as if saved again): {_equations(survey, pairs)}"
        )
    if len(related):
        shown = [np.array(pair) for pair in alike]
        like = f"{format_share(len(related), held)} held-out images are nearly like a training image"
        parts.append(f"{like}: {_equations(survey, shown, _LIKE)}")
    exhibits = [groups_figure(survey, pairs, "Trained on and held out", "Left: trained on.")] if leaked else []
    if len(related):
        exhibits.append(groups_figure(survey, shown, "Nearly alike across the split", "Left: trained on."))
    return Finding(
        "data.leakage",
        "warning" if leaked >= _LEAKED * held else "hint",
        "; ".join(parts),
        "remove one of each pair (`unfog doctor` lists them in findings.json); until then the held-out loss looks "
        "better than it is, by "
        f"up to {format_percent((leaked + len(related)) / held)} of its images",
        facts,
        tuple(exhibits),
    )


def _across(pairs: Indices, train: int, same: list[Indices]) -> list[tuple[int, int]]:
    """(training row, held-out row) of pairs that lie on either side of the split, equal images counted with them."""
    members = {int(group[0]): group.tolist() for group in same}
    found = []
    for one, other in np.sort(pairs, axis=1).tolist():
        if one < train <= other:  # a group that is in both is stood for by its training row
            found += [(one, row) for row in members.get(other, [other])]
    return found


def _names(survey: ImageScan, found: Sequence[Indices]) -> list[list[str]]:
    listed, room = [], MOST_NAMES
    for group in found:
        if room <= 0:
            break
        listed.append([survey.name(int(row)) for row in group[:room]])
        room -= len(listed[-1])
    return listed


def _equations(survey: ImageScan, found: Sequence[Indices], sign: str = " = ", most: int = 2) -> str:
    """ "a.png = b.png, c.png = d.png, ..."."""
    parts = [sign.join(list_names([survey.name(int(row))]) for row in group[:2]) for group in found[:most]]
    return ", ".join([*parts, *["..."] * (len(found) > most)])
