"""Decode one image file to uint8 [C, size, size]: orientation, transparency, resize and crop, colour profile.

The short side is resized to `size` with Pillow's antialiased Lanczos, and the centre square is kept, in sRGB. All
images in Unfog are decoded here, because resizers differ enough to move an FID (Parmar et al. 2022, "On aliased
resizing").
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, JpegImagePlugin

from unfog.data.files.image_heads import MOST_EXIF_BYTES
from unfog.data.sources.base import FailedShardError, ImageError, ShardReadError
from unfog.data.sources.image_files import TEXT_TOO_LARGE, image_error
from unfog.errors import RequestError

_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A cheap box reduction (a JPEG decoder's, then Pillow's) stops at four times the size, and Lanczos does the rest:
# within 0.6 of 255 (RMSE) of Lanczos in floating point on photographs; stopping at twice the size, within 1.5.
_REDUCING_GAP = 4.0

_LARGE_PIXELS = 24_000_000
_large_images = threading.BoundedSemaphore(4)  # as each takes ten bytes a pixel, as JPEG 2000 eighteen

_MAX_PROFILE_BYTES = 4 * 2**20  # printers' profiles, the largest there are, have two or three
# Of 255. Makers of sRGB profiles round their numbers differently; what is no sRGB is off by ten and more.
_SRGB_TOLERANCE = 2

# Pillow's transform; False: the numbers are sRGB already; None: the profile does not say what they are.
_Transform: TypeAlias = "ImageCms.ImageCmsTransform | bool | None"

_building_transform = threading.Lock()


class ImageInfo(NamedTuple):
    """Properties of an image file, and what its decoding did to it."""

    grey: bool
    """True if all channels are equal, whatever the mode of the file."""
    width: int
    """Width of the upright original, in pixels."""
    height: int
    mode: str
    """Pillow's mode of the file, such as "RGB"."""
    actions: list[str]
    """Keys of `data_report.ACTIONS`."""


def parse_colour(text: str) -> tuple[int, int, int]:
    """Parse a colour name or "#rrggbb" to (red, green, blue), 0 to 255. Raises RequestError if it is neither."""
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError as error:
        raise RequestError(f"background = {text!r} is not a colour; give a name such as white, or #rrggbb") from error


def decode(
    opener: Callable[[], Image.Image], size: int, channels: int, background: tuple[int, int, int]
) -> tuple[NDArray[np.uint8], ImageInfo]:
    """Decode what `opener` opens to uint8 [channels, size, size]; channels is 1 or 3.

    Raises:
        TransientImageError: it cannot be read now: the disk, the network or the memory failed.
        ImageError: the file is damaged, truncated, no image, or too large to be safe.
        FailedShardError: its remote shard has failed for good.
    """
    try:
        with opener() as image, _large_image_slot(image):
            return _decode(image, size, channels, background)
    except (FailedShardError, ShardReadError):
        raise
    except Exception as error:  # decoders raise almost anything on damaged files: OSError, SyntaxError, struct.error
        raise image_error(error) from error


def _large_image_slot(image: Image.Image) -> AbstractContextManager[object]:
    # A JPEG of one scan needs no slot: its decoder already shrinks it. Of several, it holds all coefficients.
    # An icon may hold an image of another size than it says.
    large = (image.width * image.height > _LARGE_PIXELS and image.info.get("scans") != 1) or image.format == "ICO"
    return _large_images if large else nullcontext()


def _decode(
    image: Image.Image, size: int, channels: int, background: tuple[int, int, int]
) -> tuple[NDArray[np.uint8], ImageInfo]:
    (width, height), mode = image.size, image.mode
    # Pillow itself raises this only above twice the limit.
    if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    actions = _format_actions(image)
    depth = 12 if ";12" in str(getattr(image, "tile", "")) else 16  # bits of grey that Pillow reads as 16
    short = min(width, height)
    _load_pixels(image, size)
    orientation = _orientation(image)
    scale = 1 << round(math.log2(width / image.width))
    flat, changes = _flatten(image, background, depth)
    square = _square(flat, size, (width, height), scale)
    actions += changes
    if "icc_profile" in square.info:
        # After the resize: next to free, and on photographs the same to within 1 of 255 (RMSE).
        square, changes = _to_srgb(square, square.info["icc_profile"] or b"")
        actions += changes
    if width != height:
        actions.append("cropped")
    if short != size:
        actions.append("resized" if short > size else "upscaled")
    if orientation != 1:
        # After the resize: the result is the same, and it is far cheaper.
        square = square.transpose(_UPRIGHT[orientation])
        actions.append("rotated")
    if orientation >= 5:  # a quarter turn
        width, height = height, width
    pixels, grey = _with_channels(square, channels)
    if channels == 1 and not grey:
        actions.append("rgb_to_grey")
    if channels == 3 and (mode in ("1", "L", "LA", "F") or mode.startswith("I")):
        actions.append("grey_to_rgb")
    return pixels, ImageInfo(grey, width, height, mode, actions)


