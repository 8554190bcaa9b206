"""`Slices`, the cut of volumes to images along an axis, of one slice each or with its neighbours as channels."""

from __future__ import annotations

import re
from typing import NamedTuple

from unfog.errors import RequestError
from unfog.values.image_format import MOST_CHANNELS

AXIAL = "axial"
"""Value of `data.slices` by default."""
PLANES = (AXIAL, "coronal", "sagittal", "0", "1", "2")
_SLICES = re.compile(rf"({'|'.join(PLANES)})(?:\+([0-9]{{1,2}}))?")


class Slices(NamedTuple):
    """The cut of volumes that `data.slices` asks for."""

    plane: str
    """One of `PLANES`: a plane of the patient, or the axis of the file along which slices follow each other."""
    neighbours: int
    """Slices on each side of one, which are further channels."""

    @classmethod
    def of(cls, text: str) -> Slices:
        """Parse a text such as "coronal" or "axial+1". RequestError if it is another text."""
        match = _SLICES.fullmatch(text)
        found = cls(match[1], int(match[2] or 0)) if match else None
        if found is None or found.thickness > MOST_CHANNELS:
            raise RequestError(
                f"data.slices = {text!r:.60} is not {', '.join(PLANES[:-1])} or {PLANES[-1]}; +N after it, as in "
                f"axial+1, adds N slices on each side as channels, up to {MOST_CHANNELS} channels in all"
            )
        return found

    @property
    def thickness(self) -> int:
        """The number of slices in an image."""
        return 2 * self.neighbours + 1
