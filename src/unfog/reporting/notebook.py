"""Live text in notebooks: progress below a cell, which later texts replace in place. Imports nothing heavy."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


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
