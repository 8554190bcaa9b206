"""Colours: maps for the view of one channel, grey and viridis of Smith, van der Walt and Firing; labels of masks.

Also the squares that stand for what is not known.
"""

from __future__ import annotations

import colorsys
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GREY = "grey"
COLOUR_MAPS = (GREY, "viridis")
# Every 17th of the 256 colours of viridis; between them colours are interpolated, which is within 2 levels.
_VIRIDIS = (
    *("440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e"),
    *("1f988b", "22a884", "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"),
)


def anchors_of(name: str) -> tuple[str, ...]:
    """Return colours in hexadecimal at equal distances, between which a map is linear. `name` is one of COLOUR_MAPS."""
    return ("000000", "ffffff") if name == GREY else _VIRIDIS


def colour_table(name: str) -> NDArray[np.uint8]:
    """Return the colours of the 256 levels of a colour map, uint8 [256, 3]. `name` is one of COLOUR_MAPS."""
    import numpy as np

    levels = np.arange(256.0)
    if name == GREY:
        return np.repeat(levels[:, None], 3, axis=1).astype(np.uint8)
    colours = np.array([[*bytes.fromhex(colour)] for colour in anchors_of(name)], np.float64)
    places = np.linspace(0, 255, len(colours))
    return np.stack([np.interp(levels, places, part) for part in colours.T], axis=1).round().astype(np.uint8)


_LIGHT, _DARK = 236, 200


def checkers(height: int, width: int) -> NDArray[np.uint8]:
    """Return grey squares, uint8 [height, width], that stand for what is not known: 16 along the longer side."""
    import numpy as np

    side = max(1, math.ceil(max(height, width) / 16))
    odd = (np.arange(height)[:, None] // side + np.arange(width) // side) % 2
    return np.where(odd, _DARK, _LIGHT).astype(np.uint8)


def with_checkers(shown: NDArray[np.uint8], known: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return pictures uint8 [N, H, W, 3] with checkers in place of the pixels that are not known; known [N, H, W]."""
    import numpy as np

    return np.where(known[..., None], shown, checkers(*known.shape[1:])[..., None])


_COLOUR = re.compile("#[0-9a-f]{6}")
_GOLDEN = (5**0.5 - 1) / 2


def category_colours(categories: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return a colour for each category of a mask: its own, as of "#ff8000", or one that differs from the others.

    The first of other categories is black, as it is the background of most masks.
    """
    return [_category_colour(name, i) for i, name in enumerate(categories)]


def _category_colour(name: str, number: int) -> tuple[int, int, int]:
    if _COLOUR.fullmatch(name):
        red, green, blue = bytes.fromhex(name[1:])
        return red, green, blue
    if number == 0:
        return 0, 0, 0
    # Hues at steps of the golden ratio stay apart for any number of them.
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(number * _GOLDEN % 1, 0.75, 0.95))
    return red, green, blue
