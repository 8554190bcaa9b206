"""Which files became images, what was done to them, and whether there are enough."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from unfog.data.dataset import Dataset
from unfog.data.report import ACTIONS, COMMON_ACTIONS
from unfog.doctor.images.example_images import MOST_NAMES, format_share, image_names, list_names
from unfog.doctor.images.pixel_statistics import unusable_files
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

_TOO_FEW, _FEW, _MANY = 5, 100, 1000
"""Images below which a set is no set; below which a model learns it by heart; from which it has something to learn."""

_ROWS = 50  # of a table

_SMALL_SET = (
    "add images; else train with --flip (if mirrored ones make sense){} and --network tiny:dropout=0.2, and judge "
    "samples by their nearest training images"
)


def check_decoding(prepared: Dataset) -> list[Finding]:
    """Number of images, files that could not be used, and conversions."""
    return [_count(prepared), _ledger(prepared), _converted(prepared)]


def _count(prepared: Dataset) -> Finding:
    train, held_out = len(prepared.train), len(prepared.held_out)
    size, channels = prepared.settings.size, prepared.settings.channels
    evidence = (
        f"{plural(train)} to train on, {held_out:,} held out, {size}x{size}, {'RGB' if channels == 3 else 'grey'}"
    )
    severity: Severity = "fine"
    remedy = ""
    small = _SMALL_SET.format(", --data.augment 0.15" * (prepared.latents is None))  # which latents cannot have
    if train < _TOO_FEW:
        severity, remedy = "fatal", f"give at least {_TOO_FEW}, better {_FEW} or more: a model can only repeat so few"
    elif train < _FEW:
        severity, remedy = "warning", f"a model learns so few by heart: {small}"
    elif train < _MANY:
        severity, remedy = "hint", f"a model soon learns so few by heart: {small}"
    return Finding("data.count", severity, evidence, remedy, {"train": train, "held_out": held_out})


def _ledger(prepared: Dataset) -> Finding:
    ledger = prepared.report
    lost, ignored = unusable_files(prepared), sum(ledger.ignored.values())
    facts = {
        "found": ledger.found,
        "used": ledger.used - (len(lost) - len(ledger.skipped)),
        "quarantined": [list(one) for one in lost[:MOST_NAMES]],
        "quarantined_in_all": len(lost),
        "ignored": dict(ledger.ignored),
    }
    kinds = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(ledger.ignored).most_common(3))
    aside = f"; {plural(ignored, 'other file')} ignored ({kinds})" if ignored else ""
    if not lost:
        used = "is used" if ledger.read else "is taken for usable, and decoded when its turn comes"
        return Finding(
            "data.ledger", "fine", f"each of {plural(ledger.found, 'image file')} {used}{aside}", facts=facts
        )
    reasons = []
    for reason, count in Counter(one.reason for one in lost).most_common(5):
        reasons.append(f"{count:,} {reason}: {list_names([one.name for one in lost if one.reason == reason])}")
    table = [("file", "reason"), *((sanitize(one.name), one.reason) for one in lost[:_ROWS])]
    rest = f"{len(lost) - _ROWS:,} more are in findings.json." if len(lost) > _ROWS else ""
    return Finding(
        "data.ledger",
        "warning",
        (
            f"{format_share(len(lost), max(ledger.found, len(lost)))} image files cannot be used "
            f"({'; '.join(reasons)}){aside}"
        ),
        "repair, convert or remove them; training goes on without them",
        facts,
        (Figure("Files that cannot be used", table=table, caption=rest),),
    )


def _converted(prepared: Dataset) -> Finding:
    ledger = prepared.report
    actions = ledger.actions
    odd = {key: count for key, count in actions.items() if key not in COMMON_ACTIONS}
    facts: dict[str, Any] = {"actions": actions, "modes": dict(ledger.modes)}
    if not ledger.read:
        return Finding("data.converted", "fine", "conversions are not known before all images are decoded", facts=facts)
    if not odd:
        plain = ", ".join(f"{count:,} {ledger.phrase(key)}" for key, count in actions.items()) or "none was changed"
        return Finding("data.converted", "fine", f"no image needed a conversion ({plain})", facts=facts)
    which = [i for i, done in enumerate(ledger.treatments) if odd.keys() & set(done)]
    names = image_names(prepared, np.flatnonzero(np.isin(ledger.treatment, which)))
    said = ", ".join(f"{format_share(odd[key], ledger.used)} {ledger.phrase(key)}" for key in ACTIONS if key in odd)
    remedy = "look at the contact sheet whether that is what you mean"
    if "flattened" in odd:
        remedy += "; --data.background sets the colour behind transparent pixels"
    if "profile_ignored" in odd:
        remedy += "; unusable colour profiles were taken for sRGB"
    rows = [(ledger.phrase(key), f"{actions[key]:,}") for key in ACTIONS if key in actions]
    exhibit = Figure("What was done to the images", table=[("done", "images"), *rows])
    return Finding("data.converted", "hint", said, remedy, {**facts, "names": names}, (exhibit,))
