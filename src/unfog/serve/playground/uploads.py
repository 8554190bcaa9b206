"""Pictures that the page uploads: decoded by the guarded decoder, kept as pixels alone, and the settings inside."""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from PIL import PngImagePlugin

from unfog.data.sources.image_files import open_bytes
from unfog.errors import RequestError
from unfog.reporting.image_grids import Pixels
from unfog.serve.image_responses import decode_picture

_KEPT, _MOST_PIXELS, _MOST_TEXT = 24, 2**24, 2**16


class Upload(NamedTuple):
    """An uploaded picture, and the settings that are stored in its file."""

    pixels: Pixels
    """uint8 [H, W, 3]."""
    settings: dict[str, Any] | None
    """What Unfog has written into it: version, run, number of the picture, settings. Not checked yet."""


class Uploads:
    """The newest uploads by number. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Upload] = OrderedDict()
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    def __getitem__(self, number: int) -> Upload:
        """Return an upload. RequestError if it is not there any more."""
        try:
            return self._kept[number]
        except KeyError:
            raise RequestError("this upload is not there any more; upload the picture again") from None

    def add(self, data: bytes) -> tuple[int, Upload]:
        """Decode a picture. RequestError if it cannot be decoded, or has too many pixels."""
        settings = _read_settings(data)
        image = decode_picture(data, "the upload")
        if image.width * image.height > _MOST_PIXELS:
            raise RequestError(f"the upload has over {_MOST_PIXELS / 1e6:.0f} megapixels; make it smaller")
        upload = Upload(np.asarray(image), settings)
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = upload
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return number, upload


def _read_settings(data: bytes) -> dict[str, Any] | None:
    """Return the settings that were written into a PNG by the playground; None if there are none."""
    with suppress(Exception):  # a stranger's file; `decode_picture` says what is wrong with it
        image = open_bytes(data, "the upload")
        text = image.text.get("Unfog", "") if isinstance(image, PngImagePlugin.PngImageFile) else ""
        if 0 < len(text) < _MOST_TEXT:
            found = json.loads(text)
            if isinstance(found, dict) and isinstance(found.get("settings"), dict):
                return {name: found.get(name) for name in ("unfog", "run", "picture", "settings")}
    return None
