"""Data report of a run: data.json lists every file, contact-sheet.png shows some images as the network sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset, evenly_spaced
from unfog.data.lazy import remote_shards_of
from unfog.data.report import ACTIONS, COMMON_ACTIONS, DataReport
from unfog.data.stream import ImageStream
from unfog.pipeline.generate import to_pixels
from unfog.process.run_folder import RunFolder
from unfog.reporting.image_grids import Pixels, encode_png, grid, printable_name
from unfog.reporting.records import write_atomic
from unfog.text import valid_text

DATA_FILE = "data.json"
MAX_LISTED = 100_000
"""Up to so many files data.json lists all; of more, only those quarantined, or converted in a way worth a look."""

_SHEET_IMAGES = 64
"""Images on the contact sheet; fewer if they are large, so that writing it stays fast."""

_SHEET_PIXELS = 2**20
_FEWEST_SHOWN = 8
_ROW = 12  # images across, as `grid` lays out what has captions
_LOOKED_AT = 200_000  # positions of the stream among which the images to show are chosen

_encode = json.JSONEncoder(ensure_ascii=False).encode


def write_data_report(folder: RunFolder, prepared: Dataset, augment: Augment, seed: int) -> None:
    """Write data.json and contact-sheet.png into a run folder, each atomically.

    Args:
        folder: the run.
        prepared: its images.
        augment: the augmentation in training.
        seed: of the stream and of the augmentation. The random state of torch is left as it is.

    Raises:
        OSError: the files cannot be written.
    """
    write_atomic(folder.path / DATA_FILE, data_json(prepared))
    write_atomic(folder.path / "contact-sheet.png", encode_png(contact_sheet(prepared, augment, seed)))


def data_json(prepared: Dataset) -> bytes:
    """The ledger, and a line for each file: {"name", "status", "converted", "reason"}.

    The status is "used", "held out" or "quarantined", and only the last has a reason. "converted" is null where images
    are decoded only when training wants them. Shards that a run goes on without are in "shards_given_up". A name that
    is no valid text has \\xff for such a byte.
    """
    ledger = prepared.report
    files = ledger.used + len(ledger.skipped)
    lines = [*_used(prepared, everything=files <= MAX_LISTED), *map(_quarantined, ledger.skipped)]
    whole = ledger.to_dict()
    for name in ("treatment", "treatments"):  # which the lines spell out
        del whole[name]
    head = {
        "summary": ledger.line(),
        **whole,
        "quarantined": len(ledger.skipped),
        "actions": ledger.actions,
        "unlisted": files - len(lines),
    }
    shards = remote_shards_of(prepared.train)
    if shards is not None and shards.failed:
        head["shards_given_up"] = shards.failed
    opening = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    listing = ",\n".join(lines)
    return f'{opening},\n  "files": [\n{listing}\n  ]\n}}\n'.encode("utf-8", "replace")


def _used(prepared: Dataset, everything: bool) -> Iterator[str]:
    """A line for each image used; unless everything is wanted, for those that something unusual was done to."""
    ledger = prepared.report
    converted = [
        f'"converted": {_encode(ledger.phrases(which))}, "reason": null' for which in range(len(ledger.treatments))
    ]
    begin = 0
    for status, names in (("used", prepared.train.names), ("held out", prepared.held_out.names)):
        treatment = ledger.treatment_of(slice(begin, begin + len(names)))
        begin += len(names)
        if not ledger.read:  # what will be done to them is not known yet
            listed = ((name, '"converted": null, "reason": null') for name in (names if everything else ()))
        elif everything:
            listed = ((name, converted[which]) for name, which in zip(names, treatment.tolist(), strict=True))
        else:
            unusual = [i for i, done in enumerate(ledger.treatments) if not COMMON_ACTIONS.issuperset(done)]
            rows = np.flatnonzero(np.isin(treatment, unusual)).tolist()  # few; not every name need be looked up
            listed = ((names[row], converted[treatment[row]]) for row in rows)
        for name, done in listed:
            yield f'    {{"name": {_encode(valid_text(name))}, "status": "{status}", {done}}}'


def _quarantined(one: Iterable[str]) -> str:
    name, reason = map(valid_text, one)
    return f'    {{"name": {_encode(name)}, "status": "quarantined", "converted": [], "reason": {_encode(reason)}}}'


def contact_sheet(prepared: Dataset, augment: Augment, seed: int) -> Pixels:
    """Return training images as the network sees them, from the stream and augmented: uint8 [H, W, 3].

    A row for each unusual conversion, then some of each class; small images are enlarged by an integer factor. The
    sheet depends on the images and the seed alone.
    """
    images = prepared.train
    _, _, height, width = images.pixels.shape
    count = min(_SHEET_IMAGES, max(_FEWEST_SHOWN, _SHEET_PIXELS // (height * width)))
    stream = ImageStream(images, seed)
    index = stream.index(0, min(len(images), _LOOKED_AT))  # index[p]: the image at position p
    chosen = _unusual(prepared.report, index, count // 2)
    chosen |= _spread(prepared, index, [p for p in range(len(index)) if p not in chosen], max(0, count - len(chosen)))
    batches = [stream.batch(position, 1) for position in chosen]
    for position, batch in zip(list(chosen), batches):
        if batch.label is not None and int(batch.index[0]) != int(index[position]):  # it stands in for another
            chosen[position] = _class_name(images.classes, int(batch.label[0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x0, _ = augment(torch.cat([batch.pixels for batch in batches]))
        pixels = to_pixels(x0).permute(0, 2, 3, 1).numpy()
    captions = list(chosen.values())
    return grid(pixels, labels=captions if any(captions) else None)


def _unusual(ledger: DataReport, index: NDArray[np.int64], count: int) -> dict[int, str]:
    """Return position -> conversion of images that were converted in an unusual way, about as many of each."""
    if not ledger.read:
        return {}
    treatment = ledger.treatment_of(index)
    present = set(np.unique(treatment).tolist())
    chosen: dict[int, str] = {}
    kinds = [
        (action, which)
        for action in ACTIONS
        if action not in COMMON_ACTIONS
        and (which := [i for i, done in enumerate(ledger.treatments) if action in done and i in present])
    ]
    for action, which in kinds:
        positions = np.flatnonzero(np.isin(treatment, which))
        few = min(_ROW, max(1, count // len(kinds)))
        for position in positions[:few].tolist():
            chosen.setdefault(position, ledger.phrase(action))
    return chosen


def _spread(prepared: Dataset, index: NDArray[np.int64], free: list[int], count: int) -> dict[int, str]:
    """Return position -> class of some `free` positions, in order, for evenly spaced classes."""
    images = prepared.train
    if images.labels is None:
        return dict.fromkeys(free[:count], "")
    labels = images.labels[index[free]]
    classes = evenly_spaced(len(images.classes), count)
    few = max(1, count // max(1, len(classes)))
    names = {label: _class_name(images.classes, label) for label in classes}
    return {free[i]: names[label] for label in classes for i in np.flatnonzero(labels == label)[:few]}


def _class_name(classes: Sequence[str], label: int) -> str:
    return printable_name(classes[label], f"class {label}")
