"""Checks of captions: how many differ, words that occur once, held-out captions, and sides that a mirror exchanges."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.reporting.findings import Finding, format_share
from unfog.text import sanitize
from unfog.values.columns import Column
from unfog.values.condition_format import TEXT
from unfog.values.tokenizer import tokenizer_of

_ROWS = 20_000  # evenly spaced images whose captions are looked at
_SAME = 0.5  # share of the captions that are one and the same, or of the held-out ones that are training captions
_ONCE = 0.5  # share of the words that occur in one caption
_SHOWN = 5
_WORD = re.compile(r"[^\W_]+")
_SIDES = frozenset(["left", "right", "links", "rechts", "gauche", "droite", "izquierda", "derecha"])


def check_captions(train: ImageSet, held_out: ImageSet, flip: bool) -> list[Finding]:
    """Return the findings on the captions of images; [] without captions. `flip` is `data.flip`."""
    column = _caption_column(train)
    if column is None or not len(train):
        return []
    captions = _captions(column)
    found = [_check_words(captions), _check_sides(captions, flip)]
    other = _caption_column(held_out)
    if other is not None and len(held_out):
        found.append(_check_held_out(_captions(other), {*captions}))
    return found


def _caption_column(images: ImageSet) -> Column | None:
    return next((column for column in images.columns.values() if column.kind == TEXT), None)


def _captions(column: Column) -> list[str]:
    """Return the captions of evenly spaced images, without those that are not known."""
    values = column.values[evenly_spaced(len(column.values), _ROWS)]
    tokenizer = tokenizer_of(column.categories)
    texts = (tokenizer.decode(row) for row in values.reshape(-1, values.shape[-1]).tolist())
    return [text for text in texts if text]


def _check_words(captions: Sequence[str]) -> Finding:
    """Check that captions differ, and that most words occur in several."""
    counts = Counter(captions)
    words = Counter(word for text in captions for word in {*_WORD.findall(text)})
    once = sorted(word for word, count in words.items() if count == 1)
    common, times = counts.most_common(1)[0] if counts else ("", 0)
    lengths = np.array([len(_WORD.findall(text)) for text in captions] or [0])
    evidence = (
        f"{len(captions):,} captions, {len(counts):,} different, with a median of {np.median(lengths):.0f} words; "
        f"{format_share(len(once), len(words))} words occur in one caption"
    )
    shown = ", ".join(map(sanitize, once[:_SHOWN])) + ", …" * (len(once) > _SHOWN)
    return Finding.graded(
        "data.captions",
        evidence,
        (
            len(counts) > 1 and times > _SAME * len(captions),
            "hint",
            f"; {times:,} are {sanitize(common)[:60]!r}",
            "a caption of many images says little: describe what differs, or leave the captions out",
        ),
        (
            len(once) > _ONCE * len(words),
            "hint",
            f", such as {shown}",
            "samples hardly follow words that one image has: use the same words for the same things, or add images",
        ),
        facts={"captions": len(captions), "different": len(counts), "words": len(words), "once": len(once)},
    )


def _check_sides(captions: Sequence[str], flip: bool) -> Finding:
    """Check that no caption says left or right where images are mirrored."""
    said = sum(not _SIDES.isdisjoint(_WORD.findall(text)) for text in captions)
    evidence = f"{format_share(said, len(captions))} captions say left or right"
    return Finding.graded(
        "data.caption_sides",
        evidence,
        (bool(said) and flip, "warning", ", and data.flip mirrors half of the images", "omit --flip"),
        facts={"sides": said},
    )


def _check_held_out(held_out: Sequence[str], training: set[str]) -> Finding:
    """Check how many held-out captions are training captions as well."""
    shared = sum(text in training for text in held_out)
    remedy = "the held-out loss is of captions that were trained on; look at samples of prompts that no image has"
    return Finding.graded(
        "data.caption_leak",
        f"{format_share(shared, len(held_out))} held-out captions are also training captions",
        (shared > _SAME * max(1, len(held_out)), "hint", "", remedy),
        facts={"shared": shared, "held_out": len(held_out)},
    )
