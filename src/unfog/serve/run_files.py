"""Files of a run folder as the page needs them: by numbers, with a limit on what is read, no link followed.

Pictures are decoded by the guarded decoder and encoded anew, so that no byte of a file is passed on.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import shutil
import socket
import threading
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from unfog.data.bit_depth import is_deep
from unfog.data.decode import to_eight_bits, turned_upright
from unfog.data.full_depth.two_values import spread_two_values
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import image_error, open_bytes
from unfog.errors import RequestError
from unfog.files.safe_files import check_folder, read_file
from unfog.process.heartbeat import Heartbeat
from unfog.reporting.image_grids import MOST_PIXELS, read_png
from unfog.reporting.records import finite_number, flatten
from unfog.text import without_secrets
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts

T = TypeVar("T")

_LARGEST_JSON, _LARGEST_CONFIG = 2**22, 2**20  # bytes
_MOST_CHECKPOINTS = 1000
_UNREADABLE = (OSError, ValueError, RecursionError)
_MOST_SIDE = 16_383  # pixels of a WebP
_KEPT_BYTES = 2**26  # of encoded pictures
_LOSSY_FROM = 2**22  # pixels; a lossless picture of that size takes a second to encode


def stat_of(path: str | Path) -> tuple[int, int] | None:
    """Return time of the last change in ns and size of a file; None if it is missing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def machine_use(run: Path) -> dict[str, int]:
    """Return `memory` of the process of a run that runs here, and `free` on its disk, in bytes, as far as known."""
    found, beat = {}, Heartbeat.read(run) or {}
    with suppress(OSError, ValueError, TypeError, IndexError):
        if beat.get("host") == socket.gethostname():
            pages = int(Path(f"/proc/{int(beat['pid'])}/statm").read_text().split()[1])  # Linux alone has it
            found["memory"] = pages * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        found["free"] = shutil.disk_usage(run).free
    return found


def numbered_files(run: Path, folder: str, suffix: str = ".png") -> tuple[int, ...]:
    """Return the steps that files or folders of a run's folder are named by, in order. A linked folder has none."""
    with suppress(OSError):
        if check_folder(run / folder, run):
            names = [name.removesuffix(suffix) for name in os.listdir(run / folder) if name.endswith(suffix)]
            return tuple(sorted({int(name) for name in names if name.isascii() and name.isdecimal()}))
    return ()


def read_json(path: Path, run: Path) -> Any:
    """Return the content of a JSON file in a run; None if it is missing, a link, too large or damaged."""
    try:
        return json.loads(read_file(path, run, _LARGEST_JSON))
    except _UNREADABLE:
        return None


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that are whole: their manifest is written last."""
    # Each costs a look at a file, and a stranger's folder may have any number of them.
    steps = numbered_files(run, "checkpoints", "")[-_MOST_CHECKPOINTS:]
    return [step for step in steps if stat_of(run / "checkpoints" / f"{step:08d}" / "manifest.json")]


def saved_values(run: Path, metric: str) -> list[tuple[float, int]]:
    """Return (value of the metric, step) of the checkpoints at which it was measured."""
    found = []
    for step in checkpoint_steps(run):
        manifest = read_json(run / "checkpoints" / f"{step:08d}" / "manifest.json", run)
        if isinstance(manifest, Mapping):
            chosen_by = str(manifest.get("chosen_by", "held_out_loss")).partition(":")[0]
            value = finite_number(manifest.get("value", manifest.get("held_out_loss")))
            if chosen_by == metric and math.isfinite(value):
                found.append((value, step))
    return found


def read_settings(run: Path) -> dict[str, Any]:
    """Return the settings of config.toml by dotted name, without passwords of URLs; {} if it cannot be read."""
    return plain_settings(_config(run))


def _config(run: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(run / "config.toml", run, _LARGEST_CONFIG).decode("utf-8-sig"))
    except _UNREADABLE:
        return {}


def conditions_of(run: Path) -> ConditionFormat:
    """Return the columns of a run, without its classes; none if its configuration does not have them."""
    with suppress(RequestError, TypeError, ValueError, KeyError, AttributeError):  # somebody else may have written it
        return ConditionFormat(columns=tuple(_column(one) for one in _config(run).get("columns", ())))
    return ConditionFormat()


def _column(one: Mapping[str, Any]) -> ColumnFacts:
    names, statistics = (tuple(one.get(name, ())) for name in ("categories", "statistics"))
    return ColumnFacts(str(one["name"]), str(one["kind"]), tuple(map(str, names)), tuple(map(float, statistics)))


def read_source(run: Path) -> str:
    """Return the source of a run, with its passwords; "" if it cannot be read."""
    try:
        # With the mark that Windows editors put at the beginning, which TOML does not know.
        text = read_file(run / "config.toml", run, _LARGEST_CONFIG).decode("utf-8-sig")
        # It stands before the sections, whose parsing takes milliseconds for each run.
        return str(tomllib.loads(text.partition("\n[")[0]).get("source", ""))
    except _UNREADABLE:
        return ""


def plain_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested table by dotted name, as JSON has them and without passwords of URLs."""
    return {name: _plain(value) for name, value in flatten(tree)}


