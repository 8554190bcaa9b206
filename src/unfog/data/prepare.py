"""From a source to decoded images: choose size and channels, decode every image once, split, account for every file."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data import cache
from unfog.data.bulk import ColourFoundError, Progress, Tally, compact, decode_all
from unfog.data.decode import colour, decode, header
from unfog.data.files import Unusable
from unfog.data.images import ImageSet, Prepared
from unfog.data.ledger import Ledger, Quarantined
from unfog.data.settings import Data
from unfog.data.sources import Source, labels_of
from unfog.errors import RequestError

HEADERS_SAMPLED = 1000
COLOURS_SAMPLED = 64
"""How many images, evenly spread, the automatic size looks at, and the automatic channels before the decoding."""

MAX_HELD_OUT = 1000
MIN_TO_HOLD_OUT = 100
"""Of fewer images none is held out: each is worth more to training than to a loss over a handful."""

MEMORY_FILES = 10_000
MEMORY_FILE_BYTES = 64 * 2**20
MEMORY_PIXEL_BYTES = 256 * 2**20
"""cache = auto keeps images in memory while there are no more of them than this, their files together and their pixels
no larger, so that decoding takes seconds; else it writes a cache file. Where that cannot be written, it stays in memory
up to four times the pixels."""

_Colour = tuple[int, int, int]
_Outcome = tuple[NDArray[np.uint8], cache.Writer | None, Tally]


def prepare(source: Source, settings: Data, progress: Progress | None = None) -> Prepared:
    """Decode a source under these settings, or find it decoded in the cache.

    `progress` is called with (images done, images in all) now and then, from the calling thread; it starts
    again should an image in colour turn up late among grey ones.

    A built-in set keeps its own split into training and held-out images, unless `held_out` is 0.

    Raises:
        RequestError: no image can be used; a setting does not fit the source; the cache cannot be written.
    """
    background = colour(settings.background)
    classes, labels = labels_of(source, settings.labels)
    stamp, file_bytes = cache.source_stamp(source)
    asked_key = cache.entry_key(stamp, settings)
    if settings.cache != "memory" and (found := cache.load(asked_key)):
        asked = replace(found.settings, flip=settings.flip, jitter=settings.jitter, cache=settings.cache)
        return replace(found, settings=asked, ledger=replace(found.ledger, source=source.name))

    order, in_train = _split(source, settings.held_out)
    with warnings.catch_warnings():
        # What Pillow finds odd in a file concerns nobody who gets to see the image or the reason why not.
        warnings.simplefilter("ignore")
        # It only warns of an image too large to be decoded safely; here it is refused.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        pixels, writer, tally = _decode_source(source, order, settings, background, file_bytes, progress)

    rows = order[tally.used]
    labels = None if labels is None else labels[rows]
    if labels is not None:  # a class of which no image can be used is none
        present, labels = np.unique(labels, return_inverse=True)
        classes = tuple(classes[i] for i in present)
    names = tuple(source.names[i] for i in rows)
    whole = ImageSet(compact(pixels, tally.used), labels, names, classes)
    train = int(tally.used[:in_train].sum())
    mode: Literal["none", "folders"] = "none" if labels is None else "folders"
    settled = replace(settings, size=pixels.shape[-1], channels=pixels.shape[1], labels=mode)
    ledger = _ledger(source, order, settled, tally, whole, len(whole) - train)
    if writer is None:
        return cache.split(whole, train, settled, ledger)
    now, _ = cache.source_stamp(source)
    if now != stamp:  # files were changed meanwhile, so neither state is what was decoded: found by nobody again
        asked_key, stamp = "", stamp + now
    return writer.commit(cache.entry_key(stamp, settled), asked_key, whole, train, settled, ledger)


def _decode_source(
    source: Source,
    order: NDArray[np.int64],
    settings: Data,
    background: _Colour,
    file_bytes: int,
    progress: Progress | None,
) -> _Outcome:
    """All images in this order, size and channels chosen where they are 0, in memory or in a cache file to be."""
    size = settings.size or _choose_size(source)
    channels = settings.channels or _guess_channels(source, size, background)

    def attempt(channels: int, only_grey: bool) -> _Outcome:
        shape = (len(order), channels, size, size)
        writer = _cache_file(shape, settings.cache, file_bytes)
        pixels = writer.pixels if writer else np.empty(shape, np.uint8)
        try:
            tally = decode_all(source, order, pixels, background, only_grey, progress)
            _refuse_none(source, tally)
        except BaseException:
            if writer:
                writer.discard()
            raise
        return pixels, writer, tally

    try:
        return attempt(channels, only_grey=channels == 1 and settings.channels == 0)
    except ColourFoundError:
        return attempt(3, only_grey=False)


def _refuse_none(source: Source, tally: Tally) -> None:
    if not tally.used.any():
        reasons = Counter(tally.reasons.values()).most_common(3)
        counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        raise RequestError(
            f"none of the {len(tally.used):,} images in {source.name} can be used: {counted}; replace them"
        )


def _cache_file(shape: tuple[int, int, int, int], where: str, file_bytes: int) -> cache.Writer | None:
    """A cache file for pixels of this shape, or None to keep them in memory."""
    pixel_bytes = int(np.prod(shape))
    small = shape[0] <= MEMORY_FILES and file_bytes <= MEMORY_FILE_BYTES and pixel_bytes <= MEMORY_PIXEL_BYTES
    if where == "memory" or (where == "auto" and small):
        return None
    try:
        return cache.Writer.create(shape)
    except RequestError:
        if where == "auto" and pixel_bytes < 4 * MEMORY_PIXEL_BYTES:
            return None
        raise


def _split(source: Source, fraction: float) -> tuple[NDArray[np.int64], int]:
    """(the images to train on, then those held out; how many are the former), each in the source's order.

    A name is held out when its hash, as a number in [0, 1), is below the fraction, so adding images leaves
    the others where they were; beyond MAX_HELD_OUT only the lowest hashes are.
    """
    n = len(source.names)
    if fraction == 0 or (source.held_out is None and n < MIN_TO_HOLD_OUT):
        return np.arange(n), n
    if source.held_out is not None:
        held = np.array([name in source.held_out for name in source.names])
    else:
        hashes = np.array([_unit_hash(name) for name in source.names])
        limit = np.partition(hashes, MAX_HELD_OUT)[MAX_HELD_OUT] if n > MAX_HELD_OUT else 1.0
        held = hashes < min(fraction, limit)
    return np.concatenate([np.flatnonzero(~held), np.flatnonzero(held)]), n - int(held.sum())


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
        except Unusable:
            continue
    if not sizes:
        return 32
    width, height = sizes[0]
    if len(set(sizes)) == 1 and width == height <= 64 and width % 4 == 0 and width >= 8:
        return width
    return 64 if np.median([min(size) for size in sizes]) >= 64 else 32


def _guess_channels(source: Source, size: int, background: _Colour) -> int:
    """3 as soon as one image looked at is in colour, else 1: then still to be proved by all the others."""
    for i in _spread(len(source.names), COLOURS_SAMPLED):
        try:
            _, facts = decode(partial(source.open, i), size, 3, background)
        except Unusable:
            continue
        if not facts.grey:
            return 3
    return 1


def _spread(n: int, count: int) -> Iterable[int]:
    """At most `count` of 0..n-1, evenly spread."""
    return range(0, n, max(1, -(-n // count)))


def _ledger(
    source: Source, order: NDArray[np.int64], settled: Data, tally: Tally, whole: ImageSet, held_out: int
) -> Ledger:
    sides = tally.sides[tally.used]
    labels = np.zeros(0, np.int64) if whole.labels is None else whole.labels
    counts = np.bincount(labels, minlength=len(whole.classes))
    undecoded = [Quarantined(source.names[order[row]], reason) for row, reason in tally.reasons.items()]
    return Ledger(
        source=source.name,
        found=len(order),
        used=len(whole),
        held_out=held_out,
        size=settled.size,
        channels=settled.channels,
        background=settled.background,
        class_counts={name: int(count) for name, count in zip(whole.classes, counts)},
        sides={
            f"{side}_{name}": int(function(sides[:, column]))
            for column, side in enumerate(("shortest", "longest"))
            for name, function in (("min", np.min), ("median", np.median), ("max", np.max))
        },
        modes=dict(tally.modes),
        treatments=tuple(tally.treatments),
        treatment=tuple(tally.treatment[tally.used].tolist()),
        quarantined=tuple(sorted([*undecoded, *source.unreadable])),
        ignored=dict(source.ignored),
    )
