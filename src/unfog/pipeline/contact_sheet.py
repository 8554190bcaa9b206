"""The contact sheet of a run: training images as the network sees them, in contact-sheet.png."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.data.augmentation import Augment
from unfog.data.data_report import ACTIONS, COMMON_ACTIONS, DataReport
from unfog.data.dataset import Dataset, evenly_spaced
from unfog.data.stream import ImageStream
from unfog.reporting.image_grids import Pixels, grid, printable_name, stack
from unfog.values.buckets import share_samples

_IMAGES, _PIXELS, _MIN_IMAGES = 64, 2**20, 8  # fewer large images, so that the sheet stays small
_ROW = 12  # images across, as `grid` lays out what has captions
_POSITIONS = 200_000  # of the stream, among which the images to show are chosen


def contact_sheet(dataset: Dataset, augment: Augment, seed: int) -> Pixels:
    """Return training images as the network sees them, from the stream and augmented: uint8 [H, W, 3].

    It shows a row for each unusual conversion, then some of each class, and depends on the images and the seed alone.
    Buckets have a sheet each, one below the other. RequestError if an image is of no known class.
    """
    _, _, height, width = dataset.train.pixels.shape
    count = min(_IMAGES, max(_MIN_IMAGES, _PIXELS // (height * width)))
    if not dataset.buckets:
        return _sheet(dataset, augment, seed, count)
    shares = zip(dataset.buckets, share_samples(dataset.size_buckets, count))
    return stack([_sheet(part, augment, seed, few) for part, few in shares if few])


def _sheet(dataset: Dataset, augment: Augment, seed: int, count: int) -> Pixels:
    images = dataset.train
    stream = ImageStream(images, seed)
    index = stream.index(0, min(len(images), _POSITIONS))  # index[p]: the image at position p
    chosen = _unusual(dataset.report, index, count // 2)
    chosen |= _spread(dataset, index, [p for p in range(len(index)) if p not in chosen], max(0, count - len(chosen)))
    batches = [stream.batch(position, 1) for position in chosen]
    for position, batch in zip(list(chosen), batches):
        shown = int(batch.index[0])
        if images.labels is not None and shown != int(index[position]):  # it stands in for another
            chosen[position] = _class_name(images.classes, int(images.labels[shown]))
    # A picture of the data must not move the numbers that training draws.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x0, _ = augment(torch.cat([batch.pixels for batch in batches]))
        pixels = dataset.settings.image_format.to_view(x0)
    captions = list(chosen.values())
    return grid(pixels, row_names=captions if any(captions) else None)


def _unusual(report: DataReport, index: NDArray[np.int64], count: int) -> dict[int, str]:
    """Return position -> caption of images that were converted in an unusual way, about as many of each."""
    if not report.read:
        return {}
    treatment = report.treatment_of(index)
    present = [(i, report.treatments[i]) for i in np.unique(treatment).tolist()]
    kinds = {action: [i for i, done in present if action in done] for action in ACTIONS if action not in COMMON_ACTIONS}
    kinds = {action: which for action, which in kinds.items() if which}
    chosen: dict[int, str] = {}
    few = min(_ROW, max(1, count // max(1, len(kinds))))
    for action, which in kinds.items():
        for position in np.flatnonzero(np.isin(treatment, which))[:few].tolist():
            chosen.setdefault(position, report.phrase(action))
    return chosen


def _spread(dataset: Dataset, index: NDArray[np.int64], free: list[int], count: int) -> dict[int, str]:
    """Return position -> class of some `free` positions, in order, for evenly spaced classes."""
    images = dataset.train
    labels = images.labels_of(index[free])
    if labels is None:
        return dict.fromkeys(free[:count], "")
    classes = evenly_spaced(len(images.classes), count)
    few = max(1, count // max(1, len(classes)))
    if few > _ROW:
        few -= few % _ROW  # whole rows
    names = {number: _class_name(images.classes, number) for number in classes}
    return {free[i]: names[number] for number in classes for i in np.flatnonzero(labels == number)[:few]}


def _class_name(classes: Sequence[str], number: int) -> str:
    return printable_name(classes[number], f"class {number}")
