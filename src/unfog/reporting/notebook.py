"""Text and HTML in notebooks: progress below a cell; images, tables and lines. Imports nothing heavy at once."""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unfog.reporting.image_grids import Pixels

_SHOWN = 36  # images of a grid
_CELL = 128  # pixels of the longest side of one
_WIDTH = 800  # pixels of a grid that is read from a file


class LiveText:
    """A text below a cell, which later ones replace; an empty one takes it away."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        from IPython import display  # type: ignore[import-not-found, unused-ignore]

        self._shown, data = text, {"text/plain": text}
        with suppress(Exception):  # the connection to the page may be lost, which must not stop the work
            if self._handle is None:
                display_data: Any = display.display
                self._handle = display_data(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)
            if not text:
                self._handle = None  # the next text is below the cell that runs then

    @classmethod
    def available(cls) -> bool:
        """Return True in a process that runs the cells of a notebook."""
        # Without importing IPython, which takes half a second: where a notebook runs, it is there.
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
        return getattr(shell, "kernel", None) is not None


def figure(images: Pixels, caption: str) -> str:
    """Return HTML with a grid of the first images, uint8 [N, H, W, C], made smaller where they are large."""
    import numpy as np

    from unfog.reporting.image_grids import grid
    from unfog.values.image_format import to_pillow

    longest = max(images.shape[1:3])
    cells = np.asarray(images[:_SHOWN])
    if longest > _CELL:
        height, width = (max(1, side * _CELL // longest) for side in images.shape[1:3])
        small = [to_pillow(cell).resize((width, height)) for cell in cells]
        cells = np.stack([np.asarray(one).reshape(height, width, -1) for one in small])
    more = f" (the first {_SHOWN} of {len(images):,})" if len(images) > _SHOWN else ""
    return picture(grid(cells), caption + more)


def picture(pixels: Pixels, caption: str) -> str:
    """Return HTML with a picture, uint8 [H, W, 3], at its own size."""
    from unfog.reporting.image_grids import encode_png

    return _figure(f"data:image/png;base64,{base64.b64encode(encode_png(pixels)).decode()}", caption)


def table(rows: Mapping[str, object], image: Path, root: Path, caption: str) -> str:
    """Return HTML of names and values, with the PNG in a file below `root` at the end, if it can be read."""
    from unfog.reporting.image_grids import png_data_uri

    lines = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
    found = png_data_uri(image, root, _WIDTH)
    return f"<table>{''.join(lines)}</table>{_figure(found[0], caption) if found else ''}"


def preformatted(lines: Sequence[str]) -> str:
    """Return HTML of lines whose columns stand below each other."""
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _figure(source: str, caption: str) -> str:
    return f'<figure><img src="{source}"><figcaption>{html.escape(caption)}</figcaption></figure>'
