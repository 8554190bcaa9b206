"""Unknown pixels: what stands for them in the data, and the mask of those that no image has. Imports no torch."""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from unfog.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NONE, NAN = "none", "nan"
"""Values of `data.unknown`: all pixels are known, and NaN is unknown. Others are numbers as text."""

_LEAST_SUSPECTED = 1e-3  # share of the values
_FEWEST_OTHERS = 16  # different values, so that they are not labels


def filler_of(text: str) -> float | None:
    """Return NaN or the number that stands for unknown values; None for `NONE`. RequestError for anything else."""
    if text == NONE:
        return None
    try:
        filler = float(text)
    except ValueError:
        filler = math.inf
    if math.isinf(filler):
        raise RequestError(f"data.unknown = {text!r:.60} must be nan, or the number that stands for unknown pixels")
    return filler


def find_unknown(values: NDArray[Any], filler: float) -> NDArray[np.bool_]:
    """Return where values are unknown, like `values`. A number is compared in the type of the values."""
    import numpy as np

    if math.isnan(filler):
        return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, np.bool_)
    with np.errstate(over="ignore"):
        found: NDArray[np.bool_] = values == (values.dtype.type(filler) if values.dtype.kind == "f" else filler)
    return found


class Suspect(NamedTuple):
    """A number that may stand for unknown values, as nothing says what it means."""

    value: float
    share: float
    """Of all values."""
    end: str
    """least or largest"""

    @property
    def evidence(self) -> str:
        """A sentence on how the number stands out."""
        return (
            f"exactly {self.value:.9g} is the {self.end} value of every channel, in {self.share:.1%} of the values, "
            "and stands far from the others"
        )

    @property
    def remedy(self) -> str:
        """The setting for the case that it stands for unknown values."""
        return f"if it means unknown, as a background of images does not, give --data.unknown={self.value:.9g}"

    def __str__(self) -> str:
        return f"{self.evidence}; {self.remedy}"


def suspect_unknown(values: NDArray[Any]) -> Suspect | None:
    """Return the number that may stand for unknown values in finite images [N, C, H, W]; None without one.

    It is the least or the largest value of each channel, and one in a thousand values or more. In one channel
    at least the others take many values, and their whole range is less than their distance from it. Images have 0 for
    many reasons, so 0 is suspected only if this holds in every channel.
    """
    import numpy as np

    for end, extreme in (("least", np.min), ("largest", np.max)):
        ends = [float(extreme(values[:, c])) for c in range(values.shape[1])]
        shares = [float((values[:, c] == ends[0]).mean()) for c in range(values.shape[1])] if len({*ends}) == 1 else [0]
        if min(shares) < _LEAST_SUSPECTED:
            continue
        far = [_is_far(values[:, c], ends[0]) for c in range(values.shape[1])]
        if all(far) or (any(far) and ends[0] != 0):
            return Suspect(ends[0], sum(shares) / len(shares), end)
    return None


def _is_far(values: NDArray[Any], number: float) -> bool:
    """Return True if values besides a number are many, and lie closer together than to it."""
    import numpy as np

    others = values[values != number]
    if not others.size or len(np.unique(others[:: max(1, others.size // 4096)])) < _FEWEST_OTHERS:
        return False  # masks and labels
    low, high = float(others.min()), float(others.max())
    return max(low - number, number - high) > high - low


class UnknownValues(NamedTuple):
    """Unknown values of the images of a run, and of its samples."""

    filler: float
    """NaN or the number that stands for unknown values."""
    in_samples: NDArray[np.bool_] | None = None
    """bool [C, H, W], True where samples are known; None if they are everywhere."""

    def hidden(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where stored values are unknown, bool, like `values`: decoded floats have NaN for any filler."""
        return find_unknown(values, math.nan) | find_unknown(values, self.filler)

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where stored images [N, C, H, W] are known, and samples can be, too: bool, like `values`."""
        known = ~self.hidden(values)
        return known if self.in_samples is None else known & self.in_samples


def neighbour_of(filler: float) -> float:
    """Return the whole number that takes the place of a known value that was rounded to `filler`."""
    return filler - 1 if filler > 0 else filler + 1


def mask_to_text(mask: NDArray[np.bool_]) -> str:
    """Return a mask as text for settings: its bits, compressed; "" if nothing in it is set."""
    import numpy as np

    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode() if mask.any() else ""


def mask_from_text(text: str, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Return the mask [C, H, W] that `mask_to_text` wrote. RequestError if it is damaged, or of another size."""
    import numpy as np

    count = math.prod(shape)
    size = -(-count // 8)
    try:
        # No more than fits: settings may be somebody else's.
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (binascii.Error, ValueError, zlib.error):
        raise RequestError("data.unknown_mask is damaged; restore the config.toml of the run") from None
    if len(data) != size:
        raise RequestError(
            "the run has pixels that are unknown in all images, and their mask is of another size; use the run's size"
        )
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(np.bool_).reshape(shape)