def _load_pixels(image: Image.Image, size: int) -> None:
    """Decode the pixels of an image, of a JPEG perhaps at a fraction of its sides, for a result of this size."""
    width, height = image.size
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        reduced = _REDUCING_GAP * size
        image.draft(None, (int(reduced * width / min(width, height)), int(reduced * height / min(width, height))))
    try:
        image.load()
    except ValueError as error:
        # Pillow limits the texts in a PNG. One behind the pixels is met when these are decoded already.
        if TEXT_TOO_LARGE not in str(error):
            raise


def _with_channels(image: Image.Image, channels: int) -> tuple[NDArray[np.uint8], bool]:
    """Return (uint8 [channels, H, W], True if all channels of the image are equal)."""
    pixels = np.asarray(image)
    grey = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    if pixels.ndim != (2 if channels == 1 else 3):
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1), grey


def _format_actions(image: Image.Image) -> list[str]:
    """List what Pillow does to an image by itself while it decodes."""
    actions = []
    # A phone's JPEG with a second, smaller image in it (MPO) does not count as an animation.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        actions.append("first_frame")
    # Colour of 16 bits is cut to 8; grey of 16 bits is not, see `_eight_bit`.
    if ";16" in str(getattr(image, "tile", "")) and not image.mode.startswith("I"):
        actions.append("sixteen_bit")
    if image.format == "TIFF" and _orientation(image) != 1:  # which Pillow turns while decoding, and forgets
        actions.append("rotated")
    return actions


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) to 8."""
    try:
        if len(image.info.get("exif") or b"") > MOST_EXIF_BYTES:
            return 1
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF is no reason to lose the image
        return 1
    return value if value in _UPRIGHT else 1


def _flatten(image: Image.Image, background: tuple[int, int, int], depth: int) -> tuple[Image.Image, list[str]]:
    """Convert to "L" or "RGB" as a viewer would show it. Return the image and the actions.

    An `info["icc_profile"]` left in the result is still to be applied; "CMYK" with a profile is left as it is.
    """
    actions = []
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bit(image, depth)
    if image.mode == "CMYK":
        return image if "icc_profile" in image.info else image.convert("RGB"), ["cmyk"]
    if image.mode in ("P", "PA"):
        actions.append("palette")
    elif image.mode in ("YCbCr", "LAB", "HSV"):
        actions.append("colour_space")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        if rgba.getchannel("A").getextrema()[0] != 255:
            if "icc_profile" in image.info:  # the background is sRGB, so what is laid on it must be
                rgba, changes = _to_srgb(rgba, image.info["icc_profile"] or b"")
                actions += changes
            # Before the resize: a transparent pixel's hidden colour must not bleed into its neighbours.
            flat = Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)
            return flat.convert("RGB"), [*actions, "flattened"]
        image = image.convert("L") if image.mode == "LA" else rgba
    return image.convert("L" if image.mode in ("1", "L") else "RGB"), actions


def _eight_bit(image: Image.Image, depth: int) -> tuple[Image.Image, list[str]]:
    """Convert grey of 16 or 32 bits, or floating point, to 8 bits. Return the image and the actions."""
    # Scaled by the full range of the type: the range of the values would change each image's brightness differently.
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ImageError("floating point with NaN or infinity in it")
        if not (low >= 0 and high <= 255):
            raise ImageError("floating point that is neither in 0..1 nor in 0..255")
        scaled = values * (255 if high <= 1 else 1)
        return Image.fromarray(np.rint(scaled).astype(np.uint8)), ["float"]
    if not (low >= 0 and high <= 65535):
        raise ImageError("32-bit values beyond 16 bits")
    most = 2**depth - 1
    scaled = (values.astype(np.uint32) * 255 + most // 2) // most
    grey = Image.fromarray(scaled.astype(np.uint8))
    grey.info = image.info
    return grey, ["sixteen_bit"]


def _square(image: Image.Image, size: int, original: tuple[int, int], scale: int) -> Image.Image:
    """Crop the centre square of an image that was decoded at 1 / scale of its original size, and resize it."""
    width, height = original  # of which the crop is computed, as a JPEG draft rounds its sides up
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    if short == size:
        return image.crop((left, top, left + size, top + size))
    box = (left / scale, top / scale, (left + short) / scale, (top + short) / scale)
    # By `box` the crop takes no memory, however long the image is.
    return image.resize((size, size), Image.Resampling.LANCZOS, box, reducing_gap=_REDUCING_GAP)


def _to_srgb(image: Image.Image, profile: bytes) -> tuple[Image.Image, list[str]]:
    """Convert an image of mode "L", "RGB", "RGBA" or "CMYK" to sRGB, "CMYK" to "RGB". Return it and the actions.

    Pixel values stay as they are if the profile is sRGB, and also if it is broken or of another kind of image, or if
    Pillow has no littleCMS. Safe in threads.
    """
    if len(profile) > _MAX_PROFILE_BYTES:
        profile = b""  # treated like any broken profile
    transform = _transform(profile, image.mode)
    if transform is None and image.mode == "L" and _transform(profile, "RGB") is not None:
        # Some programs write grey images with a colour profile.
        converted, actions = _to_srgb(image.convert("RGB"), profile)
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
        with _building_transform:
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
    return transform if np.abs(change).max() > _SRGB_TOLERANCE else False
