"""Images of two values, such as masks of 0 and 1, as black and white."""

from __future__ import annotations

from typing import cast

import numpy as np
from PIL import Image

from unfog.data.bit_depth import DeepImage, is_deep
from unfog.data.decode import Opener, is_opaque, read_deep
from unfog.data.sources.base import ImageError


def spread_two_values(opener: Opener) -> DeepImage:
    """Return an image of two values, such as 0 and 1, or 0 and 255 in 16 bits, as black and white.

    Colours of 8 bits count by their brightness. ImageError if it has another number of values, two that are both bright
    or not finite, transparency, or deeper colours.
    """
    with opener() as image:
        info, deep = dict(image.info), is_deep(image)
        values = read_deep(opener) if deep else np.asarray(cast(Image.Image, image).convert("L"))
        clear = isinstance(image, Image.Image) and image.has_transparency_data and (deep or not is_opaque(image))
    grey = values[..., 0] if values.ndim == 3 else values
    found = np.unique(grey)
    bright = len(found) == 2 and values.dtype.kind in "iu" and found[0] > np.iinfo(values.dtype).max // 2
    if (
        clear
        or bright
        or len(found) != 2
        or not np.isfinite(found).all()
        or (values.ndim == 3 and (values != grey[..., None]).any())
    ):
        raise ImageError("no image of two values")
    return DeepImage((grey == found[1]).astype(np.float32), info)
