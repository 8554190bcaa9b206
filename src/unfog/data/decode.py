"""Decode one image file to stored values [C, H, W]: orientation, transparency, resize and crop, colour profile.

The largest part at the centre that has the shape of the result is resized to it with Pillow's antialiased Lanczos, in
sRGB. All images in Unfog are decoded here, because resizers differ enough to move an FID (Parmar et al. 2022, "On
aliased resizing").
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, ImageFile, JpegImagePlugin

from unfog.data.bit_depth import (
    FULL,
    DeepImage,
    OutOfRangeError,
    Ranges,
    ValueRange,
    as_image,
    extent_of,
    has_deep_colours,
    has_usual_channels,
    is_deep,
    is_grey,
)
from unfog.data.full_depth.decode import to_planes
from unfog.data.sources.base import FailedShardError, ImageError, ShardReadError
from unfog.data.sources.image_files import MOST_EXIF_BYTES, TEXT_TOO_LARGE, count_pages, image_error
from unfog.errors import RequestError
from unfog.values.image_format import ImageFormat, in_colour, pillow_mode

_ORIENTATION = 0x0112  # EXIF tag
_QUARTER_TURN = 5  # orientations from here on exchange width and height
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
# Of 255. Makers of sRGB profiles round their numbers differently; what is not sRGB is off by ten and more.
_SRGB_TOLERANCE = 2

# Pillow's transform; False: the numbers are sRGB already; None: the profile does not say what they are.
_Transform: TypeAlias = "ImageCms.ImageCmsTransform | bool | None"

_building_transform = threading.Lock()

# Pillow takes the high byte of colours of 16 bits. Raw mode of a file -> raw mode that takes the low byte.
_LOW_BYTE = {
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA")
    for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
}

# Opens an image file, or an image that Pillow has no mode for.
Opener: TypeAlias = Callable[[], Image.Image | DeepImage]
# Opens one, or returns an array.
Reader: TypeAlias = Callable[[], Image.Image | DeepImage | NDArray[Any]]


class ImageInfo(NamedTuple):
    """Properties of an image file, and what its decoding did to it."""

    grey: bool
    """True if all channels are equal, whatever the mode of the file."""
    width: int
    """Width of the upright original, in pixels."""
    height: int
    mode: str
    """Pillow's mode of the file, such as "RGB"; of arrays that it has no mode for, their type."""
    actions: list[str]
    """Keys of `data_report.ACTIONS`."""
    pages: int = 1
    """Images in the file, of which the first is used."""


def parse_colour(text: str) -> tuple[int, int, int]:
    """Parse a colour name or "#rrggbb" to (red, green, blue), 0 to 255. Raises RequestError if it is neither."""
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError as error:
        raise RequestError(f"background = {text!r} is not a colour; give a name such as white, or #rrggbb") from error


def decode(
    read: Reader,
    format: ImageFormat,
    background: tuple[int, int, int],
    ranges: Ranges | None = None,
) -> tuple[NDArray[Any], ImageInfo]:
    """Decode what `read` returns, such as an array [H, W, C], to an image of this format, [C, H, W] in its type.

    `ranges` are those of the set that the image belongs to; None for an image by itself.

    Raises:
        TransientImageError: it cannot be read now: the disk, the network or the memory failed.
        ImageError: the file is damaged, truncated, no image, or too large to be safe.
        FailedShardError: its remote shard has failed for good.
    """
    try:
        found = read()
        if not format.is_picture:
            return _decode_kept(found, lambda: as_image(read()), format, background)
        if (unchanged := _as_it_is(found, format)) is not None:
            return unchanged
        if isinstance(found, np.ndarray) and not has_usual_channels(found):
            raise ImageError(f"an array of {found.dtype} {list(found.shape)}")
        with as_image(found) as image, _large_image_slot(image):
            if isinstance(image, Image.Image) and not (has_deep_colours(image) and ranges and ranges.integers):
                return _decode(image, format, background, ranges)
            deep = image if isinstance(image, DeepImage) else _deep_colours(lambda: as_image(read()), image.info)
            pixels, info = _decode(_scale(deep, ranges), format, background, ranges)
            return pixels, info._replace(mode=image.mode, actions=[*_deep_actions(deep.values, ranges), *info.actions])
    except OutOfRangeError as error:
        raise ImageError(str(error)) from None
    except (FailedShardError, ShardReadError):
        raise
    except Exception as error:  # decoders raise almost anything on damaged files: OSError, SyntaxError, struct.error
        raise image_error(error) from error


