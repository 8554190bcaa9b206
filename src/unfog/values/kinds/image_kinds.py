"""Kinds of conditions that are images: from a second source, or made of the image itself. Imports no torch at once."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from unfog.errors import RequestError
from unfog.text import plural, sanitize
from unfog.values.columns import Column, parts_of
from unfog.values.condition_kinds import ColumnFacts, ConditionKind
from unfog.values.image_format import MOST, MOST_CHANNELS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

FIELD = "image"
"""The field of `Conditions` that all kinds of images fill."""
MOST_MASK_VALUES = 64
"""Largest number of values of a mask."""
_NOT_TOLD = "?"


class ImageKind(ConditionKind):
    """Base of the kinds that are images of the size of the run, [N, C, H, W].

    Statistics begin with C, H and W. The condition is float32, NaN where a value is not known. Values of integers
    below 0 are not known.
    """

    field = FIELD
    made: ClassVar[bool] = False
    """Whether it is computed from the image, in model values; others are in the units of their source."""
    smooth: ClassVar[bool] = True
    """Whether values may be interpolated. Those of a mask may not, as they are numbers of categories."""

    def check(self, facts: ColumnFacts) -> None:
        numbers = facts.statistics
        whole = all(math.isfinite(each) for each in numbers) and all(each == int(each) for each in numbers[:3])
        if not (whole and len(numbers) >= 3 and 1 <= numbers[0] <= MOST_CHANNELS and self._fits(facts)):
            raise self._wrong(facts)
        if not all(1 <= side <= MOST for side in numbers[1:3]):
            raise self._wrong(facts)

    def _fits(self, facts: ColumnFacts) -> bool:
        return not facts.categories and len(facts.statistics) == 3

    def _wrong(self, facts: ColumnFacts) -> RequestError:
        return RequestError(
            f"column {facts.name!r} of kind {facts.kind} lacks the channels, height or width of its images, or has "
            "wrong ones; start a new run, which finds them"
        )

    def facts(self, column: Column) -> ColumnFacts:
        return ColumnFacts(column.name, column.kind, column.categories, tuple(map(float, column.values.shape[1:])))

    def shape(self, facts: ColumnFacts) -> tuple[int, int, int]:
        """Return (C, H, W) of the condition."""
        channels, height, width = map(int, facts.statistics[:3])
        return channels, height, width

    def inputs(self, facts: ColumnFacts) -> int:
        """Return the channels that the column adds to the input of a network; the last says what is not known."""
        return self.width(facts) + 1

    def width(self, facts: ColumnFacts) -> int:
        return int(facts.statistics[0])

    def is_one_value(self, facts: ColumnFacts, text: str) -> bool:
        return True  # a path may have commas

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        import numpy as np

        found = []
        for part in parts_of(values):
            first = np.asarray(part[:, 0].reshape(len(part), math.prod(part.shape[2:])))
            found.append((first >= 0).any(1) if first.dtype.kind in "iu" else np.isfinite(first).any(1))
        return np.concatenate(found)

    def evidence(self, facts: ColumnFacts) -> str:
        channels, height, width = self.shape(facts)
        return f"{width}x{height}, {plural(channels, 'channel')}"

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.concatenate([as_floats(values) for values in columns], 1))

    def parse(self, facts: ColumnFacts, word: object) -> str:
        """Return a picture that `picture_text` wrote. RequestError for anything else."""
        if not isinstance(word, str) or word.count("|") != 2:
            raise RequestError(f"{facts.name} = {word!r:.60} is not a picture; give a file, a folder or an array")
        if word != _hidden(facts) and (shape := _shape_of(word)) != self.shape(facts):
            raise RequestError(f"{facts.name}: the picture has {shape}, and this run needs {self.shape(facts)}")
        return word

    def usual(self, facts: ColumnFacts) -> tuple[str, ...]:
        return (_hidden(facts),)

    def listed(self, values: NDArray[Any]) -> tuple[str, ...]:
        return tuple(picture_text(each) for each in as_floats(values))

    def stacked(self, values: Sequence[Any]) -> NDArray[Any]:
        import numpy as np

        return np.stack([picture_of(each) for each in values])

    def show(self, facts: ColumnFacts, value: str) -> str:
        """Return the name of the picture; "" if it is not told."""
        name = value.partition("|")[0]
        return "" if name == _NOT_TOLD else name or "held-out"


class SecondImageKind(ImageKind):
    """An image of a second source, in the units of that source."""

    name = "image"

    def _fits(self, facts: ColumnFacts) -> bool:
        count = int(facts.statistics[0])
        ends = facts.statistics[3:]
        return len(ends) == 2 * count and not facts.categories and all(a < b for a, b in zip(ends, ends[count:]))

    def facts(self, column: Column) -> ColumnFacts:
        """Return the shape, and the least and largest value of each channel; those of bytes are 0 and 255.

        Of a set with buckets they are those of its images as they are in the buckets: scaled to one size, images have
        less extreme values.
        """
        import numpy as np

        values = column.values
        channels = values.shape[1]
        low, high = np.zeros(channels), np.full(channels, 255.0)
        if values.dtype.kind == "f":
            parts = [part for part in parts_of(values) if len(part)]
            low, high = (
                end.reduce([end.reduce(part, (0, 2, 3)) for part in parts]).astype(np.float64)  # without NaN
                for end in (np.fmin, np.fmax)
            )
        high = np.where(high > low, high, low + 1)
        return ColumnFacts(column.name, column.kind, (), tuple(map(float, [*values.shape[1:], *low, *high])))


class MaskKind(ImageKind):
    """A mask of a second source: int8 or int16 [N, 1, H, W], the number of a category at each pixel."""

    name = "mask"
    smooth = False

    def _fits(self, facts: ColumnFacts) -> bool:
        names = facts.categories
        one = facts.statistics[0] == 1 and len(facts.statistics) == 3
        return one and 2 <= len(names) <= MOST_MASK_VALUES and len({*names}) == len(names)

    def inputs(self, facts: ColumnFacts) -> int:
        return len(facts.categories) + 1

    def evidence(self, facts: ColumnFacts) -> str:
        _, height, width = self.shape(facts)
        names = ", ".join(facts.categories[:8]) + ", …" * (len(facts.categories) > 8)
        return f"{width}x{height}, {len(facts.categories)} labels: {names}"


class DegradeKind(ImageKind):
    """The image made smaller by area averaging, and enlarged to its own size again."""

    name = "degrade"
    made = True

    def _fits(self, facts: ColumnFacts) -> bool:
        numbers = facts.statistics
        return not facts.categories and len(numbers) == 4 and numbers[3] >= 2 and numbers[3] == int(numbers[3])

    def facts(self, column: Column) -> ColumnFacts:
        factor: int = getattr(column.values, "factor", 0)
        return ColumnFacts(column.name, column.kind, (), tuple(map(float, [*column.values.shape[1:], factor])))

    def evidence(self, facts: ColumnFacts) -> str:
        _, height, width = self.shape(facts)
        factor = int(facts.statistics[3])
        return f"{width // factor}x{height // factor} of {width}x{height}, made here"


class GreyKind(ImageKind):
    """The brightness of an image in colour."""

    name = "grey"
    made = True

    def evidence(self, facts: ColumnFacts) -> str:
        return "the image without its colours, made here"


class HoleKind(ImageKind):
    """The image without a rectangle, which is not known."""

    name = "hole"
    made = True

    def evidence(self, facts: ColumnFacts) -> str:
        return "the image without a rectangle, made here"


IMAGE_KINDS: dict[str, ImageKind] = {
    kind.name: kind for kind in (SecondImageKind(), MaskKind(), DegradeKind(), GreyKind(), HoleKind())
}
MADE = tuple(name for name, kind in IMAGE_KINDS.items() if kind.made)
"""Kinds of the conditions that are made of the image; they are also the names of their columns."""


def has_bytes(facts: ColumnFacts) -> bool:
    """Return True if a second image has the values 0 to 255 of pictures in all of its channels."""
    channels = int(facts.statistics[0])
    return facts.statistics[3:] == (0.0,) * channels + (255.0,) * channels


def image_columns(columns: Sequence[ColumnFacts]) -> list[ColumnFacts]:
    """Return those of the columns that are images, in their order, which is that of `Conditions.image`."""
    return [one for one in columns if one.kind in IMAGE_KINDS]


def at_sides(columns: Sequence[ColumnFacts], height: int, width: int) -> tuple[ColumnFacts, ...]:
    """Return the columns with conditions that are images of another height and width."""
    return tuple(
        replace(one, statistics=(one.statistics[0], float(height), float(width), *one.statistics[3:]))
        if one.kind in IMAGE_KINDS
        else one
        for one in columns
    )


def image_spans(columns: Sequence[ColumnFacts]) -> list[tuple[ColumnFacts, slice]]:
    """Return each column that is an image, with its channels in `Conditions.image`."""
    found, start = [], 0
    for one in image_columns(columns):
        width = IMAGE_KINDS[one.kind].width(one)
        found.append((one, slice(start, start + width)))
        start += width
    return found


def as_floats(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return stored values as float32, NaN where they are not known: below 0 in a type of integers."""
    import numpy as np

    floats = np.asarray(values).astype(np.float32)
    if values.dtype.kind == "i":
        floats[floats < 0] = np.nan
    return floats


class Picture(str):
    """A picture as text, which stands for it in the conditions of samples: NAME|CxHxW|values."""

    __slots__ = ()


def picture_text(values: NDArray[Any], name: str = "") -> Picture:
    """Return a picture [C, H, W] as text."""
    import numpy as np

    floats = np.ascontiguousarray(values, "<f4")
    shape = "x".join(map(str, floats.shape))
    return Picture(f"{sanitize(name).replace('|', '_')}|{shape}|{base64.b64encode(floats.tobytes()).decode()}")


def picture_of(text: str) -> NDArray[np.float32]:
    """Return the picture [C, H, W] that `picture_text` wrote; NaN where nothing is told."""
    import numpy as np

    name, _, data = text.split("|")
    if name == _NOT_TOLD:
        return np.full(_shape_of(text), np.nan, np.float32)
    return np.frombuffer(base64.b64decode(data), "<f4").reshape(_shape_of(text)).astype(np.float32)


def _shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(side) for side in text.split("|")[1].split("x"))


def _hidden(facts: ColumnFacts) -> str:
    return f"{_NOT_TOLD}|{'x'.join(str(int(side)) for side in facts.statistics[:3])}|"
