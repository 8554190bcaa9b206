"""`Scan`: columns, size and channels of a source before all of it is decoded, and `DecodeResult` after."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import UNKNOWN_REMEDY, Ranges
from unfog.data.columns.conditions import with_conditions
from unfog.data.columns.second_source import combined_stamp, pair_sources, second_columns
from unfog.data.data_report import DataReport, SkippedFile
from unfog.data.decode import Opener, parse_colour, upright_sides
from unfog.data.decode_pool import DecodeStatistics, PixelFormat, Progress, decode_with_retries
from unfog.data.full_depth.choice import Kept, choose_kept, keep_array, mixed_depths_line
from unfog.data.full_depth.ranges import check_range, find_ranges, spread
from unfog.data.settings import Data, parse_condition
from unfog.data.sources.base import ImageError, MissingImageError, SecondSource, Source, TransientImageError
from unfog.data.sources.image_files import ARCHIVE_GONE, CHANGED, GONE, image_error
from unfog.data.sources.label_tables import strip_shard
from unfog.data.sources.labels import apply_label_table, labels_setting, read_columns, warn_of_masks_beside_images
from unfog.errors import RequestError, RunError
from unfog.settings import is_auto
from unfog.text import plural, sanitize
from unfog.values.columns import Column, classes_of, in_order, labels_of, of_labels, rows_of
from unfog.values.image_format import LEAST, MOST, ImageFormat, Size, colour_channels, size_of

# Images, evenly spread, that an automatic size looks at, and automatic channels before all images are decoded.
_HEADERS_SAMPLED = 1000
COLOURS_SAMPLED = 64

# An automatic size keeps a shape that so many of the sampled images share within this logarithm of the aspect, if its
# sides differ by more than this factor. Its long side has at most so many steps of a quarter of the short one.
_MOST_ALIKE, _ALIKE, _NEARLY_SQUARE, _LONGEST = 0.75, 0.03, 1.2, 16

_MAX_HELD_OUT = 1000
# From so many undecoded images on, those held out are evenly spaced, as hashing every name would take minutes.
_EVEN_SPLIT_FROM = 200_000
# Fewer images are all trained on: each is worth more to training than to a loss over a handful.
MIN_TO_HOLD_OUT = 100
MIN_GROUPS = 3
"""Volumes, of fewer of which single images are held out."""


class NoUsableImageError(RequestError):
    """The heads of images could be read, but no image can be decoded."""


@dataclass(frozen=True, eq=False)
class Scan:
    """A source, and the format that its images will be decoded to."""

    source: Source
    settings: Data
    """The settings as given, with `range` resolved; size, channels and labels are not."""
    columns: Mapping[str, Column]
    """What is known about each image of the source, in the order of a set."""
    stamp: str
    """Digest of the source's state."""
    file_bytes: int
    size: Size
    channels: int
    channels_certain: bool
    """False if grey is a guess from a sample: a single image in colour then makes all RGB."""
    ranges: Ranges = Ranges()
    """Ranges of the images deeper than 8 bits."""
    warnings: tuple[str, ...] = ()
    """Lines about files that were left out although they may have been meant to count, such as a table of labels."""
    second: tuple[SecondSource, ...] = ()
    """Second sources, whose images are conditions of these."""
    second_columns: Mapping[str, Column] = field(default_factory=dict)
    """Columns of the second sources, once they are decoded by `with_second`. The stamp stands for them."""

    @classmethod
    def create(cls, source: Source, settings: Data) -> Scan:
        """Scan a source: its columns and state. Size and channels are as in the settings: 0 until `resolve`.

        Raises:
            RequestError: a setting does not fit the source; an image is of none of the classes, or a column does
                not fit the images.
        """
        settings = source.fill_settings(settings)
        warnings = list(source.reading_warnings)
        source = with_conditions(source, settings.condition, warnings.append, partial(_training_rows, source, settings))
        conditions = parse_condition(settings.condition)[1]
        source = apply_label_table(source, settings.labels, warnings.append, conditions)
        if source.second_names:
            warnings.append(_describe_second_names(source.second_names))
        columns = read_columns(source, settings.labels, warnings.append)
        warn_of_masks_beside_images(source, warnings.append)
        second = pair_sources(source, settings.condition, warnings.append)
        stamp, file_bytes = combined_stamp(source, second)
        return cls(
            *(source, settings, columns, stamp, file_bytes, settings.size, settings.channels),
            channels_certain=not is_auto(settings, "channels"),
            ranges=Ranges.of_setting(settings.range, settings.clip) if source.ranges is None else source.ranges,
            warnings=tuple(warnings),
            second=second,
        )

    def read_stamp(self) -> str:
        """Return `stamp` as the sources are now."""
        return combined_stamp(self.source, self.second)[0]

    def with_second(self, progress: Progress | None = None) -> Scan:
        """Decode the second sources at the size of the images, which is resolved. Raises as `second_columns`."""
        warnings = list[str]()
        columns = second_columns(self.second, self.size, warnings.append, progress)
        return replace(self, second_columns=columns, warnings=(*self.warnings, *warnings)) if columns else self

    def resolve(self, began: bool = False) -> Scan:
        """Choose size, channels and ranges of values, where left open, from a sample of images.

        `began` is True for a run that has begun: without `data.range`, its integers keep the range of their type.

        Raises:
            RequestError: most images have values of an unknown range, or many have values beyond a given one.
            RunError: an image cannot be read now.
        """
        if (kept := choose_kept(self.source, self.settings, began)) is not None:
            return self._keeping(kept)
        size, ranges, settings = self.size or _choose_size(self.source), self.ranges, self.settings
        decided = self.source.ranges is not None
        warnings = [] if began or decided or is_auto(settings, "range") else check_range(self.source, ranges)
        # A run on remote shards, some of which may have failed since, has the range of its values in its settings.
        if is_auto(settings, "range") and not (decided or (began and self.source.remote)):
            try:
                ranges = find_ranges(self.source, not began, warn=warnings.append)._replace(clip=settings.clip)
            except RequestError:
                if began or (kept := keep_array(self.source, settings)) is None:
                    raise
                return self._keeping(kept)
            settings = settings if began else replace(settings, range=ranges.setting)
            if began and ranges.floats is not None:
                warnings.append(
                    f"floating point is read by one range of the set, {ranges.floats}; a run from before there was "
                    "data.range read each image by its own range, so images of another range look different now"
                )
        in_colour = ImageFormat.of(colour_channels(True), size)
        format = PixelFormat(in_colour, self.background, ranges)
        channels = self.channels or _guess_channels(self.source, format)
        certain = self.channels_certain or channels == in_colour.channels
        found = replace(self, size=size, channels=channels, channels_certain=certain)
        return replace(found, settings=settings, ranges=ranges, warnings=(*self.warnings, *warnings))

    def _keeping(self, kept: Kept) -> Scan:
        """Return the scan for images that keep their values."""
        settings = replace(self.settings, dtype=kept.dtype, channels=kept.channels)
        warnings = [*self.warnings, *filter(None, [mixed_depths_line(self.source)])]
        if kept.dtype == "uint16" and not settings.range:
            found = find_ranges(self.source, filler=settings.filler, warn=warnings.append)
            settings = replace(settings, range=found.setting[:2])
        size = self.size or _choose_size(self.source)
        scan = replace(self, size=size, channels=kept.channels, settings=settings, warnings=tuple(warnings))
        return replace(scan, channels_certain=True, ranges=Ranges())

    def as_rgb(self) -> Scan:
        """Return the scan for RGB, after an image in colour was found among grey ones."""
        return replace(self, channels=colour_channels(True), channels_certain=True)

    @property
    def all_columns(self) -> dict[str, Column]:
        """`columns` and those of the second sources, in the order of a set."""
        return in_order({**self.columns, **self.second_columns})

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """[N] of the source, an index into `classes`; None without classes."""
        return labels_of(self.columns)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () without classes."""
        return classes_of(self.columns)

    @property
    def resolved_settings(self) -> Data:
        """The settings with nothing left automatic."""
        labels = labels_setting(self.source, self.labels)
        return replace(self.settings, size=self.size, channels=self.channels, labels=labels)

    @property
    def image_format(self) -> ImageFormat:
        """Format of the decoded images, as far as it is known."""
        return replace(self.settings, size=self.size, channels=self.channels).image_format

    @property
    def background(self) -> tuple[int, int, int]:
        return parse_colour(self.settings.background)

    @property
    def format(self) -> PixelFormat:
        """The format for `decode_all`, which raises ColourFoundError where the channels turn out to be wrong."""
        return PixelFormat(self.image_format, self.background, self.ranges, only_grey=not self.channels_certain)

    def check_source_unchanged(self, statistics: DecodeStatistics, start: int, stop: int) -> None:
        """Raise RunError if these rows were skipped because the archive, or most of the files, went away or changed."""
        # Without the check, the run would go on with another, smaller set.
        reasons = [statistics.reasons[row] for row in range(start, stop) if row in statistics.reasons]
        archive = next((reason for reason in reasons if reason in (CHANGED, ARCHIVE_GONE)), "")
        # Single files of a folder may come and go; they are skipped.
        lost = archive or (GONE if 2 * reasons.count(GONE) > stop - start else "")
        if lost and self.read_stamp() != self.stamp:
            raise RunError(
                f"the images in {sanitize(self.source.name)} changed while they were read ({lost}); repeat "
                "the command when nothing writes to them"
            )

    def split_held_out(self) -> tuple[NDArray[np.int64], int]:
        """Return (indices of the training images, then of those held out; number of training images).

        An image is held out if the hash of its name, as a number in [0, 1), is below the fraction in the settings, so
        adding images leaves the others where they are. At most 1,000 are held out, those with the lowest hashes. Of
        several volumes, whole ones are: neighbouring slices are alike.
        """
        return _split_held_out(self.source, self.settings)

    def held_out_indices(self) -> NDArray[np.int64]:
        """Return the sorted indices of the images held out where images are decoded as they are read."""
        source, fraction = self.source, self.settings.held_out
        n = len(source.names)
        if source.held_out is None and source.groups is None and n > _EVEN_SPLIT_FROM:
            count = min(_MAX_HELD_OUT, int(n * fraction))
            return np.arange(count) * n // max(1, count)
        order, in_train = self.split_held_out()
        return np.sort(order[in_train:])

    def report(self, columns: Mapping[str, Column], **outcome: Any) -> DataReport:
        """Return the report on images with these columns. `outcome` holds the fields that the scan does not know."""
        labels, classes = labels_of(columns), classes_of(columns)
        counts = np.bincount([] if labels is None else labels, minlength=len(classes))
        return DataReport(
            source=self.source.name,
            size=self.size,
            channels=self.channels,
            dtype=self.image_format.values.dtype,
            background=self.settings.background,
            values=self.ranges.describe(),
            class_counts={name: int(count) for name, count in zip(classes, counts)},
            ignored=dict(self.source.ignored),
            **outcome,
        )


def _split_held_out(source: Source, settings: Data) -> tuple[NDArray[np.int64], int]:
    """Return the order of the images of a source, and how many of them are for training; see `Scan.split_held_out`."""
    fraction, n = settings.held_out, len(source.names)
    if fraction == 0 or (source.held_out is None and n < MIN_TO_HOLD_OUT):
        return np.arange(n), n
    if (train := source.train_count(fraction)) is not None:
        return np.arange(n), train
    if source.held_out is not None:
        held = np.fromiter((name in source.held_out for name in source.names), np.bool_, n)
    elif source.groups is not None and MIN_GROUPS <= len(source.groups[0]) < n:
        held = _held_groups(*source.groups, min(int(fraction * n), _MAX_HELD_OUT))
    else:
        # Partition finds the limit without sorting a hundred thousand numbers.
        hashes = np.fromiter((_unit_hash(name) for name in _names_to_hash(source.names)), np.float64, n)
        limit = np.partition(hashes, _MAX_HELD_OUT)[_MAX_HELD_OUT] if n > _MAX_HELD_OUT else 1.0
        held = hashes < min(fraction, limit)
    return np.concatenate([np.flatnonzero(~held), np.flatnonzero(held)]), n - int(held.sum())


def _training_rows(source: Source, settings: Data) -> NDArray[np.int64]:
    order, count = _split_held_out(source, settings)
    return order[:count]


def _held_groups(names: Sequence[str], groups: NDArray[np.int64], wanted: int) -> NDArray[np.bool_]:
    """Return True for the images of those groups with the lowest hashes that have about `wanted` images, at least one.

    Args:
        names: name of each group.
        groups: [N] index of the group of each image.
        wanted: images to hold out.
    """
    sizes = np.bincount(groups, minlength=len(names))
    order = sorted(range(len(names)), key=lambda k: _unit_hash(names[k]))
    ends = np.cumsum(sizes[order])
    count = max(1, int(np.searchsorted(ends, wanted, side="right")))
    return np.isin(groups, order[:count])


def _describe_second_names(names: Mapping[str, str]) -> str:
    some = ", ".join(f"{sanitize(second)} is {sanitize(first)}" for second, first in list(names.items())[:3])
    return (
        f"{len(names):,} folder{'s are second names' * (len(names) > 1) or ' is a second name'} of another, whose "
        f"images count once: {some}{', …' * (len(names) > 3)}; copy a folder that is to count twice"
    )


def _names_to_hash(names: Sequence[str]) -> Sequence[str]:
    """Strip from the names their shards and the folders that all share, unless two names would become equal."""
    # So a folder, an archive of it and an archive of its content hold out the same images.
    members = [strip_shard(name) for name in names]
    shared = os.path.commonprefix(members).rfind("/") + 1  # noqa: RUF071  cut to a whole folder
    members = [name[shared:] for name in members]
    return members if len(set(members)) == len(names) else names


def _unit_hash(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _choose_size(source: Source) -> Size:
    """Return the images' own size if all sampled ones have one that is small, else 64, or 32 for small images.

    Where most share a shape that is far from a square, that is the short side, and the long one follows.
    """
    sizes = _sampled_sizes(source)
    if not sizes:
        return 32
    (width, height), aspect = _common_sides(sizes), common_aspect(sizes)
    square = width == height
    # Networks halve it twice.
    if max(width, height) <= 64 and min(width, height) >= 8 and width % 4 == height % 4 == 0 and (square or aspect):
        return size_of(height, width)
    short = 64 if np.median([min(size) for size in sizes]) >= 64 else 32
    if not aspect:
        return short
    return size_of_aspect(short, aspect)


def size_of_aspect(short: int, aspect: float) -> Size:
    """Return a size with this short side, whose width over height is near to `aspect`, though at most _LONGEST / 4."""
    step = max(1, short // 4)  # of the long side, so that networks can halve it as often as the short one, or nearly
    long = min(_LONGEST, round(short * max(aspect, 1 / aspect) / step)) * step
    return size_of(short, long) if aspect > 1 else size_of(long, short)


def common_aspect(sizes: Sequence[tuple[int, int]]) -> float:
    """Return width over height that most images have, within a few percent; 0 if they differ, or are nearly square."""
    aspects = np.log([width / height for width, height in sizes])
    middle = float(np.median(aspects))
    alike = float((np.abs(aspects - middle) <= _ALIKE).mean())
    return math.exp(middle) if alike >= _MOST_ALIKE and abs(middle) >= math.log(_NEARLY_SQUARE) else 0.0


def common_size(source: Source, without: Sequence[str] = ()) -> Size:
    """Return the size of the images if all sampled ones but those of these names have one that is possible, else 0."""
    width, height = _common_sides(_sampled_sizes(source, without))
    return size_of(height, width) if LEAST <= min(width, height) <= max(width, height) <= MOST else 0


def _common_sides(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the width and height that all have; (0, 0) if they differ."""
    return sizes[0] if len(set(sizes)) == 1 else (0, 0)


