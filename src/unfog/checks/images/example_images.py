"""Figures and names of example images for findings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unfog.checks.images.near_duplicates import Indices, thumbnails
from unfog.checks.images.pixel_statistics import ImageScan
from unfog.reporting.findings import Figure
from unfog.reporting.image_grids import Pixels, grid
from unfog.text import sanitize

_LARGEST = 96  # pixels that a larger image is shrunk to
_GROUPS, _MEMBERS, _IMAGES = 8, 6, 24
_LETTERS = 24


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as "a.png, b.png, c.png, ..."."""
    return ", ".join([*map(sanitize, names[:most]), *["..."] * (len(names) > most)])


def format_share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({format_percent(part / max(whole, 1))})"


def format_percent(fraction: float) -> str:
    """Return a fraction as "34%", "1.2%" or "0.05%"."""
    return f"{100 * fraction:.2g}%" if fraction < 0.0995 else f"{100 * fraction:.0f}%"


def images_figure(scan: ImageScan, rows: Indices, title: str) -> Figure:
    """Show the first 24 images of `rows`."""
    return Figure(title, grid(_shrink(scan, rows[:_IMAGES]), columns=12))


def groups_figure(scan: ImageScan, groups: Sequence[Indices], title: str, caption: str = "") -> Figure:
    """Show up to six images of each of the first eight groups, a group a row, labelled by the first image's name."""
    first = [group[:_MEMBERS] for group in groups[:_GROUPS]]
    labels = [_name_end(sanitize(scan.name(group[0]))) for group in first for _ in group]
    return Figure(title, grid(_shrink(scan, np.concatenate(first)), columns=_MEMBERS, labels=labels), caption=caption)


def _name_end(name: str) -> str:
    return name if len(name) <= _LETTERS else f"…{name[1 - _LETTERS :]}"  # names of a set differ at their end


def _shrink(scan: ImageScan, rows: Indices) -> Pixels:
    """Return the images as uint8 [n, H, W, C]."""
    order = np.argsort(rows)  # reads a file from front to back
    pixels = np.empty_like(found := scan.pixels(rows[order]))
    pixels[order] = found
    if pixels.shape[-1] > _LARGEST:
        pixels = np.rint(thumbnails(pixels, _LARGEST)).astype(np.uint8)
    return pixels.transpose(0, 2, 3, 1)