def _as_it_is(found: object, format: ImageFormat) -> tuple[NDArray[np.uint8], ImageInfo] | None:
    """Return an array [H, W, C] that has the format already as `_decode` would, without Pillow; None for all else."""
    if not isinstance(found, np.ndarray) or not found.dtype == format.dtype == np.uint8 or found.ndim != 3:
        return None
    pixels = found.transpose(2, 0, 1)
    if pixels.shape != format.shape:
        return None
    grey = bool((pixels == pixels[:1]).all())
    return pixels, ImageInfo(grey, format.width, format.height, pillow_mode(format.channels), [])


def _decode_kept(
    found: Image.Image | DeepImage | NDArray[Any], opener: Opener, format: ImageFormat, background: tuple[int, int, int]
) -> tuple[NDArray[Any], ImageInfo]:
    """Decode an image to a format that keeps its values. Raises as `to_planes`."""
    orientation, pages = 1, 1
    if isinstance(found, Image.Image):
        orientation, pages = _orientation(found), count_pages(found)
        if is_deep(found):
            values = read_deep(opener)
        else:
            values = np.asarray(_flatten(found, background, None, FULL)[0].convert(pillow_mode(format.channels)))
    else:
        values = found.values if isinstance(found, DeepImage) else found
    fit = Fit.of(values.shape[1], values.shape[0], format, orientation)
    width, height = fit.original[:: -1 if orientation >= _QUARTER_TURN else 1]

    def upright(plane: Image.Image) -> Image.Image:
        return turned_upright(fit.apply(plane, 1), orientation)

    planes = to_planes(values, format, upright if fit.actions or orientation != 1 else None)
    actions = [*fit.actions, *["rotated"] * (orientation != 1)]
    return planes, ImageInfo(bool((planes == planes[:1]).all()), width, height, str(values.dtype), actions, pages)


def turned_upright(image: Image.Image, orientation: int = 0) -> Image.Image:
    """Return a loaded image as an EXIF orientation of 1 to 8 says that it is shown; 0 is that of the image."""
    orientation = orientation or _orientation(image)
    return image if orientation == 1 else image.transpose(_UPRIGHT[orientation])


def upright_sides(image: Image.Image | DeepImage) -> tuple[int, int]:
    """Return width and height of an image when shown upright. The image need not be loaded."""
    width, height = image.size
    # Pillow gives the upright size of a TIFF. What has no EXIF at its beginning may need all of its pixels to find one.
    if width != height and isinstance(image, Image.Image) and image.format != "TIFF" and "exif" in image.info:
        return (height, width) if _orientation(image) >= _QUARTER_TURN else (width, height)
    return width, height


def read_deep(opener: Opener) -> NDArray[Any]:
    """Return the values of a deep image, [H, W] or [H, W, C], as its file has them.

    ImageError if it has colours of 16 bits that Pillow reads the upper 8 bits of alone.
    """
    with opener() as image:
        if isinstance(image, DeepImage):
            return image.values
        if not (isinstance(image, ImageFile.ImageFile) and has_deep_colours(image)):
            return np.asarray(image)
        tiles = list(image.tile)
        upper = np.asarray(image).astype(np.uint16)
    raw = [tile.args if isinstance(tile.args, str) else (tile.args or ("unknown",))[0] for tile in tiles]
    with opener() as image:
        assert isinstance(image, ImageFile.ImageFile)
        if set(raw) == {"LA;16B"}:  # read as RGBA, whose four channels are the four bytes
            image.tile = [_with_raw_mode(tile, "RGBA") for tile in tiles]
            four = np.asarray(image).astype(np.uint16)
            return four[..., ::2] * 256 + four[..., 1::2]
        if not set(raw) <= _LOW_BYTE.keys():
            raise ImageError(f"colours of 16 bits stored as {raw[0]}, of which the lower bits cannot be read")
        image.tile = [_with_raw_mode(tile, _LOW_BYTE[mode]) for tile, mode in zip(tiles, raw)]
        both: NDArray[Any] = upper * 256 + np.asarray(image)
        return both


def _deep_colours(opener: Opener, info: dict[Any, Any]) -> DeepImage:
    """Return an image of 16-bit colours; one that is transparent in a PNG becomes transparency. ImageError as above."""
    values, kept = read_deep(opener), dict(info)
    clear = kept.pop("transparency", None)
    if isinstance(clear, tuple) and values.shape[2:] == (3,):
        opaque = (values != np.array(clear)).any(-1, keepdims=True)
        values = np.concatenate([values, np.where(opaque, 65535, 0).astype(np.uint16)], -1)
    return DeepImage(values, kept)


