"""One image file to uint8 [C, size, size]: orientation, colours, transparency, and the canonical resize.

Every image that anything in Unfog looks at comes through here, because resizers differ enough to move an FID
(Parmar et al. 2022, "On aliased resizing"): Pillow's antialiased Lanczos of the short side to `size`, then
the centre square, in sRGB.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, JpegImagePlugin

from unfog.data.color_profile import to_srgb
from unfog.data.sources.base import FailedShardError, ImageError, ShardReadError, TransientImageError
from unfog.data.sources.image_files import TEXT_TOO_LARGE, os_error_reason
from unfog.errors import RequestError

ORIENTATION = 0x0112  # EXIF tag
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

_LASTING = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "EINVAL", "EOVERFLOW")
)
"""What the system says of a file that will be no other another time."""

_LARGE_PIXELS = 24_000_000
_LARGE_AT_ONCE = 4
_large_images = threading.BoundedSemaphore(_LARGE_AT_ONCE)


class ImageInfo(NamedTuple):
    """What an image was, and what was done to it."""

    grey: bool
    """Whether its channels were equal, whatever the file said."""

    width: int
    """Of the upright original."""

    height: int
    mode: str
    """Pillow's name for what the file holds."""

    actions: list[str]
    """Keys of `report.ACTIONS`."""


def colour(text: str) -> tuple[int, int, int]:
    """The colour that a name or "#rrggbb" means, as 0 to 255.

    Raises:
        RequestError: it means none.
    """
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError as error:
        raise RequestError(f"background = {text!r} is not a colour; give a name such as white, or #rrggbb") from error


def header(opener: Callable[[], Image.Image]) -> tuple[int, int]:
    """(width, height) of an image as stored, without decoding it. Raises ImageError."""
    try:
        with opener() as image:
            return image.size
    except Exception as error:
        raise _unusable(error) from error


def decode(
    opener: Callable[[], Image.Image], size: int, channels: int, background: tuple[int, int, int]
) -> tuple[NDArray[np.uint8], ImageInfo]:
    """What `opener` opens, as uint8 [channels, size, size]; channels is 1 or 3.

    Raises:
        TransientImageError: it could not be read just now: the disk or the network failed, or memory did not suffice.
        ImageError: the file is damaged, no image, or too big to be safe; truncated ones are never half used.
        FailedShardError: its shard has failed for good.
    """
    try:
        with opener() as image, _turn(image):
            return _decode(image, size, channels, background)
    except (FailedShardError, ShardReadError):
        raise
    except Exception as error:  # decoders raise almost anything on damaged files: OSError, SyntaxError, struct.error
        raise _unusable(error) from error


def _turn(image: Image.Image) -> AbstractContextManager[object]:
    """What to hold while decoding: large images take turns, as each takes up to ten bytes a pixel.

    A JPEG does not, as its decoder makes it small.
    """
    large = image.width * image.height > _LARGE_PIXELS and not isinstance(image, JpegImagePlugin.JpegImageFile)
    return _large_images if large else nullcontext()


def _decode(
    image: Image.Image, size: int, channels: int, background: tuple[int, int, int]
) -> tuple[NDArray[np.uint8], ImageInfo]:
    (width, height), mode = image.size, image.mode
    if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    actions, depth = _format_actions(image), _depth(image)
    short = min(width, height)
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        image.draft(None, (int(_REDUCING_GAP * size * width / short), int(_REDUCING_GAP * size * height / short)))
    _load(image)
    orientation = _orientation(image)
    scale = 1 << round(math.log2(width / image.width))
    flat, changes = _flatten(image, background, depth)
    square = _square(flat, size, width, height, scale)
    actions += changes
    if "icc_profile" in square.info:
        # After the resize: next to free, and on photographs the same to within 1 of 255 (RMSE).
        square, changes = to_srgb(square, square.info["icc_profile"] or b"")
        actions += changes
    if width != height:
        actions.append("cropped")
    if short != size:
        actions.append("resized" if short > size else "upscaled")
    if orientation != 1:
        # After the resize: the result is the same, and it is far cheaper.
        square = square.transpose(_UPRIGHT[orientation])
        actions.append("rotated")
    if orientation >= 5:
        width, height = height, width
    pixels = np.asarray(square)
    grey = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    if channels == 1 and not grey:
        actions.append("rgb_to_grey")
    if channels == 3 and (mode in ("1", "L", "LA", "F") or mode.startswith("I")):
        actions.append("grey_to_rgb")
    if pixels.ndim != (2 if channels == 1 else 3):
        pixels = np.asarray(square.convert("L" if channels == 1 else "RGB"))
    pixels = pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    return pixels, ImageInfo(grey, width, height, mode, actions)


