"""Images to edit and their masks, read as training images are."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unfog.config.schema import Config
from unfog.config.toml import of_type
from unfog.config.values import sanitize
from unfog.data.augmentation import to_model_range
from unfog.data.decode import ImageInfo, decode, parse_colour
from unfog.data.prepare import silence_pillow
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_image
from unfog.diffusion.editing import Edit
from unfog.errors import RequestError
from unfog.pipeline.generate import to_pixels
from unfog.reporting.image_grids import Pixels, grid

ImageInput = str | PathLike[str] | np.typing.NDArray[Any]
_DEFAULT_STRENGTH = 0.6


def build_edit(
    config: Config, image: ImageInput | None, mask: ImageInput | None, strength: float | None, repeats: int | None
) -> Edit | None:
    """Return the edit of an image, with an optional mask, at the size of a run; None without an image.

    Raises:
        RequestError: one cannot be read, their sizes differ, or an argument is given without the one it needs.
    """
    if image is None:
        needy = {"mask": mask, "strength": strength, "repeats": repeats}
        if given := [name for name, value in needy.items() if value is not None]:
            raise RequestError(f"{given[0]} says what to do with an image, and there is none; give one: image = FILE")
        return None
    if mask is None and repeats is not None:
        raise RequestError(f"repeats = {repeats} is for painting where a mask is white; give one, or leave it away")
    pixels, facts = _read_image(image, "image", config.data.size, config.data.channels, config.data.background)
    unknown = None
    if mask is not None:
        white, its = _read_image(mask, "mask", config.data.size, 1, "black")
        if (its.width, its.height) != (facts.width, facts.height):
            raise RequestError(
                f"the mask has {its.width} x {its.height} pixels and the image {facts.width} x {facts.height}; a mask "
                "must be of the image's size, white where it is to be painted anew"
            )
        unknown = torch.from_numpy(white >= 128)
        if not unknown.any():
            raise RequestError("the mask is black everywhere, so there is nothing to paint; make white what is to be")
    usual = _DEFAULT_STRENGTH if mask is None else 1.0
    return Edit(
        to_model_range(torch.from_numpy(pixels.copy())),
        unknown,
        usual if strength is None else of_type(float, strength, "strength"),
        Edit.repeats if repeats is None else of_type(int, repeats, "repeats"),
    )


def _read_image(given: ImageInput, what: str, size: int, channels: int, background: str) -> tuple[Pixels, ImageInfo]:
    """Return uint8 [channels, size, size] as the data layer decodes it: upright, on the background, centre-cropped.

    Raises:
        RequestError: it is no image.
    """

    def opener() -> Image.Image:
        return open_image(path) if path else Image.fromarray(values)

    path = Path(given) if isinstance(given, str | PathLike) else None
    values = np.asarray(None if path else given)
    if path is None:
        values = values.astype(np.uint8) * 255 if values.dtype == bool else values
        values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
        if values.dtype != np.uint8 or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))):
            raise RequestError(
                f"{what} is {values.dtype} {list(values.shape)}; give a file, or uint8 [H, W], [H, W, 3] or [H, W, 4]"
            )
    try:
        with silence_pillow():
            return decode(opener, size, channels, parse_colour(background))
    except ImageError as error:
        named = sanitize(str(path)) if path else "the array"
        reason = "there is no such file" if path and not path.exists() else error
        raise RequestError(f"{what} = {named} cannot be used: {reason}; give an image such as a PNG or JPEG") from None


def edit_grid(edit: Edit, pictures: Pixels) -> Pixels:
    """Return a grid of the image, its mask if there is one, and the samples: uint8 [H, W, 3]."""
    first = [to_pixels(edit.image).permute(1, 2, 0).numpy()]
    if edit.unknown is not None:
        first.append(np.broadcast_to(255 * edit.unknown[0].byte().numpy()[..., None], first[0].shape))
    return grid(np.concatenate([np.stack(first), pictures]))
