"""Values that an array's attributes describe as packed: scale_factor, add_offset, and numbers for missing values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.errors import RequestError

_MISSING = ("_FillValue", "missing_value")


class Packing(NamedTuple):
    """Linear map from stored numbers to values, scale x number + offset, and the numbers that mean missing values."""

    scale: float
    offset: float
    missing: tuple[float, ...]

    @classmethod
    def of(cls, attributes: Mapping[str, Any], place: str) -> Packing | None:
        """Return the packing that attributes of the CF conventions describe, None without.

        RequestError if an attribute is not a number.
        """
        numbers = {name: _numbers(attributes[name], name, place) for name in _MISSING if name in attributes}
        missing = tuple(value for values in numbers.values() for value in values if not np.isnan(value))
        scales = [_numbers(attributes.get(name, usual), name, place) for name, usual in _USUAL]
        if any(len(values) != 1 or not np.isfinite(values[0]) for values in scales) or scales[0][0] == 0:
            raise RequestError(
                f"{place} has scale_factor {scales[0]} and add_offset {scales[1]}; each must be one number, and the "
                "first not 0"
            )
        found = cls(scales[0][0], scales[1][0], tuple(dict.fromkeys(missing)))
        return None if found == (1, 0, ()) else found

    def unpack(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return values of floating point, NaN where they are missing."""
        # In the type of floating point, as 1e20 is another number there; integers may be beyond their type.
        kind = stored.dtype if stored.dtype.kind == "f" else np.dtype(np.float64)
        with np.errstate(over="ignore"):
            gone = np.isin(stored.astype(kind), np.asarray(self.missing).astype(kind)) if self.missing else None
        # float32 alone holds no more than 24 bits of integers, nor of a scaled one with a large offset.
        values: NDArray[Any] = stored.astype(np.float64)
        if (self.scale, self.offset) != (1, 0):
            values = values * self.scale + self.offset
        if gone is not None:
            values[gone] = np.nan
        return values.astype(np.float32) if stored.dtype.itemsize <= 4 else values

    @property
    def line(self) -> str:
        """A line that says how values are read."""
        said = []
        if (self.scale, self.offset) != (1, 0):
            said.append(
                f"values are {self.scale:.10g} x the stored numbers + {self.offset:.10g}, as its attributes say"
            )
        if self.missing:
            said.append(f"{', '.join(f'{value:.10g}' for value in self.missing)} means that a value is missing")
        return "; ".join(said)


_USUAL = (("scale_factor", 1.0), ("add_offset", 0.0))


def _numbers(value: Any, name: str, place: str) -> tuple[float, ...]:
    values = np.asarray(value)
    if values.dtype.kind not in "biuf" or values.size > 16:
        raise RequestError(f"{place} has {name} = {str(value)[:40]}, which is not a number; write that attribute anew")
    return tuple(float(one) for one in values.ravel())
