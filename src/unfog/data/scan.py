"""What is settled about a source before all of it is decoded: classes, size, channels, split; and the account after."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from unfog.data.decode import colour, header
from unfog.data.decode_pool import DecodeStatistics, decode_with_retries
from unfog.data.packs.pack import PackSource
from unfog.data.report import DataReport, SkippedFile
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError, Source, TransientImageError
from unfog.data.sources.image_files import ARCHIVE_GONE, CHANGED, GONE
from unfog.data.sources.label_tables import labels_setting as settled_labels
from unfog.data.sources.labels import strip_shard
from unfog.errors import RequestError, RunError
from unfog.text import sanitize

HEADERS_SAMPLED = 1000
COLOURS_SAMPLED = 64
"""How many images, evenly spread, the automatic size looks at, and the automatic channels before the decoding."""

MAX_HELD_OUT = 1000
MIN_TO_HOLD_OUT = 100
"""Of fewer images none is held out: each is worth more to training than to a loss over a handful."""


@dataclass(frozen=True, eq=False)
class Scan:
    """A source, and what it will be decoded to."""

    source: Source
    settings: Data
    """As asked."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None
    """[N] of the source, an index into `classes`; None without classes."""

    stamp: str
    """Digest of the source's state."""

    file_bytes: int
    size: int
    channels: int
    channels_certain: bool
    """False where grey is a guess, from those looked at: a single image in colour then makes all RGB."""

    warnings: tuple[str, ...] = ()
    """What was found and left out that may have been meant to count, a line for each: a table of labels, say."""

    @classmethod
    def of(cls, source: Source, settings: Data, classes: tuple[str, ...], labels: NDArray[np.int64] | None) -> Scan:
        """Size and channels are as in the settings, maybe open; see `sampled`.

        Raises:
            RequestError: a label is none of the classes.
        """
        if labels is not None and not 0 <= labels.min() <= labels.max() < len(classes):
            raise RequestError(
                f"{sanitize(source.name)} has a label that is none of its {len(classes):,} classes: it is damaged; "
                "make it again from the originals"
            )
        stamp, file_bytes = source.stamp()
        return cls(
            *(source, settings, classes, labels, stamp, file_bytes, settings.size, settings.channels),
            channels_certain=settings.channels != 0,
        )

    def resolve(self) -> Scan:
        """The same with size and channels settled, by a look at some of the images where they are open.

        Raises:
            RunError: one of them cannot be read just now.
        """
        size = self.size or _choose_size(self.source)
        channels = self.channels or _guess_channels(self.source, size, self.background)
        return replace(self, size=size, channels=channels, channels_certain=self.channels_certain or channels == 3)

    @property
    def resolved_settings(self) -> Data:
        """The settings with nothing left open."""
        labels = settled_labels(self.source, self.labels)
        return replace(self.settings, size=self.size, channels=self.channels, labels=labels)

    @property
    def background(self) -> tuple[int, int, int]:
        """Colour behind transparent pixels."""
        return colour(self.settings.background)

    def check_source_unchanged(self, tally: DecodeStatistics, start: int, stop: int) -> None:
        """Look at what became of these rows: a set without what came after is no smaller set, but a source gone.

        Single files of a folder may come and go; they are in quarantine.

        Raises:
            RunError: an archive, or most of the files, is not there any more or was changed.
        """
        reasons = [tally.reasons[row] for row in range(start, stop) if row in tally.reasons]
        archive = next((reason for reason in reasons if reason in (CHANGED, ARCHIVE_GONE)), "")
        lost = archive or (GONE if 2 * reasons.count(GONE) > stop - start else "")
        if lost and self.source.stamp()[0] != self.stamp:
            raise RunError(
                f"the images in {sanitize(self.source.name)} changed while they were read ({lost}); do the same again "
                "once nobody writes to them"
            )

    def as_rgb(self) -> Scan:
        """The same after an image in colour has turned up."""
        return replace(self, channels=3, channels_certain=True)


def split_held_out(source: Source, fraction: float) -> tuple[NDArray[np.int64], int]:
    """(the images to train on, then those held out; how many are the former), each in the source's order.

    A name is held out when its hash, as a number in [0, 1), is below the fraction, so adding images leaves
    the others where they were; beyond MAX_HELD_OUT only the lowest hashes are. What counts of a name is what an
    archive of the images leaves as it is: see `_hashed`.
    """
    n = len(source.names)
    if fraction == 0 or (source.held_out is None and n < MIN_TO_HOLD_OUT):
        return np.arange(n), n
    if isinstance(source, PackSource) and (train := source.split(fraction)) is not None:
        return np.arange(n), train
    if source.held_out is not None:
        held = np.fromiter((name in source.held_out for name in source.names), np.bool_, n)
    else:
        hashes = np.fromiter((_unit_hash(name) for name in _hashed(source.names)), np.float64, n)
        limit = np.partition(hashes, MAX_HELD_OUT)[MAX_HELD_OUT] if n > MAX_HELD_OUT else 1.0
        held = hashes < min(fraction, limit)
    return np.concatenate([np.flatnonzero(~held), np.flatnonzero(held)]), n - int(held.sum())


