"""Data report of a run: data.json lists every file, contact-sheet.png shows some images as the network sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.data.augmentation import Augment
from unfog.data.data_report import ACTIONS, COMMON_ACTIONS, DataReport
from unfog.data.dataset import Dataset, evenly_spaced
from unfog.data.lazy import remote_shards_of
from unfog.data.stream import ImageStream
from unfog.pipeline.generate import to_pixels
from unfog.process.run_folder import RunFolder
from unfog.reporting.image_grids import Pixels, encode_png, grid, printable_name
from unfog.reporting.records import write_atomic
from unfog.text import valid_text

DATA_FILE = "data.json"
MAX_LISTED = 100_000  # files in data.json; of more, only those skipped, or converted in an unusual way
_SHEET_IMAGES, _SHEET_PIXELS, _MIN_SHEET_IMAGES = 64, 2**20, 8  # fewer large images, so that the sheet stays small
_ROW = 12  # images across, as `grid` lays out what has captions
_POSITIONS = 200_000  # of the stream, among which the images to show are chosen

_encode = json.JSONEncoder(ensure_ascii=False).encode


def write_data_report(folder: RunFolder, dataset: Dataset, augment: Augment, seed: int) -> None:
    """Write data.json and contact-sheet.png into a run folder, each atomically. OSError if that is impossible.

    `seed` is that of the stream and of the augmentation; the random state of torch is left as it is.
    """
    write_atomic(folder.path / DATA_FILE, data_json(dataset))
    write_atomic(folder.path / "contact-sheet.png", encode_png(contact_sheet(dataset, augment, seed)))


def data_json(dataset: Dataset) -> bytes:
    """Return the report of the data set, and a line for each file: {"name", "status", "converted", "reason"}.

    The status is "used", "held out" or "quarantined" (skipped), and only the last has a reason. "converted" is null
    where images are decoded only when training wants them. Failed shards are in "shards_given_up". A name that is no
    valid text has \\xff for such a byte.
    """
    report = dataset.report
    files = report.used + len(report.skipped)
    lines = [*_used_lines(dataset, everything=files <= MAX_LISTED), *map(_skipped_line, report.skipped)]
    head = {
        "summary": report.line(),
        # The lines spell the treatments out.
        **{name: value for name, value in report.to_dict().items() if name not in ("treatment", "treatments")},
        "quarantined": len(report.skipped),
        "actions": report.actions,
        "unlisted": files - len(lines),
    }
    shards = remote_shards_of(dataset.train)
    if shards is not None and shards.failed:
        head["shards_given_up"] = shards.failed
    opening = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    listing = ",\n".join(lines)
    return f'{opening},\n  "files": [\n{listing}\n  ]\n}}\n'.encode("utf-8", "replace")


def _used_lines(dataset: Dataset, everything: bool) -> Iterator[str]:
    """Yield a line for each image used; unless `everything`, for those that were converted in an unusual way."""
    report = dataset.report
    converted = [f'"converted": {_encode(report.phrases(i))}, "reason": null' for i in range(len(report.treatments))]
    begin = 0
    for status, names in (("used", dataset.train.names), ("held out", dataset.held_out.names)):
        treatment = report.treatment_of(slice(begin, begin + len(names)))
        begin += len(names)
        if not report.read:  # what will be done to them is not known yet
            listed = ((name, '"converted": null, "reason": null') for name in (names if everything else ()))
        elif everything:
            listed = ((name, converted[which]) for name, which in zip(names, treatment.tolist(), strict=True))
        else:
            unusual = [i for i, done in enumerate(report.treatments) if not COMMON_ACTIONS.issuperset(done)]
            rows = np.flatnonzero(np.isin(treatment, unusual)).tolist()  # few; not every name need be looked up
            listed = ((names[row], converted[treatment[row]]) for row in rows)
        for name, done in listed:
            yield f'    {{"name": {_encode(valid_text(name))}, "status": "{status}", {done}}}'


def _skipped_line(one: Iterable[str]) -> str:
    name, reason = map(valid_text, one)
    return f'    {{"name": {_encode(name)}, "status": "quarantined", "converted": [], "reason": {_encode(reason)}}}'


def contact_sheet(dataset: Dataset, augment: Augment, seed: int) -> Pixels:
    """Return training images as the network sees them, from the stream and augmented: uint8 [H, W, 3].

    It shows a row for each unusual conversion, then some of each class, and depends on the images and the seed alone.
    """
    images = dataset.train
    _, _, height, width = images.pixels.shape
    count = min(_SHEET_IMAGES, max(_MIN_SHEET_IMAGES, _SHEET_PIXELS // (height * width)))
    stream = ImageStream(images, seed)
    index = stream.index(0, min(len(images), _POSITIONS))  # index[p]: the image at position p
    chosen = _unusual(dataset.report, index, count // 2)
    chosen |= _spread(dataset, index, [p for p in range(len(index)) if p not in chosen], max(0, count - len(chosen)))
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


def _unusual(report: DataReport, index: NDArray[np.int64], count: int) -> dict[int, str]:
    """Return position -> caption of images that were converted in an unusual way, about as many of each."""
    if not report.read:
        return {}
    treatment = report.treatment_of(index)
    present = set(np.unique(treatment).tolist())
    kinds: dict[str, list[int]] = {}
    for action in (one for one in ACTIONS if one not in COMMON_ACTIONS):
        if which := [i for i, done in enumerate(report.treatments) if action in done and i in present]:
            kinds[action] = which
    chosen: dict[int, str] = {}
    few = min(_ROW, max(1, count // max(1, len(kinds))))
    for action, which in kinds.items():
        for position in np.flatnonzero(np.isin(treatment, which))[:few].tolist():
            chosen.setdefault(position, report.phrase(action))
    return chosen


def _spread(dataset: Dataset, index: NDArray[np.int64], free: list[int], count: int) -> dict[int, str]:
    """Return position -> class of some `free` positions, in order, for evenly spaced classes."""
    images = dataset.train
    if images.labels is None:
        return dict.fromkeys(free[:count], "")
    labels = images.labels[index[free]]
    classes = evenly_spaced(len(images.classes), count)
    few = max(1, count // max(1, len(classes)))
    names = {label: _class_name(images.classes, label) for label in classes}
    return {free[i]: names[label] for label in classes for i in np.flatnonzero(labels == label)[:few]}


def _class_name(classes: Sequence[str], label: int) -> str:
    return printable_name(classes[label], f"class {label}")
