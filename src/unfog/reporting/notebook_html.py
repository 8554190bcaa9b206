"""HTML of images, tables and lines of text, as notebooks show the result of a cell."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from unfog.reporting.image_grids import Pixels, encode_png, grid, png_data_uri

_SHOWN = 36  # images of a grid
_CELL = 128  # pixels of the longest side of one
_WIDTH = 800  # pixels of a grid that is read from a file


def figure(images: Pixels, caption: str) -> str:
    """Return HTML with a grid of the first images, uint8 [N, H, W, C], made smaller where they are large."""
    longest = max(images.shape[1:3])
    cells = np.asarray(images[:_SHOWN])
    if longest > _CELL:
        height, width = (max(1, side * _CELL // longest) for side in images.shape[1:3])
        small = [
            Image.fromarray(cell[..., 0] if cell.shape[2] == 1 else cell).resize((width, height)) for cell in cells
        ]
        cells = np.stack([np.asarray(one).reshape(height, width, -1) for one in small])
    encoded = base64.b64encode(encode_png(grid(cells))).decode()
    more = f" (the first {_SHOWN} of {len(images):,})" if len(images) > _SHOWN else ""
    return _figure(f"data:image/png;base64,{encoded}", caption + more)


def table(rows: Mapping[str, object], image: Path | None = None, caption: str = "") -> str:
    """Return HTML of names and values, with the image of a file below, if it can be read."""
    lines = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
    found = None if image is None else png_data_uri(image, _WIDTH)
    return f"<table>{''.join(lines)}</table>{_figure(found[0], caption) if found else ''}"


def preformatted(lines: Sequence[str]) -> str:
    """Return HTML of lines whose columns stand below each other."""
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _figure(source: str, caption: str) -> str:
    return f'<figure><img src="{source}"><figcaption>{html.escape(caption)}</figcaption></figure>'
