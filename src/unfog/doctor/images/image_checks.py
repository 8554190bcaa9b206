"""The doctor's look at the data: all of it, or the part that can be had at once."""

from __future__ import annotations

import numpy as np

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.lazy import LazyPixels
from unfog.doctor.images.class_checks import check_classes
from unfog.doctor.images.decode_checks import check_decoding
from unfog.doctor.images.duplicate_checks import check_duplicates, find_duplicates
from unfog.doctor.images.exposure_checks import check_pixel_values
from unfog.doctor.images.pixel_statistics import ImageScan, Progress, scan_images
from unfog.doctor.images.size_checks import check_sizes
from unfog.reporting.findings import Finding

_QUICK_IMAGES = 1000
"""Images that a glance looks at, at most; fewer where they have to be decoded or are large."""

_GLANCED_BYTES = 16 * 2**20
_GLANCED_DECODED = 64
_GLANCED_SIDES = 50_000


def check_images(prepared: Dataset, config: Config, progress: Progress | None = None) -> list[Finding]:
    """Look at every image once; some seconds for 50,000 of 32x32, and memory of 130 bytes an image.

    `progress` is called with (done, in all), from the calling thread: first of the images, then of the pairs that may
    be alike. No file is opened but through the sets, and none is changed.
    """
    return _examined(scan_images(prepared, progress=progress), config, progress)


def quick_check_images(prepared: Dataset, config: Config) -> list[Finding]:
    """The part that takes a fraction of a second whatever the size: of the pixels, a sample of at most 1,000 images.

    Copies are searched only where that is all there are.
    """
    image = int(np.prod(prepared.train.pixels.shape[1:]))
    most = max(8, min(_QUICK_IMAGES, _GLANCED_BYTES // image))
    if isinstance(prepared.train.pixels, LazyPixels):
        most = min(most, _GLANCED_DECODED)
    return _examined(scan_images(prepared, most), config, most_sides=_GLANCED_SIDES)


def _examined(
    looked: ImageScan, config: Config, progress: Progress | None = None, most_sides: int | None = None
) -> list[Finding]:
    prepared = looked.prepared
    tones = check_pixel_values(looked, config)
    findings = [
        *check_decoding(prepared),
        *check_sizes(prepared, most_sides),
        *check_classes(prepared, config),
        *tones,
    ]
    if not looked.complete or any(finding.severity == "fatal" for finding in tones):
        return findings  # in a part few copies would meet, and of images that show nothing, all are alike
    return [*findings, *check_duplicates(looked, find_duplicates(looked, progress))]