def _sampled_sizes(source: Source, without: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return width and height of images that are evenly spread over a source."""
    sampled = (i for i in spread(len(source.names), _HEADERS_SAMPLED) if source.names[i] not in without)
    return [sides for i in sampled if (sides := _sides_of(source, i)) is not None]


def _sides_of(source: Source, i: int) -> tuple[int, int] | None:
    """Return width and height of image i; None if it is not a usable image. RunError if it cannot be read now."""
    try:
        sides = read_size(partial(source.read_image, i))
        source.outage.last_read = i
        return sides
    except (TransientImageError, MissingImageError):  # retried, as the images without it could have another size
        with suppress(ImageError):
            _, info = decode_with_retries(source, i, PixelFormat(ImageFormat(1, 8, 8), (0, 0, 0)))
            return info.width, info.height
    except ImageError:
        pass
    return None


def read_sides(source: Source, progress: Progress | None = None) -> NDArray[np.int32]:
    """Return width and height of each image, [N, 2]; 0 of one that is not usable. It reads all heads.

    `progress` is called with (images done, images in all). RunError if an image cannot be read now.
    """
    n = len(source.names)
    sides = np.zeros((n, 2), np.int32)
    for i in range(n):
        sides[i] = _sides_of(source, i) or 0
        if progress and i % _HEADERS_SAMPLED == 0:
            progress(i, n)
    return sides


def _guess_channels(source: Source, format: PixelFormat) -> int:
    """Return the channels of images in colour if one of the sample is, else of grey ones."""
    for i in spread(len(source.names), COLOURS_SAMPLED):
        try:
            _, info = decode_with_retries(source, i, format)
        except ImageError:
            continue
        if not info.grey:
            return colour_channels(True)
    return colour_channels(False)


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """Columns, split and report of a source after all of it was decoded."""

    columns: Mapping[str, Column]
    """Columns of the K images used, in the order of `rows`."""
    rows: NDArray[np.int64]
    """[K], index in the source of each image used; the training images first."""
    train: int
    """Number of training images."""
    records: NDArray[np.void]
    """[K] of INFO_DTYPE."""
    report: DataReport

    @classmethod
    def create(cls, scan: Scan, order: NDArray[np.int64], in_train: int, statistics: DecodeStatistics) -> DecodeResult:
        """Collect the result for images in this order, of which the first `in_train` are training images.

        Raises NoUsableImageError if none of them can be used.
        """
        used, source = statistics.used, scan.source
        if not used.any():
            counted = ", ".join(f"{n:,} {why}" for why, n in Counter(statistics.reasons.values()).most_common(3))
            named = any(UNKNOWN_REMEDY in why for why in statistics.reasons.values())  # data.unknown, for NaN
            remedy = "give that setting, or replace them" if named else "replace them"
            raise NoUsableImageError(f"none of {plural(len(used))} in {source.name} can be used: {counted}; {remedy}")
        rows, records = order[used], statistics.records[used]
        columns = rows_of(scan.all_columns, rows)
        if (labels := labels_of(columns)) is not None:  # a class without a usable image is dropped
            present, labels = np.unique(labels, return_inverse=True)
            columns |= of_labels(labels.astype(np.int64, copy=False), tuple(scan.classes[i] for i in present))
        train = int(used[:in_train].sum())
        skipped = [SkippedFile(source.names[order[row]], reason) for row, reason in statistics.reasons.items()]
        report = scan.report(
            columns,
            found=len(order),
            used=len(rows),
            held_out=len(rows) - train,
            sides=side_statistics(records["sides"]),
            modes=dict(statistics.modes),
            unused_pages=statistics.unused_pages,
            treatments=tuple(statistics.treatments),
            treatment=np.ascontiguousarray(records["treatment"]),
            skipped=tuple(sorted([*skipped, *source.unreadable])),
        )
        return cls(columns, rows, train, records, report)

    @property
    def sides(self) -> NDArray[np.int32]:
        """[K, 2], width and height of each upright original."""
        return np.ascontiguousarray(self.records["sides"])

    @property
    def grey(self) -> NDArray[np.bool_]:
        """[K], True if all channels of the original are equal."""
        return np.ascontiguousarray(self.records["grey"])


def side_statistics(sides: NDArray[np.int32]) -> dict[str, int]:
    """Return the least, the median and the largest shortest and longest side of images [N, 2]."""
    ordered = np.sort(sides, axis=1)
    found = {"min": ordered.min(0), "median": np.median(ordered, 0), "max": ordered.max(0)}
    columns = enumerate(("shortest", "longest"))
    return {f"{side}_{name}": int(values[k]) for k, side in columns for name, values in found.items()}


def read_size(opener: Opener) -> tuple[int, int]:
    """Read (width, height) of the upright image, without decoding its pixels. Raises ImageError."""
    try:
        with opener() as image:
            return upright_sides(image)
    except Exception as error:
        raise image_error(error) from error