def _format_actions(image: Image.Image) -> list[str]:
    """What Pillow does by itself: frames left out, 16-bit colour halved, a TIFF turned."""
    actions = []
    # A phone's JPEG with a second, smaller picture in it (MPO) does not count as an animation.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        actions.append("first_frame")
    if ";16" in str(getattr(image, "tile", "")) and not image.mode.startswith("I"):
        actions.append("sixteen_bit")
    if image.format == "TIFF" and _orientation(image) != 1:  # which Pillow turns while decoding, and forgets
        actions.append("rotated")
    return actions


def _depth(image: Image.Image) -> int:
    """Bits of a grey pixel that Pillow reads as one of 16."""
    return 12 if ";12" in str(getattr(image, "tile", "")) else 16


def _load(image: Image.Image) -> None:
    """Decode the pixels, all of them."""
    try:
        image.load()
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        # A text behind the pixels, which by now are whole.


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) to 8; damaged EXIF is no reason to lose the image."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:
        return 1
    return value if value in _UPRIGHT else 1


def _flatten(image: Image.Image, background: tuple[int, int, int], depth: int) -> tuple[Image.Image, list[str]]:
    """An "L" or "RGB" image of what a viewer would see, and the actions that took.

    `info["icc_profile"]` of it says what its numbers still mean; "CMYK" stays, too, if that is to be asked.
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
                rgba, changes = to_srgb(rgba, image.info["icc_profile"] or b"")
                actions += changes
            # Before the resize: a transparent pixel's hidden colour must not bleed into its neighbours.
            flat = Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)
            return flat.convert("RGB"), [*actions, "flattened"]
        image = image.convert("L") if image.mode == "LA" else rgba
    return image.convert("L" if image.mode in ("1", "L") else "RGB"), actions


def _eight_bit(image: Image.Image, depth: int) -> tuple[Image.Image, list[str]]:
    """Grey of 16 or 32 bits, or floating point, to 8 bits by the full range of its type: never by the values
    found, which would change the brightness of each image differently."""
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


def _square(image: Image.Image, size: int, width: int, height: int, scale: int) -> Image.Image:
    """The centre square of a width x height image that was decoded at 1 / scale, resized.

    Cropping by `box` costs no memory however long the image is. A draft's side is rounded up, hence the original's.
    """
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    if short == size:
        return image.crop((left, top, left + size, top + size))
    box = (left / scale, top / scale, (left + short) / scale, (top + short) / scale)
    return image.resize((size, size), Image.Resampling.LANCZOS, box, reducing_gap=_REDUCING_GAP)


def _unusable(error: Exception) -> ImageError:
    """What to say of an image whose opening or decoding raised this."""
    return TransientImageError(_reason(error)) if _passes(error) else ImageError(_reason(error))


def _passes(error: BaseException | None) -> bool:
    """Whether it may be otherwise another time; what Pillow says of a damaged file has no errno, or that of a seek to
    before its beginning."""
    while error is not None:
        passing = isinstance(error, MemoryError | TimeoutError | ConnectionError | TransientImageError)
        if passing or (isinstance(error, OSError) and error.errno and error.errno not in _LASTING):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    """Why an image cannot be used, in a few words."""
    text = str(error)
    match error:
        case ImageError():
            return text
        case Image.DecompressionBombError() | Image.DecompressionBombWarning():
            return f"over {(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} megapixels"
        case OSError() if error.errno:
            return os_error_reason(error)
        case EOFError():
            return "truncated"
        case MemoryError():
            return "too large for the memory there is"
    if "truncated" in text.lower() or "broken" in text:
        return "truncated"
    return f"damaged ({type(error).__name__}: {text[:60]})"