def _hashed(names: Sequence[str]) -> Sequence[str]:
    """The names less the shards that they are in and less the folders that all share, so that a folder, an archive of
    it and one of what is in it hold out the same images; as they are, where two would be one then."""
    members = [strip_shard(name) for name in names]
    first, last = min(members), max(members)
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    shared = first.rfind("/", 0, same) + 1
    members = [name[shared:] for name in members]
    return members if len(set(members)) == len(names) else names


def _unit_hash(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _choose_size(source: Source) -> int:
    """The images' own size when all looked at are one square of at most 64 that can be halved twice; else 64,
    or 32 when the median short side is under 64."""
    sizes = []
    for i in _spread(len(source.names), HEADERS_SAMPLED):
        try:
            sizes.append(header(partial(source.open, i)))
        except TransientImageError:  # by what others are, a run would be of another size after an outage
            _, facts = decode_with_retries(source, i, 8, 3, (0, 0, 0), threading.Event())
            sizes.append((facts.width, facts.height))
        except ImageError:
            continue
    if not sizes:
        return 32
    width, height = sizes[0]
    if len(set(sizes)) == 1 and width == height <= 64 and width % 4 == 0 and width >= 8:
        return width
    return 64 if np.median([min(size) for size in sizes]) >= 64 else 32


def _guess_channels(source: Source, size: int, background: tuple[int, int, int]) -> int:
    """3 as soon as one image looked at is in colour, else 1: then still to be proved by all the others."""
    for i in _spread(len(source.names), COLOURS_SAMPLED):
        try:
            _, facts = decode_with_retries(source, i, size, 3, background, threading.Event())
        except ImageError:
            continue
        if not facts.grey:
            return 3
    return 1


def _spread(n: int, count: int) -> Iterable[int]:
    """At most `count` of 0..n-1, evenly spread."""
    return range(0, n, max(1, -(-n // count)))


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """What a source came to once all of it was decoded."""

    settings: Data
    """Settled."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None
    """[K] of those used."""

    rows: NDArray[np.int64]
    """[K], which image of the source each one used is; first those to train on."""

    train: int
    """How many those are."""

    facts: NDArray[np.void]
    """[K] of INFO_DTYPE."""

    report: DataReport

    @classmethod
    def of(cls, scan: Scan, order: NDArray[np.int64], in_train: int, tally: DecodeStatistics) -> DecodeResult:
        """Of all images in this order, of which the first `in_train` are to be trained on.

        Raises:
            RequestError: not one of them can be used.
        """
        source, settled = scan.source, scan.resolved_settings
        _refuse_none(source, tally)
        rows, facts = order[tally.used], tally.facts[tally.used]
        classes, labels = scan.classes, None if scan.labels is None else scan.labels[rows]
        if labels is not None:  # a class of which no image can be used is none
            present, labels = np.unique(labels, return_inverse=True)
            classes = tuple(classes[i] for i in present)
        counts = np.bincount([] if labels is None else labels, minlength=len(classes))
        train = int(tally.used[:in_train].sum())
        undecoded = [SkippedFile(source.names[order[row]], reason) for row, reason in tally.reasons.items()]
        report = DataReport(
            source=source.name,
            found=len(order),
            used=len(rows),
            held_out=len(rows) - train,
            size=settled.size,
            channels=settled.channels,
            background=settled.background,
            class_counts={name: int(count) for name, count in zip(classes, counts)},
            sides=_sides(facts["sides"]),
            modes=dict(tally.modes),
            treatments=tuple(tally.treatments),
            treatment=np.ascontiguousarray(facts["treatment"]),
            skipped=tuple(sorted([*undecoded, *source.unreadable])),
            ignored=dict(source.ignored),
        )
        return cls(settled, classes, labels, rows, train, facts, report)


def _sides(sides: NDArray[np.int32]) -> dict[str, int]:
    """Minimum, median and maximum of the shortest and the longest side; sides [K, 2]."""
    ordered = np.sort(sides, axis=1)
    return {
        f"{side}_{name}": int(function(ordered[:, column]))
        for column, side in enumerate(("shortest", "longest"))
        for name, function in (("min", np.min), ("median", np.median), ("max", np.max))
    }


def _refuse_none(source: Source, tally: DecodeStatistics) -> None:
    if not tally.used.any():
        reasons = Counter(tally.reasons.values()).most_common(3)
        counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        raise RequestError(
            f"none of the {len(tally.used):,} images in {source.name} can be used: {counted}; replace them"
        )
