"""Convert images with an embedded colour profile (ICC) to sRGB, which all other code assumes."""

from __future__ import annotations

import threading
from functools import lru_cache
from io import BytesIO
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageCms

_MAX_BYTES = 4 * 2**20  # printers' profiles, the largest there are, have two or three
# Of 255. Makers of sRGB profiles round their numbers differently; what is no sRGB is off by ten and more.
_TOLERANCE = 2

# Pillow's transform; False: the numbers are sRGB already; None: the profile does not say what they are.
_Transform: TypeAlias = "ImageCms.ImageCmsTransform | bool | None"

_building = threading.Lock()


def to_srgb(image: Image.Image, profile: bytes) -> tuple[Image.Image, list[str]]:
    """Convert an image of mode "L", "RGB", "RGBA" or "CMYK" to sRGB, "CMYK" to "RGB". Return it and the actions.

    Pixel values stay as they are if the profile is sRGB, and also if it is broken or of another kind of image, or if
    Pillow has no littleCMS. Safe in threads.
    """
    if len(profile) > _MAX_BYTES:
        profile = b""  # treated like any broken profile
    transform = _transform(profile, image.mode)
    if transform is None and image.mode == "L" and _transform(profile, "RGB") is not None:
        # Some programs write grey images with a colour profile.
        converted, actions = to_srgb(image.convert("RGB"), profile)
        return converted.getchannel("G"), actions
    if isinstance(transform, ImageCms.ImageCmsTransform):
        converted = transform.apply(image)
        return converted.getchannel("G") if image.mode == "L" else converted, ["srgb"]
    actions = ["profile_ignored"] if transform is None else []
    return image.convert("RGB") if image.mode == "CMYK" else image, actions


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> _Transform:
    """Return the transform from images of this mode and profile to sRGB. Cached, as a camera has one profile."""
    # littleCMS would otherwise reduce a transform of greys to a small table, ten levels off in the dark.
    flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
    try:
        with _building:
            transform = ImageCms.ImageCmsTransform(
                ImageCms.ImageCmsProfile(BytesIO(profile)),
                ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")),
                mode,
                "RGBA" if mode == "RGBA" else "RGB",
                # As browsers and photo editors show it: the paper is white, and the blackest ink black.
                ImageCms.Intent.PERCEPTUAL,
                flags=flags,
            )
    except (OSError, ValueError, ImportError):  # no profile; not one of such an image; no littleCMS
        return None
    if mode == "CMYK":
        return transform
    # A profile that changes nothing is sRGB under another name.
    levels = np.arange(256) if mode == "L" else np.linspace(0, 255, 9)
    # All greys, or nine levels of each channel in all combinations.
    grid = levels[None] if mode == "L" else np.stack(np.meshgrid(levels, levels, levels), -1).reshape(9, 81, 3)
    probe = Image.fromarray(grid.astype(np.uint8))
    before, after = probe.convert(transform.output_mode), transform.apply(probe.convert(mode))
    change = np.asarray(after, np.int16) - np.asarray(before, np.int16)
    return transform if np.abs(change).max() > _TOLERANCE else False