def _plain(value: Any) -> Any:
    """Return a value of TOML as JSON has it, without passwords of URLs. Dates become text."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float) else without_secrets(str(value))


class PictureCache:
    """Encoded pictures by file and time of change.

    Pictures are decoded in a thread of their own, one at a time: each may take a gigabyte, and other answers must not
    wait for it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()  # of `_kept`, for microseconds
        self._thread = ThreadPoolExecutor(1, "pictures")

    async def decode(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread of pictures."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def webp(self, path: Path, run: Path) -> tuple[bytes, str]:
        """Return a picture of a run as WebP, and a tag that changes with the file.

        Raises:
            FileNotFoundError: there is no such file.
            RequestError: it cannot be decoded, is not a PNG or has over 64 MB.
        """
        found = await asyncio.to_thread(stat_of, path)
        if found is None:
            raise FileNotFoundError(f"{path.name} is not there")
        # With time and size, as a sample of a step is drawn anew when a run goes on from an older checkpoint.
        key = (path, *found)
        encoded = self._find(key)
        if encoded is None:
            encoded = await self.decode(lambda: self._find(key) or self._keep(key, read_webp(path, run)))
        return encoded, f"{found[0]:x}-{found[1]:x}"

    def _find(self, key: tuple[object, ...]) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[object, ...], encoded: bytes) -> bytes:
        with self._lock:
            self._kept[key] = encoded
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return encoded


def read_webp(path: Path, run: Path) -> bytes:
    """Encode a PNG of a run as WebP, pixels alone. Raises RequestError if the file is not a PNG."""
    try:
        image = read_png(path, run).convert("RGB")  # Unfog writes no others, and other decoders take any time
    except ValueError as error:
        raise RequestError(f"{path.name} cannot be shown: {error}") from None
    return _encode_webp(image, path.name)


def decode_picture(data: bytes, name: str) -> Image.Image:
    """Return the pixels of an image file, upright and RGB. RequestError if it cannot be decoded, or has too many.

    An image of two values deeper than 8 bits, which is a mask, becomes black and white.
    """
    try:
        image = open_bytes(data, name)
        if image.width * image.height > MOST_PIXELS:
            raise RequestError(f"{name} has over {MOST_PIXELS / 1e6:.0f} megapixels")
        if is_deep(image):
            with suppress(ImageError):  # a mask of 0 and 1, or of 0 and 255, in 16 bits
                white = spread_two_values(lambda: open_bytes(data, name)).values
                return Image.fromarray((white * 255).astype(np.uint8)).convert("RGB")
        return turned_upright(to_eight_bits(image).convert("RGB"))
    except RequestError:
        raise
    except Exception as error:  # Pillow's readers fail in many ways on a damaged file
        raise RequestError(f"{name} cannot be shown: it is {image_error(error)}") from None


def _encode_webp(image: Image.Image, name: str) -> bytes:
    """Encode RGB pixels as WebP, lossless up to four megapixels."""
    lossless = image.width * image.height <= _LOSSY_FROM
    return webp(image, name, lossless=lossless, quality=20 if lossless else 90, method=0 if lossless else 2)


def webp(image: Image.Image, name: str, **options: Any) -> bytes:
    """Return an image as WebP. RequestError if it has too many pixels on a side for that."""
    if max(image.size) > _MOST_SIDE:
        raise RequestError(f"{name} cannot be shown: a side of it has over {_MOST_SIDE:,} pixels")
    encoded = io.BytesIO()
    image.save(encoded, "WEBP", **options)
    return encoded.getvalue()
