"""All channels of a preview in one grey PNG, from which the page and the report make any view."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.files.safe_files import read_file
from unfog.reporting.image_grids import Pixels, decode_png, encode_png
from unfog.text import sanitize
from unfog.values.colour_map import COLOUR_MAPS, GREY, anchors_of
from unfog.values.image_format import MOST_CHANNELS

FOLDER = "channels"
"""Folder of a run that has the sheets, by step."""
_KEYWORD = "Channels"  # of the text in the PNG
_MOST_PIXELS = 2**22  # of a sheet; channels of larger ones are made smaller
_LARGEST = 2**24  # bytes of a file
_MOST_IMAGES, _MOST_CAPTIONS, _LONGEST = 4096, 20, 60


def encode_channels(
    planes: Pixels,
    ends: Sequence[Sequence[float]],
    captions: Sequence[str] = (),
    known: NDArray[np.bool_] | None = None,
) -> bytes:
    """Return a PNG of channels uint8 [N, C, H, W] side by side, image by image, with what a page needs to show them.

    Args:
        planes: 0 to 255 are model values of -1 to 1.
        ends: [C, 3] stored values of each channel at -1, 0 and 1.
        captions: of the columns of a grid of the images; () without.
        known: [N, C, H, W], which values are known; the others are transparent. None if all are.
    """
    parts = planes[..., None] if known is None else np.stack([planes, np.where(known, 255, 0).astype(np.uint8)], -1)
    count, channels, height, width = planes.shape
    factor = math.ceil(math.sqrt(planes.size / _MOST_PIXELS))
    if factor > 1:
        parts = _reduced(parts, min(factor, height, width))
    *_, h, w, depth = parts.shape
    columns = math.ceil(math.sqrt(count * channels * h / w))
    rows = -(-count * channels // columns)
    tiles = np.zeros((rows * columns, h, w, depth), np.uint8)
    tiles[: count * channels] = parts.reshape(-1, h, w, depth)
    sheet = tiles.reshape(rows, columns, h, w, depth).transpose(0, 2, 1, 3, 4).reshape(rows * h, columns * w, depth)
    facts = {"images": count, "channels": channels, "height": h, "width": w, "columns": columns}
    words = {"ends": [[f"{x:.4g}" for x in values] for values in ends], "captions": list(captions)}
    return encode_png(sheet, {_KEYWORD: json.dumps({**facts, **words})})


def read_channels(path: Path, root: Path) -> dict[str, Any] | None:
    """Return `decode_channels` of a sheet in a run folder; also None if the file is missing or a link."""
    with suppress(OSError, ValueError):
        return decode_channels(read_file(path, root, _LARGEST))
    return None


def decode_channels(data: bytes) -> dict[str, Any] | None:
    """Return a sheet and the facts that a page shows it by; None if it is damaged.

    The result has `images`, `channels`, `height`, `width` and `columns` of tiles, `ends` and `captions`, `maps` with
    colours in hexadecimal at equal distances by name, and `picture`, a `data:` URI of the sheet, encoded anew. Unknown
    values are transparent in it.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        image: Any = decode_png(data)
        facts = _checked(json.loads(image.text[_KEYWORD]), image.size)
        pixels = image.convert("LA" if image.mode == "LA" else "L")
        picture = base64.b64encode(encode_png(np.asarray(pixels))).decode()
        maps = {name: list(anchors_of(name)) for name in COLOUR_MAPS if name != GREY}
        return {**facts, "maps": maps, "picture": f"data:image/png;base64,{picture}"}
    return None


def _checked(given: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Return the facts of a sheet. ValueError if they are not those of a picture of this (width, height)."""
    facts = {name: int(given[name]) for name in ("images", "channels", "height", "width", "columns")}
    count, channels, height, width, columns = facts.values()
    if min(facts.values()) < 1 or count > _MOST_IMAGES or channels > MOST_CHANNELS:
        raise ValueError("not the size of a sheet")
    if size != (columns * width, -(-count * channels // columns) * height):
        raise ValueError("a sheet of another size")
    ends = [[sanitize(str(x))[:_LONGEST] for x in values] for values in given["ends"]]
    if len(ends) != channels or any(len(values) != 3 for values in ends):
        raise ValueError("values of other channels")
    captions = [sanitize(str(text))[:_LONGEST] for text in given["captions"][:_MOST_CAPTIONS]]
    return {**facts, "ends": ends, "captions": captions}


def _reduced(parts: Pixels, factor: int) -> Pixels:
    """Return the means of squares of `factor` pixels; what remains at the right and below is left out.

    `parts` [N, C, H, W, 1] are values, or [N, C, H, W, 2] values and 255 where they are known. The means are of known
    values, and known if one of them is.
    """
    count, channels, height, width, depth = parts.shape
    h, w = height // factor, width // factor
    cut = parts[:, :, : h * factor, : w * factor].reshape(count, channels, h, factor, w, factor, depth)
    if depth == 1:
        return _bytes(cut.mean((3, 5), dtype=np.float32))
    known = cut[..., 1] > 0
    shares = known.mean((3, 5), dtype=np.float32)
    means = np.where(known, cut[..., 0], 0).mean((3, 5), dtype=np.float32) / np.maximum(shares, 1 / factor**2)
    return np.stack([_bytes(means), np.where(shares > 0, 255, 0).astype(np.uint8)], -1)


def _bytes(values: NDArray[np.float32]) -> Pixels:
    whole: Pixels = values.round().astype(np.uint8)
    return whole
