"""Images to edit and their masks, from files or arrays: read as training images are."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unfog.config.schema import Config
from unfog.config.spec_strings import quote
from unfog.config.toml import of_type
from unfog.data.bit_depth import DeepImage, Ranges
from unfog.data.buckets.sizes import nearest_size
from unfog.data.decode import ImageInfo, Opener, decode, parse_colour, upright_sides
from unfog.data.full_depth.two_values import spread_two_values
from unfog.data.prepare import silence_pillow
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_image
from unfog.diffusion.editing import Edit
from unfog.errors import RequestError
from unfog.reporting.image_grids import Pixels
from unfog.settings import is_auto
from unfog.values.image_format import CHANNELS, ImageFormat, Size, to_pillow

ImageInput = str | PathLike[str] | np.typing.NDArray[Any]
_DEFAULT_STRENGTH = 0.6
_OF_TRAINING = re.compile(r" \(-{2}data\.[^)]*\)")
_WHITE = 128  # of 255


def build_edit(
    config: Config, image: ImageInput | None, mask: ImageInput | None, strength: float | None, repeats: int | None
) -> Edit | None:
    """Return the edit of an image, with an optional mask, at the size of a run; None without an image.

    RequestError if one cannot be read, their sizes differ, or an argument lacks the one that it needs.
    """
    if image is None:
        needy = {"mask": mask, "strength": strength, "repeats": repeats}
        if given := [name for name, value in needy.items() if value is not None]:
            raise RequestError(f"{given[0]} needs an image to edit; give --image FILE, or image=… in Python")
        return None
    if mask is None and repeats is not None:
        raise RequestError(f"repeats = {repeats} is for inpainting with a mask; give a mask, or omit repeats")
    data = config.data
    if not config.image_format.is_picture:
        raise RequestError(
            f"this run generates {config.image_format}, and images to edit are pictures of 8 bits; omit the image"
        )
    # Of the set that the run was trained on, so that the image is as bright as its images.
    ranges = None if is_auto(data, "range") else Ranges.of_setting(data.range, data.clip)
    pixels, facts = _read_image(image, "image", config.image_format, data.background, ranges)
    unknown = None
    if mask is not None:
        unknown, its = _read_mask(mask, config.image_format.as_mask)
        if (its.width, its.height) != (facts.width, facts.height):
            raise RequestError(
                f"the mask has {its.width} x {its.height} pixels and the image {facts.width} x "
                f"{facts.height}; the mask must have the size of the image, and be white where it is to be "
                "painted"
            )
    # A mask discards the old pixels behind it; without a mask, full strength discards the whole image.
    usual = _DEFAULT_STRENGTH if mask is None else 1.0
    return Edit(
        config.image_format.to_model(torch.from_numpy(pixels.copy())),
        unknown,
        usual if strength is None else of_type(float, strength, "strength"),
        Edit.repeats if repeats is None else of_type(int, repeats, "repeats"),
    )


def edit_size(config: Config, image: ImageInput) -> Size:
    """Return the size of the bucket whose shape is nearest to an image, in a run with buckets; 0 is that of the run.

    It is 0 too for an image that cannot be read, of which `build_edit` says more.
    """
    sizes = [bucket.size for bucket in config.size_buckets]
    if not sizes:
        return 0
    try:
        with silence_pillow(), _opener(image, "image")() as opened:
            size = nearest_size(sizes, *upright_sides(opened))
    except (ImageError, RequestError, OSError, ValueError):
        return 0
    return 0 if size == config.data.size else size


def _read_mask(given: ImageInput, format: ImageFormat) -> tuple[torch.Tensor, ImageInfo]:
    """Return (bool [1, H, W]: True for pixels to paint anew; properties of the mask).

    Of a mask of two values, such as 0 and 1, the larger one is white, unless both are bright. Of another one, white is
    what reaches half of the range of its type.
    """
    # Black behind a transparent mask: what is not drawn is kept.
    read = partial(_read_image, given, "mask", format, "black")
    try:
        white, facts = read(through=spread_two_values)
    except RequestError:
        white, facts = read()
    unknown = torch.from_numpy(white >= _WHITE)  # resizing leaves greys at the edges of the white
    if not unknown.any():
        raise RequestError(
            f"no part of the mask is white: its brightest is {white.max()} of 255; paint what is to be drawn anew in "
            f"white, {_WHITE} of 255 or 32768 of 16 bits or more, on black; transparent parts count as black"
        )
    return unknown, facts


def _read_image(
    given: ImageInput,
    what: str,
    format: ImageFormat,
    background: str,
    ranges: Ranges | None = None,
    through: Callable[[Opener], Image.Image | DeepImage] = lambda opener: opener(),
) -> tuple[Pixels, ImageInfo]:
    """Return an image of this format, decoded as training images are: upright and centre-cropped.

    Without `ranges`, values deeper than 8 bits are scaled by those of the image. `through` opens the image.
    """
    opener = _opener(given, what)
    try:
        with silence_pillow():
            return decode(partial(through, opener), format, parse_colour(background), ranges)
    except ImageError as error:
        path = _path(given)
        named = quote(str(path)) if path else "the array"
        # Without the remedies of training images, in brackets.
        reason = "there is no such file" if path and not path.exists() else _OF_TRAINING.sub("", str(error))
        raise RequestError(f"{what} = {named} cannot be used: {reason}; give an image such as a PNG or JPEG") from None


def _path(given: ImageInput) -> Path | None:
    return Path(given) if isinstance(given, str | PathLike) else None


def _opener(given: ImageInput, what: str) -> Opener:
    """Return the function that opens an image. RequestError for an array that is not one."""
    path = _path(given)
    if path is not None:
        return partial(open_image, path)
    values = np.asarray(given)
    values = values.astype(np.uint8) * 255 if values.dtype == bool else values
    shaped = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (*CHANNELS, 4))
    if values.dtype.kind not in "uif" or not shaped or not values.size:
        raise RequestError(
            f"{what} is {values.dtype} {list(values.shape)}; give a file, or an array [H, W], [H, W, 3] or [H, W, 4]"
        )
    return lambda: to_pillow(values) if values.dtype == np.uint8 else DeepImage(values)