def _with_raw_mode(tile: Any, mode: str) -> Any:
    return tile._replace(args=mode if isinstance(tile.args, str) else (mode, *tile.args[1:]))


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Return an image that belongs to no set, with 8 bits; `convert` would cut deeper greys at 255.

    Raises OutOfRangeError if its values have no known range.
    """
    return _eight_bit(image, None, 65535)[0] if image.mode[0] in "IF" else image


def _scale(image: DeepImage, ranges: Ranges | None, full: int = 65535) -> Image.Image:
    """Return a deep image with 8 bits; without ranges, by its own. OutOfRangeError if values are outside of them."""
    return image.to_pil(_own_ranges(image.values) if ranges is None else ranges, full)


def _own_ranges(values: NDArray[Any]) -> Ranges:
    """Return the ranges of an image that belongs to no set; integers of 16 bits have that of their type."""
    extent, floating = extent_of(values), values.dtype.kind == "f"
    if extent is None:  # NaN, which every range refuses
        return Ranges(floats=ValueRange(0, 1))
    try:
        if floating:
            return Ranges(floats=ValueRange.of_floats([extent], "it"))
        return Ranges() if values.dtype.itemsize == 2 else Ranges(ValueRange.of_integers([extent], "it"))
    except RequestError:
        of = "floating point that is neither in 0..1, -1..1 nor in 0..255" if floating else "integers beyond 16 bits"
        raise OutOfRangeError(of) from None


def _large_image_slot(image: Image.Image | DeepImage) -> AbstractContextManager[object]:
    if isinstance(image, DeepImage):
        return nullcontext()
    # A JPEG of one scan needs no slot: its decoder already shrinks it. Of several, it holds all coefficients.
    # An icon may hold an image of another size than it says.
    large = (image.width * image.height > _LARGE_PIXELS and image.info.get("scans") != 1) or image.format == "ICO"
    return _large_images if large else nullcontext()


def _decode(
    image: Image.Image, format: ImageFormat, background: tuple[int, int, int], ranges: Ranges | None
) -> tuple[NDArray[np.uint8], ImageInfo]:
    (width, height), mode = image.size, image.mode
    # Pillow itself raises this only above twice the limit.
    if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    actions = _format_actions(image)
    pages = count_pages(image)
    if pages > 1:
        actions.append("first_frame")
    # Grey of 12 bits is read as 16 by Pillow, with values of 12.
    full = 2 ** (12 if ";12" in str(getattr(image, "tile", "")) else 16) - 1
    _load_pixels(image, format)
    orientation = _orientation(image)
    fit = Fit.of(width, height, format, orientation)
    scale = 1 << round(math.log2(width / image.width))
    flat, changes = _flatten(image, background, ranges, full)
    fitted = fit.apply(flat, scale)
    actions += changes
    if "icc_profile" in fitted.info:
        # After the resize: next to free, and on photographs the same to within 1 of 255 (RMSE).
        fitted, changes = to_srgb(fitted, fitted.info["icc_profile"] or b"")
        actions += changes
    actions += [*fit.actions, *["rotated"] * (orientation != 1)]
    # After the resize: the result is the same, and it is far cheaper.
    fitted = turned_upright(fitted, orientation)
    if orientation >= _QUARTER_TURN:
        width, height = height, width
    pixels, grey = _with_channels(fitted, format.channels)
    coloured = in_colour(format.channels)
    if not coloured and not grey:
        actions.append("rgb_to_grey")
    if coloured and is_grey(mode):
        actions.append("grey_to_rgb")
    return pixels, ImageInfo(grey, width, height, mode, actions, pages)


def _load_pixels(image: Image.Image, format: ImageFormat) -> None:
    """Decode the pixels of an image, of a JPEG perhaps at a fraction of its sides, for a result of this format."""
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        # The orientation of a JPEG is known before its pixels.
        fit = Fit.of(*image.size, format, _orientation(image))
        needed, least = fit.limit
        reduced = _REDUCING_GAP * needed
        image.draft(None, (int(reduced * image.width / least), int(reduced * image.height / least)))
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
    if pixels.ndim != (3 if in_colour(channels) else 2):
        pixels = np.asarray(image.convert(pillow_mode(channels)))
    return pixels.transpose(2, 0, 1) if in_colour(channels) else pixels[None], grey


def _format_actions(image: Image.Image) -> list[str]:
    """List the conversions that Pillow makes while it decodes."""
    actions = []
    # Colour of 16 bits is cut to 8; grey of 16 bits is not, see `_eight_bit`.
    if has_deep_colours(image):
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
    except Exception:  # an image with damaged EXIF is still usable
        return 1
    return value if value in _UPRIGHT else 1


def _flatten(
    image: Image.Image, background: tuple[int, int, int], ranges: Ranges | None, full: int
) -> tuple[Image.Image, list[str]]:
    """Convert to "L" or "RGB" as a viewer would show it. Return the image and the actions.

    An `info["icc_profile"]` left in the result is still to be applied; "CMYK" with a profile is left as it is.
    """
    actions = list[str]()
    if image.mode[0] in "IF":
        image, actions = _eight_bit(image, ranges, full)
    if image.mode == "CMYK":
        return image if "icc_profile" in image.info else image.convert("RGB"), ["cmyk"]
    if image.mode in ("P", "PA"):
        actions.append("palette")
    elif image.mode in ("YCbCr", "LAB", "HSV"):
        actions.append("colour_space")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        if not is_opaque(rgba):
            if "icc_profile" in image.info:  # the background is sRGB, so what is laid on it must be
                rgba, changes = to_srgb(rgba, image.info["icc_profile"] or b"")
                actions += changes
            # Before the resize: a transparent pixel's hidden colour must not bleed into its neighbours.
            flat = Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)
            return flat.convert("RGB"), [*actions, "flattened"]
        image = image.convert("L") if image.mode == "LA" else rgba
    return image.convert("L" if image.mode in ("1", "L") else "RGB"), actions


def is_opaque(image: Image.Image) -> bool:
    """Return True if the transparency of an image of 8 bits hides nothing."""
    return image.convert("RGBA").getchannel("A").getextrema()[0] == 255


def _eight_bit(image: Image.Image, ranges: Ranges | None, full: int) -> tuple[Image.Image, list[str]]:
    """Convert grey of 16 or 32 bits, or floating point, to 8 bits. Return the image, "L" or "LA", and the actions."""
    values = np.asarray(image)
    info = {name: value for name, value in image.info.items() if name != "transparency"}
    grey = _scale(DeepImage(values, info), ranges, full)
    clear = image.info.get("transparency")
    if isinstance(clear, int):  # the value that is transparent, of a PNG
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey, _deep_actions(values, ranges)


def _deep_actions(values: NDArray[Any], ranges: Ranges | None) -> list[str]:
    actions, floating = ["float" if values.dtype.kind == "f" else "sixteen_bit"], values.dtype.kind == "f"
    if ranges is not None and ranges.clip and (own := ranges.of(values)) and (extent := extent_of(values)):
        actions += ["clipped"] * (not own.holds(extent, floating))
    return actions


class Fit(NamedTuple):
    """The fit of an image to a format: the part that is kept, and its sides afterwards, as stored in the file."""

    original: tuple[int, int]
    """Width and height."""
    kept: tuple[int, int]
    """Width and height of the largest part at the centre with the shape of the result, in whole pixels."""
    result: tuple[int, int]
    """Width and height, before a quarter turn by the orientation."""

    @classmethod
    def of(cls, width: int, height: int, format: ImageFormat, orientation: int = 1) -> Fit:
        """Return the fit of an image of these stored sides, which its EXIF orientation turns afterwards."""
        across, down = format.width, format.height
        if orientation >= _QUARTER_TURN:
            across, down = down, across
        if width * down >= height * across:
            kept = max(1, round(height * across / down)), height
        else:
            kept = width, max(1, round(width * down / across))
        return cls((width, height), kept, (across, down))

    @property
    def limit(self) -> tuple[int, int]:
        """The side of the result, and of the original, along which nothing is cropped."""
        axis = 0 if self.kept[0] == self.original[0] and self.kept[1] != self.original[1] else 1
        return self.result[axis], self.original[axis]

    @property
    def actions(self) -> list[str]:
        """Changes of the sides: keys of `data_report.ACTIONS`, such as "cropped"."""
        resized = "resized" if self.kept > self.result else "upscaled"
        return ["cropped"] * (self.kept != self.original) + [resized] * (self.kept != self.result)

    def apply(self, image: Image.Image, scale: int) -> Image.Image:
        """Crop and resize an image that was decoded at 1 / scale of its original sides."""
        # Computed from the original, as a JPEG draft rounds its sides up.
        left, top = ((whole - part) // 2 for whole, part in zip(self.original, self.kept))
        right, bottom = left + self.kept[0], top + self.kept[1]
        if self.kept == self.result:
            return image.crop((left, top, right, bottom))
        box = (left / scale, top / scale, right / scale, bottom / scale)
        # By `box` the crop takes no memory, however long the image is.
        return image.resize(self.result, Image.Resampling.LANCZOS, box, reducing_gap=_REDUCING_GAP)


def to_srgb(image: Image.Image, profile: bytes) -> tuple[Image.Image, list[str]]:
    """Convert an image of mode "L", "RGB", "RGBA" or "CMYK" to sRGB, "CMYK" to "RGB". Return it and the actions.

    Pixel values stay as they are if the profile is sRGB, and also if it is broken or of another kind of image, or if
    Pillow has no littleCMS. Safe in threads.
    """
    if len(profile) > _MAX_PROFILE_BYTES:
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
