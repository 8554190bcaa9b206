"""Pixels of the playground: uploads, sheets of pictures, a map of disagreement, and edits at the size of a run."""

from __future__ import annotations

import io
import itertools
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import PngImagePlugin

from unfog.data.buckets.sizes import nearest_size
from unfog.data.decode import decode, parse_colour
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_bytes
from unfog.errors import RequestError
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.drawing import Drawing
from unfog.serve.run_files import decode_picture, read_settings
from unfog.serve.run_files import webp as encode_webp
from unfog.values.buckets import parse_buckets
from unfog.values.image_format import CHANNELS, ImageFormat, parse_size, to_pillow

_EMPTY = 128  # grey, of a picture that has not begun
_KEPT, _MOST_PIXELS, _MOST_TEXT = 24, 2**24, 2**16


def sheet(pictures: Sequence[Pixels | None], columns: int = 0) -> bytes:
    """Return pictures uint8 [H, W, C] side by side without gaps, as lossless WebP; None is grey.

    `columns` is by default the square root of their number, rounded up.
    """
    shown = next(one for one in pictures if one is not None)
    height, width = shown.shape[:2]
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = -(-len(pictures) // columns)
    body = np.full((rows * height, columns * width, shown.shape[2]), _EMPTY, np.uint8)
    for i, picture in enumerate(pictures):
        if picture is not None:
            y, x = i // columns * height, i % columns * width
            body[y : y + height, x : x + width] = picture
    return webp(body)


def step_sheet(job: Drawing, number: int, guess: bool) -> bytes | None:
    """Return the sheet of a step, or of the last step that is kept before it; None before the first.

    A picture that has not come so far yet is shown as it is.
    """
    kept = [at for at in sorted(job.steps) if at <= number]  # a copy first: steps arrive meanwhile
    if not kept:
        return None
    tiles: dict[int, Pixels] = {}
    for at in kept:
        step = job.steps[at]
        tiles |= (step.guess if guess else step.noisy).copy()
    return sheet([tiles.get(i) for i in range(job.request.n)])


def webp(pixels: Pixels) -> bytes:
    """Encode uint8 [H, W, 1 or 3] as lossless WebP."""
    return encode_webp(to_pillow(pixels), "the picture", lossless=True, method=0)


def disagreement(pictures: Pixels) -> Pixels:
    """Return where pictures [N, H, W, C] differ, [H, W, 1]: their standard deviation, 255 where it is largest."""
    spread = pictures.astype(np.float32).std(0).mean(2, keepdims=True)
    bright: Pixels = (255 * spread / max(float(spread.max()), 1.0)).round().astype(np.uint8)
    return bright


def npy(values: bytes, facts: Sequence[Any]) -> bytes:
    """Return a .npy file of values [N, H, W, C]; `facts` are their type and shape."""
    kind, *shape = facts
    file = io.BytesIO()
    np.save(file, np.frombuffer(values, np.dtype(str(kind))).reshape([int(length) for length in shape]))
    return file.getvalue()


def format_for(run: Path, pixels: Pixels) -> ImageFormat:
    """Return the format in which a run draws from an image [H, W, C]: of its bucket whose shape is nearest, if any.

    RequestError if the configuration of the run does not have it.
    """
    settings = read_settings(run)
    size, channels, buckets = (settings.get(name) for name in ("data.size", "data.channels", "buckets"))
    # A program of somebody else may have written it: an image of that size is made.
    with suppress(RequestError):
        if buckets and isinstance(buckets, list):
            sizes = [bucket.size for bucket in parse_buckets([str(each) for each in buckets])]
            size = nearest_size(sizes, pixels.shape[1], pixels.shape[0])
        if size and channels in CHANNELS:
            return ImageFormat.of(int(channels), parse_size(size))
    if size and isinstance(channels, int):
        raise RequestError(f"drawings that start from a picture need 1 or 3 channels, and this run has {channels}")
    raise RequestError("config.toml of this run is missing, damaged, or has no size and channels")


def at_run_size(pixels: Pixels, format: ImageFormat) -> Pixels:
    """Return an image [H, W, C] as training images of a run are prepared: resized and cropped to [H', W', C']."""
    try:
        prepared: Pixels = decode(lambda: to_pillow(pixels), format, parse_colour("white"))[0]
    except ImageError as error:
        raise RequestError(f"the image cannot be used: {error}") from None
    return np.ascontiguousarray(prepared.transpose(1, 2, 0))


class _Upload(NamedTuple):
    """An uploaded picture, and the settings that are stored in its file."""

    data: bytes
    """The file."""
    width: int
    height: int
    settings: dict[str, Any] | None
    """What Unfog has written into it: version, run, number of the picture, settings. Not checked yet."""

    @property
    def pixels(self) -> Pixels:
        """The picture, uint8 [H, W, 3]."""
        return np.asarray(decode_picture(self.data, "the upload"))


class Uploads:
    """The newest uploads by number. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Upload] = OrderedDict()
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    def __getitem__(self, number: int) -> _Upload:
        """Return an upload. RequestError if it is not there any more."""
        try:
            return self._kept[number]
        except KeyError:
            raise RequestError("this upload is not there any more; upload the picture again") from None

    def add(self, data: bytes) -> tuple[int, _Upload]:
        """Decode a picture. RequestError if it cannot be decoded, or has too many pixels."""
        settings = _read_settings(data)
        image = decode_picture(data, "the upload")
        if image.width * image.height > _MOST_PIXELS:
            raise RequestError(f"the upload has over {_MOST_PIXELS / 1e6:.0f} megapixels; make it smaller")
        upload = _Upload(data, image.width, image.height, settings)
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = upload
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return number, upload


def _read_settings(data: bytes) -> dict[str, Any] | None:
    """Return the settings that were written into a PNG by the playground; None without any."""
    with suppress(Exception):  # a stranger's file; `decode_picture` says what is wrong with it
        image = open_bytes(data, "the upload")
        text = image.text.get("Unfog", "") if isinstance(image, PngImagePlugin.PngImageFile) else ""
        if 0 < len(text) < _MOST_TEXT:
            found = json.loads(text)
            if isinstance(found, dict) and isinstance(found.get("settings"), dict):
                return {name: found.get(name) for name in ("unfog", "run", "picture", "settings")}
    return None
