"""Conditions that are images in an export: from arrays and pictures to the values that the network takes, in numpy.

In a file with `given_values`, whose `read` it adds these kinds to, and with a `to_model` of value maps. A description
of such a condition has in `statistics` its channels, height and width; behind them the factor of "degrade", or the
least and the largest value of each channel of "image". `mode` is that of Pillow for its pictures, or "". Of what is
made of an image it has `values`, the map of its values, and `shares`, those of its channels in the brightness.
"""

import numpy as np

from unfog.export.given_values import _JOIN, _READERS, _SPLIT
from unfog.export.values_numpy import to_model


def _images(one, value):
    """Return the images of a value: a PIL image, an array [H, W], [H, W, C] or [n, H, W, C], or a list of such.

    None stands for one that is not known.
    """
    if value is None or hasattr(value, "convert"):
        return [value]
    if isinstance(value, list | tuple):
        return [each for part in value for each in _images(one, part)] or [None]
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.ndim == 0 and array.dtype.kind == "f" and np.isnan(array):
        return [None]
    array = array.astype(np.uint8) * 255 if array.dtype == bool else array
    if array.dtype.kind not in "uif" or array.ndim not in (2, 3, 4) or not array.size:
        shown = f"{str(value)[:60]!r}" if array.ndim == 0 else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{one['name']} = {shown} is not an image; give a PIL image, or an array [H, W] or [H, W, C]")
    several = array.ndim == 4 or (array.ndim == 3 and array.shape[2] > max(4, int(one["statistics"][0]) + 1))
    return list(array) if several else [array]


def _array(one, image, mode):
    """Return an image as an array [H, W, C]; of a PIL image in this mode, or as it is for ""."""
    if hasattr(image, "convert"):
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
        if mode and mode == one["mode"] and (image.has_transparency_data or "A" in image.getbands()):
            raise ValueError(f"{one['name']} is a picture with transparency; lay it on a background first")
        if mode and image.mode[0] in "IF":  # Pillow would cut them off at 255
            raise ValueError(f"{one['name']} is a picture of mode {image.mode}; give one of 8 bits")
        if one["kind"] != "mask" and not mode and image.mode not in ("L", "RGB") and image.mode[0] not in "IF":
            raise ValueError(f"{one['name']} is a picture of mode {image.mode}; give its values as an array [H, W, C]")
        image = image.convert(mode) if mode else image
    array = np.asarray(image)
    array = array.astype(np.uint8) if array.dtype == bool else array
    return array[..., None] if array.ndim == 2 else array


def _check_sides(one, array, *sides):
    """Raise ValueError if an image has none of these sizes (height, width)."""
    if array.shape[:2] not in sides:
        wanted = " or ".join(f"{width}x{height}" for height, width in sides)
        raise ValueError(f"{one['name']} is {array.shape[1]}x{array.shape[0]} pixels, and this model takes {wanted}")


