"""Checks of decoding: number of images, files that could not be used, and conversions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from unfog.checks.images.example_images import format_share, list_names
from unfog.checks.images.pixel_statistics import MOST_NAMES, ImageScan, unusable_files
from unfog.config.schema import Config
from unfog.data.data_report import ACTIONS, COMMON_ACTIONS
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import plural
from unfog.text import sanitize

_TOO_FEW, _FEW, _MANY = 5, 100, 1000  # images: too few to train on; soon memorized; enough to generalise from
_ROWS = 50  # of a table


def check_count(scan: ImageScan, config: Config) -> Finding:
    """Check that there are enough training images."""
    prepared, settings = scan.prepared, scan.prepared.settings
    train, held_out = len(prepared.train), len(prepared.held_out)
    kind = f"{settings.size}x{settings.size}, {'RGB' if settings.channels == 3 else 'grey'}"
    augment = ", --data.augment 0.15" * (prepared.latents is None)  # augmentation needs pixels
    more = (
        f"add images; else train with --flip (if mirrored ones make sense){augment} and "
        "--network tiny:dropout=0.2, and judge samples by their nearest training images"
    )
    severity: Severity = "fine"
    remedy = ""
    if train < _TOO_FEW:
        severity, remedy = "fatal", f"give at least {_TOO_FEW}, better {_FEW} or more: a model can only repeat so few"
    elif train < _FEW:
        severity, remedy = "warning", f"a model memorizes so few: {more}"
    elif train < _MANY:
        severity, remedy = "hint", f"a model soon memorizes so few: {more}"
    evidence = f"{plural(train)} to train on, {held_out:,} held out, {kind}"
    return Finding("data.count", severity, evidence, remedy, {"train": train, "held_out": held_out})


def check_skipped_files(scan: ImageScan, config: Config) -> Finding:
    """List the files that could not be decoded, by reason."""
    report = scan.prepared.report
    skipped, ignored = unusable_files(scan.prepared), sum(report.ignored.values())
    facts = {
        "found": report.found,
        "used": report.used - (len(skipped) - len(report.skipped)),
        "quarantined": [list(one) for one in skipped[:MOST_NAMES]],
        "quarantined_in_all": len(skipped),
        "ignored": dict(report.ignored),
    }
    kinds = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(report.ignored).most_common(3))
    others = f"; {plural(ignored, 'other file')} ignored ({kinds})" if ignored else ""
    if not skipped:
        used = "is used" if report.read else "counts as usable until it is decoded in training"
        evidence = f"each of {plural(report.found, 'image file')} {used}{others}"
        return Finding("data.ledger", "fine", evidence, facts=facts)
    reasons = []
    for reason, count in Counter(one.reason for one in skipped).most_common(5):
        reasons.append(f"{count:,} {reason}: {list_names([one.name for one in skipped if one.reason == reason])}")
    total = format_share(len(skipped), max(report.found, len(skipped)))
    evidence = f"{total} image files cannot be used ({'; '.join(reasons)}){others}"
    remedy = "repair, convert or remove them; training goes on without them"
    table = [("file", "reason"), *((sanitize(one.name), one.reason) for one in skipped[:_ROWS])]
    caption = f"{len(skipped) - _ROWS:,} more are in findings.json." if len(skipped) > _ROWS else ""
    figure = Figure("Files that cannot be used", table=table, caption=caption)
    return Finding("data.ledger", "warning", evidence, remedy, facts, (figure,))


def check_conversions(scan: ImageScan, config: Config) -> Finding:
    """List conversions that change more than the size, such as flattened transparency or dropped colour profiles."""
    report = scan.prepared.report
    actions = report.actions
    uncommon = {key: count for key, count in actions.items() if key not in COMMON_ACTIONS}
    facts: dict[str, Any] = {"actions": actions, "modes": dict(report.modes)}
    if not report.read:
        return Finding("data.converted", "fine", "conversions are not known before all images are decoded", facts=facts)
    if not uncommon:
        common = ", ".join(f"{count:,} {report.phrase(key)}" for key, count in actions.items()) or "none was changed"
        return Finding("data.converted", "fine", f"no image needed a conversion ({common})", facts=facts)
    which = [i for i, done in enumerate(report.treatments) if uncommon.keys() & set(done)]
    facts["names"] = scan.names(np.flatnonzero(np.isin(report.treatment, which)))
    parts = [f"{format_share(uncommon[key], report.used)} {report.phrase(key)}" for key in ACTIONS if key in uncommon]
    remedy = "check on the contact sheet that this is intended"
    if "flattened" in uncommon:
        remedy += "; --data.background sets the colour behind transparent pixels"
    if "profile_ignored" in uncommon:
        remedy += "; images with unusable colour profiles were read as sRGB"
    rows = [(report.phrase(key), f"{actions[key]:,}") for key in ACTIONS if key in actions]
    figure = Figure("Conversions", table=[("conversion", "images"), *rows])
    return Finding("data.converted", "hint", ", ".join(parts), remedy, facts, (figure,))
