"""Uploads that are conditions: which condition each is of, painted masks, and how they look at the size of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

from unfog.data.columns.second_source import numbers_of_labels, read_mask, transparent_pixels
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import image_error, open_bytes
from unfog.errors import RequestError
from unfog.reporting.image_grids import Pixels, encode_png
from unfog.serve.playground.images import at_run_size
from unfog.serve.run_files import decode_picture
from unfog.values.colour_map import category_colours
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.image_format import ImageFormat, size_of
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_columns

_MOST_PICTURES = 8  # conditions of a drawing that are images


def picture_column(conditions: ConditionFormat, name: object) -> ColumnFacts:
    """Return the condition of this name. RequestError if it is missing, or not an image."""
    known = {one.name: one for one in image_columns(conditions.columns)}
    if not isinstance(name, str) or name not in known:
        have = f"give one of {', '.join(known)}" if known else "this run has none"
        raise RequestError(f"{str(name)[:60]!r} is not a condition that is an image; {have}")
    return known[name]


def check_pictures(conditions: ConditionFormat, given: object) -> dict[str, ColumnFacts]:
    """Return the conditions that a request gives pictures of, by name. RequestError if it is not an object of these."""
    if not isinstance(given, Mapping) or len(given) > _MOST_PICTURES:
        raise RequestError(f"pictures must be an object of at most {_MOST_PICTURES} names and uploads")
    return {str(name): picture_column(conditions, name) for name in given}


def mask_file(numbers: Pixels, facts: ColumnFacts) -> bytes:
    """Return the PNG of a mask whose first channel [H, W, C] has numbers of categories, as its source has the values.

    RequestError if a number is not that of a category.
    """
    plane = numbers[..., 0]
    if plane.max() >= len(facts.categories):
        raise RequestError(
            f"{facts.name}: the painted mask has the number {plane.max()}, and the run has {len(facts.categories)} "
            "labels; paint it anew"
        )
    if facts.categories[0].startswith("#"):
        return encode_png(np.array(category_colours(facts.categories), np.uint8)[plane])
    most = np.iinfo(np.uint16).max
    if not all(name.isdecimal() and int(name) <= most for name in facts.categories):
        raise RequestError(f"{facts.name} has values that a PNG cannot hold; give its mask with `unfog sample`")
    values = np.array([int(name) for name in facts.categories])[plane]
    if values.max() < 256:
        return encode_png(values.astype(np.uint8))
    file = io.BytesIO()
    Image.fromarray(values.astype(np.uint16)).save(file, "PNG")
    return file.getvalue()


def condition_view(data: bytes, facts: ColumnFacts) -> bytes:
    """Return the PNG of an uploaded condition at the size of the run: a mask in colours, `hole` with transparency.

    RequestError if a mask has other labels than those of the run, or the upload cannot be decoded.
    """
    _, height, width = IMAGE_KINDS[facts.kind].shape(facts)
    size = size_of(height, width)
    if facts.kind == "mask":
        return encode_png(_mask_view(data, facts, ImageFormat.of(1, size)))
    pixels = at_run_size(np.asarray(decode_picture(data, "the upload")), ImageFormat.of(3, size))
    if facts.kind != "hole":
        return encode_png(pixels)
    missing = transparent_pixels(open_bytes(data, "the upload"))
    plane, _ = read_mask(lambda: missing.astype(np.uint8), ImageFormat.of(1, size))
    alpha = np.where(plane > 0, 0, 255).astype(np.uint8)
    return encode_png(np.concatenate([pixels, alpha[..., None]], 2))


def _mask_view(data: bytes, facts: ColumnFacts, format: ImageFormat) -> Pixels:
    try:
        plane, coloured = read_mask(lambda: open_bytes(data, "the upload"), format)
    except (ImageError, ValueError, OSError) as error:
        raise RequestError(f"{facts.name}: the upload is not a mask: {image_error(error)}") from None
    numbers = numbers_of_labels(plane, coloured, facts.categories, f"{facts.name}: the upload")
    colours: Pixels = np.array(category_colours(facts.categories), np.uint8)
    return colours[numbers]
