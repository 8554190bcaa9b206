"""Pictures for the page: decoded by the guarded decoder and encoded anew, so that nothing of a file is passed on."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from pathlib import Path

from PIL import Image

from unfog.data.sources.image_files import image_error, open_bytes
from unfog.errors import RequestError
from unfog.safe_files import read_file
from unfog.serve.run_files import stat_of

_LARGEST_FILE = 2**28  # bytes
_MOST_PIXELS = 2**26
_KEPT_BYTES = 2**26  # of encoded pictures
_LOSSY_FROM = 2**22  # pixels; a lossless picture of that size takes a second to encode


class PictureCache:
    """Encoded pictures by file and time of change. One is decoded at a time, as each may take a gigabyte."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def webp(self, path: Path, run: Path) -> tuple[bytes, str]:
        """Return a picture of a run as WebP, and a tag that changes with the file.

        Raises:
            FileNotFoundError: there is none.
            RequestError: it cannot be decoded.
        """
        found = stat_of(path)
        if found is None:
            raise FileNotFoundError(f"{path.name} is not there")
        # With time and size, as a sample of a step is drawn anew when a run goes on from an older checkpoint.
        key = (path, *found)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = _encode_webp(read_file(path, _LARGEST_FILE, run), path.name)
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return self._kept[key], f"{found[0]:x}-{found[1]:x}"


def decode_picture(data: bytes, name: str) -> Image.Image:
    """Return the pixels of an image file, RGB. RequestError if it cannot be decoded, or has too many."""
    try:
        image = open_bytes(data, name)
        if image.width * image.height > _MOST_PIXELS:
            raise RequestError(f"{name} has over {_MOST_PIXELS / 1e6:.0f} megapixels")
        return image.convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # Pillow's readers fail in many ways on a damaged file
        raise RequestError(f"{name} cannot be shown: it is {image_error(error)}") from None


def _encode_webp(data: bytes, name: str) -> bytes:
    """Decode an image file, and encode its pixels alone as WebP, lossless up to four megapixels."""
    image = decode_picture(data, name)
    encoded = io.BytesIO()
    lossless = image.width * image.height <= _LOSSY_FROM
    image.save(encoded, "WEBP", lossless=lossless, quality=20 if lossless else 90, method=0 if lossless else 2)
    return encoded.getvalue()
