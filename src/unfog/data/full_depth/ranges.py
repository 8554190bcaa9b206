"""Find or check the ranges of the images deeper than 8 bits of a source, in a sample of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from unfog.data.bit_depth import FULL_RANGE, Extent, Ranges, ValueRange, extent_of, is_deep, outward, without_alpha
from unfog.data.decode import Opener, read_deep
from unfog.data.decode_pool import with_retries
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.image_files import image_error
from unfog.errors import RequestError
from unfog.text import sanitize
from unfog.values.unknown import find_unknown

# Images, evenly spread, whose headers say whether values are deeper than 8 bits; of a network, a read each.
_RANGES_SAMPLED, _RANGES_SAMPLED_REMOTE = 256, 64
_USED = 0.8  # share of the range of integers, below which the largest of them is said
_MANY_BEYOND = 0.05  # share of images, or of values to cut, beyond a given range from which on that is said
_VALUES_READ, _FEWEST_VALUES_READ = 64_000_000, 16  # pixels of those that are, and at least so many images

T = TypeVar("T")


def find_ranges(
    source: Source,
    integers: bool = True,
    filler: float | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> Ranges:
    """Find the ranges of the images deeper than 8 bits in a sample, whose headers are read first.

    Without `integers`, these keep the range of their type. Values that are equal to `filler` are unknown, and left out.
    `warn` is called with a line if integers use little of the range that was found.

    RequestError if most images have values of an unknown range, RunError if an image cannot be read now.
    """
    extents: dict[bool, list[Extent]] = {True: [], False: []}  # of floating point, and of integers
    for values in _deep_values(source):
        if filler is not None:
            values = values[~find_unknown(values, filler)]
        if (extent := extent_of(values)) is not None:
            extents[values.dtype.kind == "f"].append(extent)
    name = sanitize(source.name)
    floats = ValueRange.of_floats(extents[True], name) if extents[True] else None
    whole = ValueRange.of_integers(extents[False], name) if extents[False] and integers else None
    if whole is not None and (line := _unused_line(whole, max(high for _, high in extents[False]), floats)):
        warn(f"{name} has {line}")
    # The range of the type needs no setting, unless one of floating point would hold for both.
    return Ranges(None if whole == FULL_RANGE and floats is None else whole, floats)


def _unused_line(found: ValueRange, most: float, floats: ValueRange | None) -> str:
    """Return a line if the largest integer `most` is far below the range of its bits; else ""."""
    if not 0 < most < _USED * found.high:
        return ""
    setting = Ranges(ValueRange(*outward(0, most)), floats).setting
    return (
        f"integers up to {most:,.0f}, which use {most / found.high:.0%} of the range {found}; if that is the sensor's "
        f"largest value, give --data.range {' '.join(f'{value:.10g}' for value in setting)}"
    )


def check_range(source: Source, ranges: Ranges) -> list[str]:
    """Compare the values of a sample with ranges that were given. Return warnings.

    RequestError if many images have values beyond them, which are not to be cut; RunError if one cannot be read now.
    """
    extents, beyond, cut, every = list[Extent](), 0, 0, 0
    for values in map(without_alpha, _deep_values(source)):
        own, extent, floating = ranges.of(values), extent_of(values), values.dtype.kind == "f"
        if own is not None and extent is not None:
            extents.append(extent)
            every += values.size
            if not own.holds(extent, floating):
                beyond += 1
                cut += int(((values < own.low) | (values > own.high)).sum())
    given, name = " ".join(f"{value:g}" for value in ranges.setting), sanitize(source.name)
    if ranges.clip:
        share = cut / max(1, every)
        said = f"{share:.1%} of the values of {name} are beyond data.range = {given}, and are cut at its ends"
        return [f"{said}; a wider range keeps their differences"] if share > _MANY_BEYOND else []
    if beyond > max(1, _MANY_BEYOND * len(extents)):
        least, most = min(low for low, _ in extents), max(high for _, high in extents)
        low, high = outward(least, most)
        raise RequestError(
            f"{beyond:,} of {len(extents):,} images of {name} that were looked at have values beyond data.range = "
            f"{given}: they are from {least:.4g} to {most:.4g}; give --data.range {low:.10g} {high:.10g}, or "
            "--data.clip to cut values at the ends of the range"
        )
    return []


def _deep_values(source: Source) -> Iterator[NDArray[Any]]:
    """Yield the values of the images deeper than 8 bits in a sample, whose headers are read first."""
    deep = list[tuple[int, int]]()  # (image, its pixels)
    for i in spread(len(source.names), _RANGES_SAMPLED_REMOTE if source.remote else _RANGES_SAMPLED):
        with suppress(ImageError):
            if pixels := _read_now(source, i, _deep_pixels):
                deep.append((i, pixels))
    most = max(_FEWEST_VALUES_READ, _VALUES_READ // max((pixels for _, pixels in deep), default=1))
    for k in spread(len(deep), most):
        with suppress(ImageError):
            yield _read_now(source, deep[k][0], read_deep)


def _deep_pixels(opener: Opener) -> int:
    """Return the number of pixels of an image whose values are deeper than 8 bits, else 0. Reads its header alone."""
    with opener() as image:
        # Grey of 12 bits in a TIFF is scaled by its own type.
        return image.size[0] * image.size[1] if is_deep(image) and ";12" not in str(getattr(image, "tile", "")) else 0


def _read_now(source: Source, i: int, read: Callable[[Opener], T]) -> T:
    """Call `read` for image i. Raises ImageError, and RunError if it cannot be read now, after retries.

    Of remote shards one may be out of reach, without which a run can begin: an image there is not tried again.
    """

    def attempt() -> T:
        try:
            return read(partial(source.read_image, i))
        except Exception as error:
            raise image_error(error) from error

    return attempt() if source.remote else with_retries(attempt, source, i)


def spread(n: int, count: int) -> range:
    """Return at most `count` evenly spread indices of 0 … n - 1."""
    return range(0, n, max(1, -(-n // count)))
