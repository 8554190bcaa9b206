"""Prepare a source: make the dataset from a pack, from the cache, or by decoding it now or while training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Literal

from PIL import Image

from unfog.data import cache
from unfog.data.cache import free_bytes
from unfog.data.columns.conditions import select_conditions
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.decode import parse_colour
from unfog.data.decode_pool import ColourFoundError, DecodeStatistics, Progress, decode_all
from unfog.data.lazy import lazy_dataset
from unfog.data.scan import DecodeResult, Scan
from unfog.data.settings import UNREAD, Data
from unfog.data.sources.base import Source
from unfog.data.sources.labels import labels_setting
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, cache_limit, fits_limit
from unfog.files.safe_files import disk_usage
from unfog.files.work_folder import work_folders
from unfog.settings import AUTO, is_auto
from unfog.text import format_bytes

# cache = auto keeps images in memory up to these sizes, as decoding them anew for each command takes about a second.
_MEMORY_FILES = 10_000
_MEMORY_FILE_BYTES = 8 * 2**20
_MEMORY_PIXEL_BYTES = 256 * 2**20

Placement = Literal["memory", "disk", "none"]


def prepare(
    source: Source, settings: Data, progress: Progress | None = None, to_draw: int = 0, known: str = ""
) -> Dataset:
    """Make a dataset of a source's images: opened from a pack or the cache, decoded now, or decoded while training.

    Args:
        source: where the images are. The official split of a built-in set is kept unless `held_out` is 0.
        settings: how to decode them.
        progress: called with (images done, images in all). It starts again should an image in colour turn up late
            among grey ones.
        to_draw: number of images that training will draw; 0 if unknown.
        known: fingerprint of the training images that a run began with; "" for a new run.

    Raises:
        RequestError: no image can be used; a setting does not fit the source; the cache cannot be written, or is not
            of the kind that the run began with.
        RunError: the disk is full or fails; the images disappeared or changed while they were read.
    """
    parse_colour(settings.background)
    if (decoded := source.decoded_dataset(settings)) is not None:
        return select_conditions(decoded, settings)
    scan, key = scan_source(source, settings)
    with_labels = replace(settings, labels=labels_setting(scan.source, scan.labels))
    unread = known.startswith(UNREAD)
    # Before the scan is resolved, which opens images: an entry knows their size and channels.
    may_reuse = settings.cache in (AUTO, "disk") and not unread
    entry = cache.load(key) if may_reuse else None
    # Without `range`, an entry is by the types of its values, as in a run that began without it.
    if entry and (known or not is_auto(settings, "range") or not entry.report.has_deep_images):
        return replace(entry.dataset(with_labels, source.name), warnings=scan.warnings)
    with silence_pillow():
        # Before the sample is read, so that it is not fetched a second time.
        kept = _cache_remote_reads(source) if settings.cache == "none" else ""
        scan = scan.resolve(began=bool(known))
        with_labels = replace(with_labels, range=scan.settings.range)
        key = cache.entry_key(scan, scan.settings)
        if may_reuse and (entry := cache.load(key)):
            return replace(entry.dataset(with_labels, source.name), warnings=scan.warnings)
        scan = scan.with_second(progress)
        where, why = choose_placement(scan, key, to_draw, known)
        if where == "none":
            dataset = lazy_dataset(scan)
            why = "; ".join(filter(None, (why, kept or _cache_remote_reads(source))))
        elif where == "disk":
            dataset = cache.make(scan, key, progress).dataset(with_labels, source.name)
        else:
            dataset = _decode_into_memory(scan, progress)
    return replace(dataset, placement=why, warnings=scan.warnings)


def _cache_remote_reads(source: Source) -> str:
    """Keep what is read of remote shards, for later epochs. Return a line that says so; "" if nothing is kept."""
    return "" if source.remote_shards is None else source.remote_shards.enable_cache()


def scan_source(source: Source, settings: Data) -> tuple[Scan, str]:
    """Return (the scan of a source, not resolved yet; the key of its entry in the cache). Raises as `Scan.create`."""
    scan = Scan.create(source, settings)
    return scan, cache.entry_key(scan, scan.settings)


def _decode_into_memory(scan: Scan, progress: Progress | None) -> Dataset:
    order, in_train = scan.split_held_out()
    statistics, done, rows = DecodeStatistics.empty(len(order)), 0, 0
    pixels = scan.image_format.empty_stored(len(order))
    try:
        # Closed whatever happens, or its threads would go on decoding.
        with closing(decode_all(scan.source, order, scan.format, statistics, progress)) as chunks:
            for stop, images in chunks:
                scan.check_source_unchanged(statistics, done, stop)
                done = stop
                pixels[rows : rows + len(images)] = images
                rows += len(images)
    # From the beginning, as images that were decoded as grey have lost their colours.
    except ColourFoundError:
        return _decode_into_memory(scan.as_rgb(), progress)
    result = DecodeResult.create(scan, order, in_train, statistics)
    names = tuple(scan.source.names[i] for i in result.rows)
    decoded = ImageSet(pixels[:rows], names, result.columns, sides=result.sides, grey=result.grey)
    return Dataset.split(decoded, result.train, scan.resolved_settings, result.report)


def choose_placement(scan: Scan, key: str, to_draw: int = 0, known: str = "") -> tuple[Placement, str]:
    """Return (where decoded images are kept, "none" for nowhere; the reason, where it was chosen automatically).

    The other arguments are those of `prepare`; the scan is resolved, and `key` that of its entry in the cache.
    RequestError if images would not be decoded as in the run so far.
    """
    return _placement_on_resume(scan, key, known.startswith(UNREAD)) if known else _placement(scan, key, to_draw)


def _placement_on_resume(scan: Scan, key: str, unread: bool) -> tuple[Placement, str]:
    """Return `_placement` for a resume. Raises RequestError if images would not be decoded as in the run so far."""
    # The fingerprint of undecoded images is of another kind, so the two could not be compared.
    if unread and is_auto(scan.settings, "cache"):
        return "none", ""
    where, why = _placement(scan, key, to_draw=0)
    if unread == (where == "none"):
        return where, why
    why = why or f"cache = {scan.settings.cache}"
    began = "decodes images during training" if unread else "decoded all images before training"
    remedy = "cache = auto" if unread else "cache = auto, with UNFOG_CACHE in a folder with enough space"
    raise RequestError(
        f"the run {began}, so these images cannot be compared with its own; resume with {remedy} ({why})"
    )


def _placement(scan: Scan, key: str, to_draw: int) -> tuple[Placement, str]:
    """Return ("memory", "disk" or "none"; the reason, where it was chosen automatically).

    A small set stays in memory. A larger one is packed into the cache if that takes at most half of the free space and
    most images will be drawn. Otherwise each image is decoded when it is drawn.
    """
    if scan.settings.cache != AUTO:  # not `is_auto`, which narrows no type
        return scan.settings.cache, ""
    n = len(scan.source.names)
    pixel_bytes = n * scan.image_format.nbytes
    if n <= _MEMORY_FILES and scan.file_bytes <= _MEMORY_FILE_BYTES and pixel_bytes <= _MEMORY_PIXEL_BYTES:
        return "memory", ""
    each, folder = "images are decoded during training", cache_folder()
    remedy = "`unfog pack SOURCE OUT` decodes them once, on any disk"
    if scan.source.in_place and not scan.image_format.is_picture:
        return "none", f"images are read from {scan.source.name} in place, and checked as they are read"
    # Less than half of a set is drawn: decoding all of it would cost more than it saves.
    if to_draw and 2 * to_draw < n:
        return "none", (
            f"{each}, as this run needs {to_draw:,} of {n:,}; --data.cache disk decodes all of them once, for "
            "later runs too"
        )
    free, decoded = free_bytes(), f"{format_bytes(pixel_bytes)} decoded"
    if free is None:
        if pixel_bytes < 4 * _MEMORY_PIXEL_BYTES:
            return "memory", f"{decoded}, in memory, as the cache in {folder} cannot be written"
        return "none", f"{each}, as the cache in {folder} cannot be written; {remedy}"
    if not fits_limit(pixel_bytes, keep=folder / key):
        limit = f"{decoded} are more than the {cache_limit() / 1e9:,.3g} GB that the cache may hold (UNFOG_CACHE_LIMIT)"
        return "none", f"{each}: {limit}; {remedy}"
    begun = sum(map(disk_usage, (folder / key, *work_folders(folder / key))))  # an interrupted pack is finished
    if 2 * pixel_bytes <= free + begun:
        return "disk", f"decoded once, for all runs: {decoded}, in {folder}"
    half = f"{decoded} are more than half of the {format_bytes(free)} free in {folder}"
    return "none", f"{each}: {half}; {remedy}"


@contextmanager
def silence_pillow() -> Iterator[None]:
    """Suppress Pillow's warnings about odd files, but make that of a decompression bomb an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Pillow only warns up to twice its limit, and decodes; a small file could then take gigabytes.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
