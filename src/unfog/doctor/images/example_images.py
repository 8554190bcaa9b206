"""How findings about images speak: names, shares, and pictures side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unfog.data.dataset import Dataset
from unfog.doctor.images.near_duplicates import Indices, thumbnails
from unfog.doctor.images.pixel_statistics import ImageScan
from unfog.reporting.findings import Figure
from unfog.reporting.image_grids import grid
from unfog.text import sanitize

MOST_NAMES = 2000
"""Names that a finding's facts list, at most."""

_PICTURE = 96  # pixels that a larger picture is shrunk to
_GROUPS, _MEMBERS, _PICTURES = 8, 6, 24
_LETTERS = 24


def list_names(names: Sequence[str], most: int = 3) -> str:
    """The first names, fit for a line: "a.png, b.png, c.png, ..."."""
    return ", ".join([*map(sanitize, names[:most]), *["..."] * (len(names) > most)])


def image_names(prepared: Dataset, rows: Indices) -> list[str]:
    """Of rows, MOST_NAMES at most, that count the training images first and then those held out."""
    train, sets = len(prepared.train), (prepared.train.names, prepared.held_out.names)
    return [sets[row >= train][row - train * (row >= train)] for row in rows[:MOST_NAMES].tolist()]


def format_share(part: int, whole: int) -> str:
    """ "12 of 3,000 (0.4%)"."""
    return f"{part:,} of {whole:,} ({format_percent(part / max(whole, 1))})"


def format_percent(fraction: float) -> str:
    """A share as "34%", "1.2%", "0.05%"."""
    return f"{100 * fraction:.2g}%" if fraction < 0.0995 else f"{100 * fraction:.0f}%"


def images_figure(survey: ImageScan, rows: Indices, title: str, caption: str = "") -> Figure:
    """The first two dozen of these images, as the network sees them."""
    return Figure(title, image=grid(_shrunk(survey, rows[:_PICTURES]), columns=12), caption=caption)


def groups_figure(survey: ImageScan, groups: Sequence[Indices], title: str, caption: str = "") -> Figure:
    """The first eight groups, one a row, six pictures of each at most, with the name of the first."""
    first = [group[:_MEMBERS] for group in groups[:_GROUPS]]
    labels = [_end(sanitize(survey.name(group[0]))) for group in first for _ in group]
    images = _shrunk(survey, np.concatenate(first))
    return Figure(title, image=grid(images, columns=_MEMBERS, labels=labels), caption=caption)


def _end(name: str) -> str:
    """As much as fits, of the end, where names of the same kind differ."""
    return name if len(name) <= _LETTERS else f"…{name[1 - _LETTERS :]}"


def _shrunk(survey: ImageScan, rows: Indices) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [n, H, W, C]."""
    order = np.argsort(rows)  # read in the order of the file
    pixels = np.empty_like(found := survey.pixels(rows[order]))
    pixels[order] = found
    if pixels.shape[-1] > _PICTURE:
        pixels = np.rint(thumbnails(pixels, _PICTURE)).astype(np.uint8)
    return pixels.transpose(0, 2, 3, 1)
