"""Prepare a source in buckets: read the sides of all images, choose the buckets, and prepare each as a set."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import Ranges
from unfog.data.buckets.joined_set import join_sets
from unfog.data.buckets.sizes import BucketPlan, Fits, least_images, possible_sizes
from unfog.data.cache import sides_of_images
from unfog.data.columns.second_source import unify_columns
from unfog.data.data_report import DataReport
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.decode_pool import Progress
from unfog.data.prepare import choose_placement, prepare, scan_source, silence_pillow
from unfog.data.scan import NoUsableImageError, Scan, side_statistics
from unfog.data.settings import UNREAD, Data
from unfog.data.sources.base import SomeImages, Source
from unfog.errors import RequestError
from unfog.text import sanitize
from unfog.values.buckets import Bucket
from unfog.values.columns import Column, of_labels
from unfog.values.image_format import Size
from unfog.values.kinds.image_kinds import IMAGE_KINDS

_UNREADABLE = 1  # side of images where no head can be read


@dataclass(frozen=True)
class BucketChoice:
    """The network and the batch, by which buckets are chosen, or the sizes that a run has already."""

    fits: Fits
    batch: int
    """Images of a training step."""
    known: tuple[Size, ...] = ()
    """Sizes of the buckets of a run that goes on, from narrow to wide; () chooses them."""


class _BucketReport(DataReport):
    """The report on the images of all buckets."""

    @property
    def size_text(self) -> str:
        return "the size of a bucket"


def prepare_buckets(
    source: Source,
    settings: Data,
    choice: BucketChoice,
    say: Callable[[str], None],
    progress: Progress | None = None,
    to_draw: int = 0,
    known: str = "",
) -> Dataset:
    """Make a dataset of a source's images with a set for each bucket; see `prepare` for the other arguments.

    `say` is called with lines about the buckets. `Dataset.train` and `held_out` have all images, bucket by bucket,
    scaled to the size of the bucket with most images, for what needs one size. That is the size of the settings.

    Raises as `prepare`, and RequestError for a pack, whose images are cut already, and for remote shards.
    """
    _refuse(source)
    scan, key = scan_source(source, settings)
    with silence_pillow():
        scan = scan.resolve(began=bool(known))
        where, why = choose_placement(scan, key, to_draw, known)
        sides = sides_of_images(scan, progress)
    readable = np.asarray((sides > 0).all(1))
    if not readable.any():  # decoding says why
        readable, sides = np.ones(len(sides), bool), np.full_like(sides, _UNREADABLE)
    plan = _plan(scan, sides[readable], choice)
    for line in plan.lines(sides[readable]):
        say(line)
    plan = plan.with_unreadable(readable)
    # Without conditions, as the scan has read their columns, and paired images with those of other sources.
    own = replace(scan.settings, size=scan.size, aspect="crop", cache=where, condition="")
    if scan.channels_certain:
        own = replace(own, channels=scan.channels)
    preparation = _Preparation(scan, progress, to_draw, known)
    parts, plan = preparation.usable_parts(plan, own, say)
    channels = {part.settings.channels for part in parts}
    if len(channels) > 1:  # a bucket of grey images among others in colour
        own = replace(own, channels=max(channels))
        parts = preparation.parts(plan, own)
    dataset = _join(scan, parts)
    resolved = replace(dataset.settings, cache=settings.cache, condition=settings.condition)
    warnings = (*scan.warnings, *_unusable_lines(scan, parts))
    return replace(dataset, settings=resolved, placement=why, warnings=warnings)


def _refuse(source: Source) -> None:
    name = sanitize(source.name)
    if type(source).decoded_dataset is not Source.decoded_dataset:
        raise RequestError(
            f"aspect = keep needs whole images, and those of the pack {name} are cut to one size; give what it was "
            "made of, or omit --aspect"
        )
    if source.remote:
        raise RequestError(
            f"aspect = keep reads the sides of all images first, which in {name} are read over the network; copy the "
            "shards to a disk, or omit --aspect"
        )


def _plan(scan: Scan, sides: NDArray[np.int32], choice: BucketChoice) -> BucketPlan:
    if choice.known:
        return BucketPlan.known(choice.known, sides)
    sizes = possible_sizes(scan.size, choice.fits)
    return BucketPlan.of(sizes, sides, least_images(len(sides), choice.batch))


class _UnusableBucketError(NoUsableImageError):
    """No image of a bucket can be decoded."""

    def __init__(self, size: Size, error: NoUsableImageError) -> None:
        super().__init__(str(error))
        self.size = size


@dataclass(frozen=True)
class _Preparation:
    """The arguments of `prepare` that all buckets of a scan share."""

    scan: Scan
    progress: Progress | None
    to_draw: int
    known: str

    def usable_parts(
        self, plan: BucketPlan, settings: Data, say: Callable[[str], None]
    ) -> tuple[list[Dataset], BucketPlan]:
        """Prepare the images of each bucket, and return the plan for them: without buckets of damaged images alone.

        Those images go to other buckets, where they are counted as damaged.
        """
        while True:
            try:
                return self.parts(plan, settings), plan
            except _UnusableBucketError as error:
                if self.known or len(plan.sizes) == 1:
                    raise
                say(f"no bucket {Bucket(error.size, 0).sides}, as its images are damaged")
                plan = plan.without(error.size)

    def parts(self, plan: BucketPlan, settings: Data) -> list[Dataset]:
        """Prepare the images of each bucket that has some, with the same classes."""
        scan, source, n = self.scan, self.scan.source, len(plan.bucket)
        held = frozenset(source.names[i] for i in scan.held_out_indices().tolist())
        settings = replace(
            settings,
            labels="none" if scan.labels is None else "folders",
            held_out=settings.held_out if held else 0.0,
        )
        parts = []
        for number, size in enumerate(plan.sizes):
            rows = np.flatnonzero(plan.bucket == number)
            if not len(rows):
                if not self.known:
                    continue
                raise RequestError(
                    f"no image of {sanitize(source.name)} is for the bucket {size} of this run; restore the images, or "
                    "start a new run"
                )
            bucket, to_draw = BucketSource(scan, rows, held), self.to_draw * len(rows) // n
            try:
                parts.append(prepare(bucket, replace(settings, size=size), self.progress, to_draw, self.known))
            except NoUsableImageError as error:
                raise _UnusableBucketError(size, error) from error
        found = {name for part in parts for name in part.train.classes}
        classes = tuple(name for name in scan.classes if name in found)
        parts = [
            replace(part, train=_with_classes(part.train, classes), held_out=_with_classes(part.held_out, classes))
            for part in parts
        ]
        for one in scan.second:
            sets = [part.train for part in parts] + [part.held_out for part in parts]
            columns = unify_columns([images.columns[one.name] for images in sets])
            sets = [_with_column(images, column) for images, column in zip(sets, columns)]
            parts = [replace(part, train=a, held_out=b) for part, a, b in zip(parts, sets, sets[len(parts) :])]
        return parts


def _with_classes(images: ImageSet, classes: tuple[str, ...]) -> ImageSet:
    """Return a set with labels for these classes: its own are those of the classes that its bucket has."""
    if images.labels is None or images.classes == classes:
        return images
    index = np.array([classes.index(name) for name in images.classes], np.int64)
    labels = index[images.labels_of(np.arange(len(images)))]
    return replace(
        images, columns={**images.columns, **of_labels(labels, classes)}, known_fingerprint=images.fingerprint
    )


def _with_column(images: ImageSet, column: Column) -> ImageSet:
    """Return a set with one of its columns in another form. It keeps its fingerprint, as it is of the same files."""
    if images.columns[column.name] is column:
        return images
    return replace(images, columns={**images.columns, column.name: column}, known_fingerprint=images.fingerprint)


def _unusable_lines(scan: Scan, parts: Sequence[Dataset]) -> Iterator[str]:
    """Yield a line for each condition with images of a second source that cannot be used, of all buckets together."""
    for one in scan.second:
        alone = {scan.source.names[i] for i in np.flatnonzero(one.partner < 0).tolist()}
        paired = [
            (name, known)
            for images in (each for part in parts for each in (part.train, part.held_out))
            for name, known in zip(images.names, IMAGE_KINDS[one.kind].known(images.columns[one.name].values).tolist())
            if name not in alone
        ]
        if lost := [name for name, known in paired if not known]:
            yield (
                f"condition {one.name}: {len(lost):,} of {len(paired):,} images cannot be used, such as that of "
                f"{sanitize(lost[0])}; unknown for these"
            )


def _join(scan: Scan, parts: Sequence[Dataset]) -> Dataset:
    trains, held = [part.train for part in parts], [part.held_out for part in parts]
    # The bucket with most images; among equals, the one whose size is closest to a square.
    usual = max(parts, key=lambda part: (len(part.train), -abs(math.log(Bucket(part.settings.size, 0).aspect))))
    settings = replace(scan.resolved_settings, channels=parts[0].settings.channels, size=usual.settings.size)
    format = settings.image_format
    return Dataset(
        settings,
        join_sets(trains, format, _fingerprint(trains)),
        join_sets(held, format, _fingerprint(held)),
        _join_reports(scan, parts, settings),
        buckets=tuple(parts),
    )


def _fingerprint(parts: Sequence[ImageSet]) -> str:
    """Return a digest of the images of all buckets, their order and their classes."""
    prints = [part.fingerprint for part in parts]
    unread = UNREAD if any(one.startswith(UNREAD) for one in prints) else ""
    shapes = [part.pixels.shape for part in parts]
    return unread + hashlib.sha256(repr((prints, shapes, parts[0].classes)).encode()).hexdigest()


def _join_reports(scan: Scan, parts: Sequence[Dataset], settings: Data) -> DataReport:
    """Return the report on the images of all buckets, in the order of the joined sets."""
    reports = [part.report for part in parts]
    treatments = list(dict.fromkeys(actions for report in reports for actions in report.treatments))
    of_train, of_held_out = list[NDArray[np.int32]](), list[NDArray[np.int32]]()
    for part in parts:
        own = np.array([treatments.index(actions) for actions in part.report.treatments], np.int32)
        done = own[part.report.treatment_of(slice(None))]  # [0] where no image was decoded yet
        of_train.append(done[: len(part.train)])
        of_held_out.append(done[len(part.train) :])
    counts = sum((Counter(report.class_counts) for report in reports), Counter[str]())
    modes = sum((Counter(report.modes) for report in reports), Counter[str]())
    sides = np.concatenate([images.sides for part in parts for images in (part.train, part.held_out)])
    return _BucketReport(
        source=scan.source.name,
        found=sum(report.found for report in reports),
        used=sum(report.used for report in reports),
        held_out=sum(report.held_out for report in reports),
        size=settings.size,
        channels=settings.channels,
        background=settings.background,
        class_counts={name: counts[name] for name in parts[0].train.classes},
        sides=side_statistics(sides) if len(sides) else {},
        modes=dict(modes),
        treatments=tuple(treatments),
        treatment=np.concatenate([*of_train, *of_held_out]),
        skipped=tuple(sorted([*(one for report in reports for one in report.skipped), *scan.source.unreadable])),
        ignored=dict(scan.source.ignored),
        read=all(report.read for report in reports),
        values=scan.ranges.describe(),
        unused_pages=sum(report.unused_pages for report in reports),
    )


class BucketSource(SomeImages):
    """Some of the images of a source, with columns, pairs and held-out images that were decided on all of them.

    Args:
        scan: of the source, with all images.
        rows: indices of the images in the source, increasing.
        held_out: names of all held-out images.
    """

    ranges: Ranges

    def __init__(self, scan: Scan, rows: NDArray[np.int64], held_out: frozenset[str]) -> None:
        super().__init__(scan.source, rows, scan.columns)
        self.held_out = held_out.intersection(self.names)
        self.ranges, self.second = scan.ranges, tuple(one.rows(rows) for one in scan.second)

    def stamp(self) -> tuple[str, int]:
        digest, size = self._source.stamp()
        of_bucket = hashlib.sha256(f"{digest} bucket {self.ranges}".encode())
        of_bucket.update(np.ascontiguousarray(self._rows).data)
        return of_bucket.hexdigest(), size * len(self._rows) // max(1, len(self._source.names))