def _bytes(one, array):
    """Return a picture as bytes, which 0 to 1 in floating point stands for."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f" or not ((array >= 0) & (array <= 1)).all():
        raise ValueError(f"{one['name']} is {array.dtype}; give bytes from 0 to 255, or floating point from 0 to 1")
    return np.rint(array * 255).astype(np.uint8)


def _check_finite(one, array):
    """Raise ValueError if an image has NaN or infinite values."""
    if not np.isfinite(array).all():
        raise ValueError(f"{one['name']} has values that are NaN or infinite; replace them")


def _clean(one, array, channels):
    """Return an image [H, W, C] in the units of the model, [C, H, W]. A picture without colours may have 1 channel."""
    if array.shape[2] == 1 and one["mode"]:
        array = np.repeat(array, channels, 2)
    if array.shape[2] != channels:
        raise ValueError(f"{one['name']} has {array.shape[2]} channels, and the images of this model {channels}")
    array = _bytes(one, array) if one["mode"] else array
    _check_finite(one, array)
    return np.asarray(to_model(one["values"], np.ascontiguousarray(array.transpose(2, 0, 1))), np.float32)


def _sides(one):
    channels, height, width = map(int, one["statistics"][:3])
    return channels, (height, width)


def _unless_unknown(read):
    def read_or_hide(one, image):
        shape = tuple(map(int, one["statistics"][:3]))
        return np.full(shape, np.nan, np.float32) if image is None else read(one, image)

    return read_or_hide


def _mask(one, image):
    """Return the number of the category of each pixel, [1, H, W], from whole numbers or colours."""
    plain = not hasattr(image, "convert") or image.mode in ("1", "L", "LA", "P", "PA") or image.mode[0] in "IF"
    array, names = _array(one, image, "" if plain else "RGB"), one["categories"]
    _check_sides(one, array, _sides(one)[1])
    if not (np.isfinite(array) & (array == np.round(array))).all():
        raise ValueError(f"{one['name']} has values that are not whole numbers")
    coloured = array.shape[2] in (3, 4)
    whole = array.astype(np.int64)
    plane = whole[..., 0] * 65536 + whole[..., 1] * 256 + whole[..., 2] if coloured else whole[..., 0]
    found, inverse = np.unique(plane, return_inverse=True)
    words = [f"#{value:06x}" if coloured else str(value) for value in found.tolist()]
    if unknown := [word for word in words if word not in names]:
        shown = ", ".join(names[:20])
        raise ValueError(f"{one['name']} has the value {unknown[0]}, and the masks of this model have {shown}")
    numbers = np.array([names.index(word) for word in words], np.float32)
    return numbers[inverse.reshape(plane.shape)][None]


def _second(one, image):
    """Return an image in the units of the second source, [C, H, W]."""
    channels, sides = _sides(one)
    low, high = one["statistics"][3 : 3 + channels], one["statistics"][3 + channels :]
    are_bytes = set(low) == {0} and set(high) == {255}
    array = _array(one, image, one["mode"])
    _check_sides(one, array, sides)
    array = _bytes(one, array) if are_bytes else array
    _check_finite(one, array)
    array = np.repeat(array, channels, 2) if are_bytes and array.shape[2] == 1 else array
    if array.shape[2] != channels:
        raise ValueError(f"{one['name']} has {array.shape[2]} channels, and the images of this condition {channels}")
    return array.transpose(2, 0, 1).astype(np.float32)


def _degraded(one, image):
    """Return a small image enlarged to the size of the model's images, and a large one made smaller before."""
    channels, (height, width) = _sides(one)
    factor = int(one["statistics"][3])
    array = _array(one, image, one["mode"])
    _check_sides(one, array, (height // factor, width // factor), (height, width))
    x = _clean(one, array, channels)
    if array.shape[0] == height:
        x = x[:, : height // factor * factor, : width // factor * factor]
        x = x.reshape(channels, height // factor, factor, width // factor, factor).mean((2, 4))
    down, across = (_bicubic(small, large) for small, large in zip(x.shape[1:], (height, width)))
    return np.einsum("ih,chw,jw->cij", down, x, across).astype(np.float32)


def _bicubic(small, large):
    """Return the weights [large, small] of cubic convolution with a = -0.75, as torch enlarges images."""
    weights, a = np.zeros((large, small)), -0.75
    for i in range(large):
        place = (i + 0.5) * small / large - 0.5
        first = int(np.floor(place)) - 1
        for j in range(first, first + 4):
            d = abs(place - j)
            near = (a + 2) * d**3 - (a + 3) * d**2 + 1
            far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
            weights[i, min(max(j, 0), small - 1)] += near if d <= 1 else far
    return weights


def _grey(one, image):
    """Return the brightness of an image, [1, H, W]."""
    shares = np.array(one["shares"], np.float32)[:, None, None]
    array = _array(one, image, one["mode"])
    _check_sides(one, array, _sides(one)[1])
    return (shares * _clean(one, array, len(shares))).sum(0, keepdims=True)


def _holed(one, image):
    """Return an image with NaN where it is transparent, NaN in an array, or 0 in a last channel."""
    channels, sides = _sides(one)
    array = _array(one, image, one["mode"] and one["mode"] + "A")
    _check_sides(one, array, sides)
    missing = ~np.isfinite(array).all(2)
    # A picture has a channel of transparency only if it was asked for.
    if array.shape[2] == channels + 1 and (one["mode"] or not hasattr(image, "convert")):
        alpha, array = array[..., -1], array[..., :-1]
        half = np.iinfo(array.dtype).max / 2 if array.dtype.kind in "ui" else 0.5
        missing = missing | (alpha < half)
    if not missing.any() or missing.all():
        which = "all" if missing.all() else "nothing"
        raise ValueError(f"{one['name']}: {which} of the image is missing; make what to fill in transparent, or NaN")
    array = np.where(missing[..., None], array[~missing].min(), array).astype(array.dtype)
    return np.where(missing, np.float32("nan"), _clean(one, array, channels))


_KINDS = {"mask": _mask, "image": _second, "degrade": _degraded, "grey": _grey, "hole": _holed}
_READERS.update({kind: _unless_unknown(read) for kind, read in _KINDS.items()})
_SPLIT.update(dict.fromkeys(_KINDS, _images))
_JOIN.update(dict.fromkeys(_KINDS, np.stack))
