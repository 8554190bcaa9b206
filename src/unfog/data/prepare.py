"""From a source to images of one size: mapped, decoded at once, or decoded as training asks for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
from PIL import Image

from unfog.data import cache
from unfog.data.dataset import Dataset, ImageSet, split
from unfog.data.decode import colour
from unfog.data.decode_pool import ColourFoundError, DecodeStatistics, Progress, decode_all
from unfog.data.lazy import UNREAD, lazy_dataset, remote_shards_of
from unfog.data.packs.pack import PackSource
from unfog.data.scan import DecodeResult, Scan, split_held_out
from unfog.data.settings import Data
from unfog.data.sources.base import Source
from unfog.data.sources.label_tables import apply_label_table
from unfog.data.sources.label_tables import labels_setting as settled_labels
from unfog.data.sources.labels import read_labels
from unfog.errors import RequestError

MEMORY_FILES = 10_000
MEMORY_FILE_BYTES = 64 * 2**20
MEMORY_PIXEL_BYTES = 256 * 2**20
"""cache = auto keeps images in memory while there are no more of them than this, their files together and their pixels
no larger, so that decoding takes seconds. Of larger sets it keeps a pack in the cache, if that takes at most half of
the room there is (with what is begun of it) and most of the images will be drawn; else it decodes each image when its
turn comes. Where no cache can be written, it stays in memory up to four times the pixels."""


def prepare(
    source: Source, settings: Data, progress: Progress | None = None, wanted: int = 0, known: str = ""
) -> Dataset:
    """The images of a source under these settings: of a pack as they are; else found in the cache, or decoded.

    A built-in set keeps its own split into training and held-out images, unless `held_out` is 0.

    Args:
        source: where the images are.
        settings: what to make of them.
        progress: called with (images done, images in all) now and then, from the calling thread, where it may raise
            to stop; it starts again should an image in colour turn up late among grey ones.
        wanted: how many images training will draw; 0 if that is not known.
        known: fingerprint of the images as a run began with them; "" for a new one. It will compare only with one of
            its kind: of images that were decoded, or of a source whose images are decoded when their turn comes.

    Raises:
        RequestError: no image can be used; a setting does not fit the source; the cache cannot be written, or is not
            of the kind that the run began with.
        RunError: the disk is full, or refuses; the images went away or were changed as they were read.
    """
    colour(settings.background)
    if isinstance(source, PackSource) and (dataset_if_fitting := source.dataset_if_fitting(settings)) is not None:
        return dataset_if_fitting
    scan, key = scan_source(source, settings)
    asked = replace(settings, labels=settled_labels(scan.source, scan.labels))
    unread = known.startswith(UNREAD)
    if settings.cache in ("auto", "disk") and not unread and (found := cache.load(key)):
        return replace(found.prepared(asked, source.name), warnings=scan.warnings)
    with silence_pillow():
        scan = scan.resolve()
        where, why = _place_as_begun(scan, key, unread) if known else _place(scan, key, wanted)
        if where == "none":
            prepared = lazy_dataset(scan)
            shards = remote_shards_of(prepared.train)
            why = "; ".join(filter(None, (why, shards.enable_cache() if shards is not None else "")))
        elif where == "disk":
            prepared = cache.make(scan, key, progress).prepared(asked, source.name)
        else:
            prepared = _in_memory(scan, progress)
    return replace(prepared, placement=why, warnings=scan.warnings)


def scan_source(source: Source, settings: Data) -> tuple[Scan, str]:
    """(the source with its labels, not sampled yet; the key of what it will be decoded to).

    Raises:
        RequestError: a setting does not fit the source.
    """
    if isinstance(source, PackSource):
        settings = source.with_pack_defaults(settings)
    left_out: list[str] = []
    source = apply_label_table(source, settings.labels, left_out.append)
    classes, labels = read_labels(source, settings.labels)
    scan = replace(Scan.of(source, settings, classes, labels), warnings=tuple(left_out))
    return scan, cache.entry_key(scan.stamp, settings, classes, labels)


def _in_memory(scan: Scan, progress: Progress | None) -> Dataset:
    order, in_train = split_held_out(scan.source, scan.settings.held_out)
    tally, done, rows = DecodeStatistics.of(len(order)), 0, 0
    pixels = np.empty((len(order), scan.channels, scan.size, scan.size), np.uint8)
    chunks = decode_all(
        *(scan.source, order, scan.channels, scan.size, scan.background, tally),
        only_grey=not scan.channels_certain,
        progress=progress,
    )
    try:
        with closing(chunks):
            for stop, images in chunks:
                scan.check_source_unchanged(tally, done, stop)
                done = stop
                pixels[rows : rows + len(images)] = images
                rows += len(images)
    except ColourFoundError:
        return _in_memory(scan.as_rgb(), progress)
    account = DecodeResult.of(scan, order, in_train, tally)
    names = tuple(scan.source.names[i] for i in account.rows)
    sides, grey = np.ascontiguousarray(account.facts["sides"]), np.ascontiguousarray(account.facts["grey"])
    whole = ImageSet(pixels[:rows], account.labels, names, account.classes, sides=sides, grey=grey)
    return split(whole, account.train, account.settings, account.report)


def _place_as_begun(scan: Scan, key: str, unread: bool) -> tuple[str, str]:
    """As `_place`, for a run that goes on and whose images nobody had looked at, or else were decoded all.

    Raises:
        RequestError: its images would be decoded in another way than when it began.
    """
    if unread and scan.settings.cache == "auto":
        return "none", ""
    where, why = _place(scan, key, wanted=0)
    if unread == (where == "none"):
        return where, why
    why = why or f"cache = {scan.settings.cache}"
    began = "decodes each image when its turn comes" if unread else "began with all images decoded"
    remedy = "cache = auto" if unread else "cache = auto, and UNFOG_CACHE a folder with room enough"
    raise RequestError(
        f"the run {began}, and it would not be known whether these are the same; go on with {remedy} ({why})"
    )


def _place(scan: Scan, key: str, wanted: int) -> tuple[str, str]:
    """(memory, disk or none, and why in a line where that was left open and is worth a word)."""
    n = len(scan.source.names)
    pixel_bytes = n * scan.channels * scan.size**2
    small = n <= MEMORY_FILES and scan.file_bytes <= MEMORY_FILE_BYTES and pixel_bytes <= MEMORY_PIXEL_BYTES
    if scan.settings.cache != "auto":
        return scan.settings.cache, ""
    if small:
        return "memory", ""
    each = "images are decoded when their turn comes"
    remedy = "`unfog pack SOURCE OUT` decodes them once, to wherever there is room"
    if wanted and 2 * wanted < n:
        return (
            "none",
            f"{each}, as this run draws {wanted:,} of {n:,}; --data.cache disk decodes all, for later runs",
        )
    room, gigabytes = cache.room(), f"{pixel_bytes / 1e9:,.1f} GB decoded"
    if room is not None and 2 * pixel_bytes <= room + cache.held(cache.cache_folder() / key):  # of an interrupted pack
        return "disk", f"decoded once, for all runs: {gigabytes}, in {cache.cache_folder()}"
    if room is None and pixel_bytes < 4 * MEMORY_PIXEL_BYTES:
        return "memory", f"{gigabytes}, in memory, as the cache in {cache.cache_folder()} cannot be written"
    if room is None:
        return "none", f"{each}, as the cache in {cache.cache_folder()} cannot be written; {remedy}"
    half = f"{gigabytes} are more than half of the {room / 1e9:,.1f} GB free in {cache.cache_folder()}"
    return "none", f"{each}: {half}; {remedy}"


@contextmanager
def silence_pillow() -> Iterator[None]:
    """What Pillow finds odd in a file concerns nobody who gets to see the image or the reason why not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # It only warns of an image too large to be decoded safely; here it is refused.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
