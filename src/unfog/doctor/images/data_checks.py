"""The doctor's look at the data: all of it, or the part that can be had at once."""

from __future__ import annotations

import numpy as np

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.lazy import LazyPixels
from unfog.doctor.images.class_checks import class_findings
from unfog.doctor.images.decode_checks import account_findings
from unfog.doctor.images.duplicates import copy_findings, find_copies
from unfog.doctor.images.exposure import tone_findings
from unfog.doctor.images.pixel_statistics import Progress, Survey, survey
from unfog.doctor.images.size_checks import size_findings
from unfog.reporting.findings import Finding

GLANCED = 1000
"""Images that a glance looks at, at most; fewer where they have to be decoded or are large."""

_GLANCED_BYTES = 16 * 2**20
_GLANCED_DECODED = 64
_GLANCED_SIDES = 50_000


def examine_data(prepared: Dataset, config: Config, progress: Progress | None = None) -> list[Finding]:
    """Look at every image once; some seconds for 50,000 of 32x32, and memory of 130 bytes an image.

    `progress` is called with (done, in all), from the calling thread: first of the images, then of the pairs that may
    be alike. No file is opened but through the sets, and none is changed.
    """
    return _examined(survey(prepared, progress=progress), config, progress)


def glance(prepared: Dataset, config: Config) -> list[Finding]:
    """The part that takes a fraction of a second whatever the size: of the pixels, a sample of at most 1,000 images.

    Copies are searched only where that is all there are.
    """
    image = int(np.prod(prepared.train.pixels.shape[1:]))
    most = max(8, min(GLANCED, _GLANCED_BYTES // image))
    if isinstance(prepared.train.pixels, LazyPixels):
        most = min(most, _GLANCED_DECODED)
    return _examined(survey(prepared, most), config, most_sides=_GLANCED_SIDES)


def _examined(
    looked: Survey, config: Config, progress: Progress | None = None, most_sides: int | None = None
) -> list[Finding]:
    prepared = looked.prepared
    tones = tone_findings(looked, config)
    findings = [
        *account_findings(prepared),
        *size_findings(prepared, most_sides),
        *class_findings(prepared, config),
        *tones,
    ]
    if not looked.whole or any(finding.severity == "fatal" for finding in tones):
        return findings  # in a part few copies would meet, and of images that show nothing, all are alike
    return [*findings, *copy_findings(looked, find_copies(looked, progress))]
