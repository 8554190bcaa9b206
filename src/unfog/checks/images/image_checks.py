"""Checks of the images before training: the table of all of them, and the two ways to run them.

To add a check, write a function `(ImageScan, Config) -> Finding | None` in one of the modules beside this one, and give
it a line in a table below, under the code of its finding. None means that the check does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from unfog.checks.images import class_checks, decode_checks, exposure_checks, size_checks
from unfog.checks.images.duplicate_checks import check_duplicates, find_duplicates
from unfog.checks.images.pixel_statistics import ImageScan, Progress, scan_images
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.lazy import LazyPixels
from unfog.reporting.findings import Finding

Check = Callable[[ImageScan, Config], Finding | None]

FILE_CHECKS: Mapping[str, Check] = {
    "data.count": decode_checks.check_count,
    "data.ledger": decode_checks.check_skipped_files,
    "data.converted": decode_checks.check_conversions,
    "data.sizes": size_checks.check_original_sizes,
    "data.upscaled": size_checks.check_upscaling,
    "data.crop": size_checks.check_crop,
    "data.label_bounds": class_checks.check_labels,
    "data.balance": class_checks.check_balance,
    "data.layout": class_checks.check_folder_layout,
}
CONTENT_CHECKS: Mapping[str, Check] = {
    "data.equal": exposure_checks.check_all_equal,
    "data.range": exposure_checks.check_value_range,
}
PIXEL_CHECKS: Mapping[str, Check] = {
    "data.blank": exposure_checks.check_blank,
    "data.exposure": exposure_checks.check_exposure,
    "data.grey_as_rgb": exposure_checks.check_grey,
    "data.channels": exposure_checks.check_channels,
    "data.sigma_data": exposure_checks.check_sigma_data,
}
# data.duplicates, data.near_duplicates and data.leakage share one search: duplicate_checks.check_duplicates.

# Limits that keep the quick check within a fraction of a second.
_QUICK_IMAGES = 1000
_QUICK_BYTES = 16 * 2**20
_QUICK_DECODED = 64
_QUICK_SIDES = 50_000


def check_images(prepared: Dataset, config: Config, progress: Progress | None = None) -> list[Finding]:
    """Run all checks on all images; takes seconds for 50,000 images of 32x32, and 130 bytes of memory an image.

    `progress` is called as (done, total) from the calling thread: first for the images, then for pairs of candidates.
    """
    return _run_checks(scan_images(prepared, progress=progress), config, progress)


def quick_check_images(prepared: Dataset, config: Config) -> list[Finding]:
    """Run the checks on a sample of at most 1,000 images; duplicates are only searched in a set that small."""
    image = int(np.prod(prepared.train.pixels.shape[1:]))
    most = max(8, min(_QUICK_IMAGES, _QUICK_BYTES // image))
    if isinstance(prepared.train.pixels, LazyPixels):
        most = min(most, _QUICK_DECODED)
    return _run_checks(scan_images(prepared, most, most_sides=_QUICK_SIDES), config)


def _run_checks(scan: ImageScan, config: Config, progress: Progress | None = None) -> list[Finding]:
    def run(checks: Mapping[str, Check]) -> list[Finding]:
        return [finding for check in checks.values() if (finding := check(scan, config)) is not None]

    files, content = run(FILE_CHECKS), run(CONTENT_CHECKS)
    equal, value_range = content
    # Of images that are black or all the same, the other statistics would only repeat that.
    if equal.severity != "fatal" and value_range.severity == "fine":
        content += run(PIXEL_CHECKS)
    # A sample holds few of the duplicates, and images without content are all alike.
    if scan.complete and not any(finding.severity == "fatal" for finding in content):
        content += check_duplicates(scan, find_duplicates(scan, progress))
    return [*files, *content]
