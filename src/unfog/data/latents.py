"""Latents in place of pixels: encoded once, kept in the cache, and read like images.

An entry is a folder named by a hash of the images, the codec and the copies. It is made beside its place and renamed
when whole; what an interruption leaves is gone on with. All of it may be deleted at any time, and is made anew.
An image that another stood in for, as it could not be decoded or its shard was given up, is tried again by whoever
finds the entry: so it is missed, and named, by those alone who cannot have it either.

    latents.f16    float16 [N, K, C, H, W]: of each image one copy, or two, the second of the image mirrored
    rows.i64       int64 [N], which image each one is: another than its place where that could not be decoded
    latents.json   {"format", "shape"}
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.cache import cache_folder, held, remove_stale_entries, room
from unfog.data.dataset import ImageSet
from unfog.data.packs.pack_journal import BusyError, locked
from unfog.errors import RequestError, RunError
from unfog.locks import LOCK
from unfog.sharded_rng import draw_rows

FORMAT = 1
IN_MEMORY = 2**30
"""Bytes of latents that are kept in memory where the cache cannot be written."""
_SYNCED = 32  # batches between two lines on how far it is
_WAIT = 0.2
_FACTS, _LATENTS, _ROWS, _DONE = "latents.json", "latents.f16", "rows.i64", "done.json"

Encode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""Images uint8 [B, C, H, W] -> latents [B, c, h, w]; the same to the bit for the same images."""


class LatentArrays(NamedTuple):
    """The latents of some sets of images, one set behind the other."""

    latents: NDArray[np.float16]
    """[N, K, C, H, W]."""
    rows: NDArray[np.int64]
    """[N], which image of its set each one is."""


class EncodeJob(NamedTuple):
    """What to encode, and how."""

    sets: Sequence[ImageSet]
    shape: tuple[int, int, int]
    """Of one latent."""
    copies: int
    """1, or 2 to encode each image mirrored as well."""
    encode: Encode
    batch: int
    """Images at once. Always the same, as sums of floating-point numbers depend on it."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of all of it."""
        return (sum(map(len, self.sets)), self.copies, *self.shape)

    def batches(self, done: int) -> Iterator[tuple[NDArray[np.float16], NDArray[np.int64]]]:
        """(latents [B, K, C, H, W], rows [B]) of batch after batch, from image number `done` on, where one begins."""
        begin = 0
        for images in self.sets:
            for first in range(0, len(images), self.batch):
                if begin + first >= done:
                    pixels, _, rows = images.take(np.arange(first, min(first + self.batch, len(images))))
                    yield self._encoded(pixels), rows
            begin += len(images)

    def _encoded(self, pixels: NDArray[np.uint8]) -> NDArray[np.float16]:
        copies = [pixels, np.ascontiguousarray(pixels[..., ::-1])][: self.copies]
        latents = np.stack([self.encode(copy) for copy in copies], axis=1)
        with np.errstate(over="ignore"):
            half = latents.astype(np.float16)
        if not np.isfinite(half).all():
            said = "beyond what float16 holds" if np.isfinite(latents).all() else "not finite"
            raise RunError(f"the codec makes latents that are {said}; take another one")
        return half


def encoded(key: str, wanted: EncodeJob, progress: Callable[[int, int], None]) -> LatentArrays:
    """The entry of that key, or a new one. `progress`: called with (images done, images in all); it may raise.

    Raises:
        RequestError: the cache cannot be written, and the latents are too many for memory.
        RunError: the disk refuses; the codec's latents are no numbers.
    """
    folder = cache_folder() / f"latents-{key}"
    needed, partial = 2 * int(np.prod(wanted.whole)), folder.with_name(f"{folder.name}.partial")
    found = _found(folder, wanted, progress)
    if found is None:
        remove_stale_entries(cache_folder())
    while found is None:
        free = room()
        if free is None or free + held(partial) < needed:
            if needed <= IN_MEMORY:
                return in_memory(wanted, progress)
            why = "cannot be written" if free is None else f"has {free / 1e9:.1f} GB free"
            raise RequestError(f"latents take {needed / 1e9:.1f} GB and {cache_folder()} {why}; set UNFOG_CACHE")
        try:
            found = _make(folder, partial, wanted, progress)
        except BusyError:
            time.sleep(_WAIT)
            progress(0, wanted.whole[0])
            found = _found(folder, wanted, progress)
        except OSError as error:
            raise RunError(
                f"{folder} could not be written ({error.strerror}); make room, and do the same again"
            ) from error
    return found


def in_memory(wanted: EncodeJob, progress: Callable[[int, int], None]) -> LatentArrays:
    """The latents of all images, kept nowhere."""
    latents, rows, done = np.empty(wanted.whole, np.float16), np.empty(wanted.whole[0], np.int64), 0
    for some, which in wanted.batches(0):
        latents[done : done + len(some)], rows[done : done + len(some)] = some, which
        done += len(some)
        progress(done, len(rows))
    return LatentArrays(latents, rows)


def _found(folder: Path, wanted: EncodeJob, progress: Callable[[int, int], None]) -> LatentArrays | None:
    """The entry in a folder, mapped; None if there is none of these images, and then what lies there is removed."""
    entry = _opened(folder, wanted.whole)
    if entry is None or _still(entry.rows, wanted, progress):
        return entry
    shutil.rmtree(folder, ignore_errors=True)  # those who have it mapped keep it
    return None


def _still(rows: NDArray[np.int64], wanted: EncodeJob, progress: Callable[[int, int], None]) -> bool:
    """Whether the images that others stood in for still cannot be had, and the same ones stand in for them.

    They are read for that, by which their set learns, and can tell, what is wrong with them. `rows` are those of an
    entry, or of its beginning.
    """
    begin = 0
    for images in wanted.sets:
        used = rows[begin : begin + len(images)]
        missed = np.flatnonzero(used != np.arange(len(used)))
        for first in range(0, len(missed), wanted.batch):
            some = missed[first : first + wanted.batch]
            if not np.array_equal(images.take(some)[2], used[some]):
                return False
            progress(0, wanted.whole[0])
        begin += len(images)
    return True


def _opened(folder: Path, shape: tuple[int, ...]) -> LatentArrays | None:
    """The entry in a folder, mapped; None if there is none that is whole, and then what lies there is removed."""
    if not folder.exists():
        return None
    try:
        facts = json.loads((folder / _FACTS).read_text("utf-8"))
        sizes = ((folder / _LATENTS).stat().st_size, (folder / _ROWS).stat().st_size)
        if facts == {"format": FORMAT, "shape": list(shape)} and sizes == (2 * int(np.prod(shape)), 8 * shape[0]):
            latents = np.memmap(folder / _LATENTS, np.float16, "r", shape=shape)
            return LatentArrays(latents, np.fromfile(folder / _ROWS, np.int64))
    except (OSError, ValueError, RecursionError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _make(folder: Path, partial: Path, wanted: EncodeJob, progress: Callable[[int, int], None]) -> LatentArrays | None:
    """Write an entry, or go on with it. BusyError if another process is at it."""
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        if (found := _found(folder, wanted, progress)) is not None:  # another has finished it since that was looked at
            shutil.rmtree(partial, ignore_errors=True)
            return found
        done, row_bytes = _done(partial, wanted, progress), 2 * int(np.prod(wanted.whole[1:]))
        with open(partial / _LATENTS, "ab") as latents, open(partial / _ROWS, "ab") as rows:
            latents.truncate(done * row_bytes)
            rows.truncate(done * 8)
            for number, (some, which) in enumerate(wanted.batches(done), 1):
                latents.write(np.ascontiguousarray(some).data)
                rows.write(np.ascontiguousarray(which, dtype=np.int64).data)
                done += len(some)
                if number % _SYNCED == 0 or done == wanted.whole[0]:
                    for file in (latents, rows):
                        file.flush()
                        os.fsync(file.fileno())
                    _write(partial / _DONE, {"done": done})  # after what it speaks of
                progress(done, wanted.whole[0])
        _write(partial / _FACTS, {"format": FORMAT, "shape": list(wanted.whole)})
        (partial / _DONE).unlink()
        if not folder.exists():  # of another process that was quicker, where nothing can be locked
            partial.rename(folder)
            (folder / LOCK).unlink(missing_ok=True)  # not before, or another would begin anew in what is whole
    return _opened(folder, wanted.whole)


def _done(partial: Path, wanted: EncodeJob, progress: Callable[[int, int], None]) -> int:
    """How many images are on disk for certain, and as they would be encoded now."""
    try:
        done = json.loads((partial / _DONE).read_text("utf-8"))["done"]
        rows = np.fromfile(partial / _ROWS, np.int64, max(0, int(done)))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return 0
    return len(rows) if len(rows) == done and _still(rows, wanted, progress) else 0


def _write(path: Path, facts: object) -> None:
    """A small JSON file, whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(json.dumps(facts))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def latent_image_sets(stored: LatentArrays, sets: Sequence[ImageSet], key: str) -> list[ImageSet]:
    """The sets with their latents in place of pixels, float16 [N, K, C, H, W], and the labels of what was encoded."""
    made, begin = [], 0
    for images in sets:
        part = slice(begin, begin + len(images))
        # An ImageSet says uint8 of its pixels, but neither it nor the stream looks at them.
        latents = cast(NDArray[np.uint8], stored.latents[part])
        labels = images.labels_of(stored.rows[part])
        made.append(replace(images, pixels=latents, labels=labels, known_fingerprint=f"latents:{key}:{begin}"))
        begin += len(images)
    return made


def statistics(latents: NDArray[np.float16]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of [N, K, C, H, W], over all but the mirrored copies, in float64.

    In two passes over pieces, so that nothing is lost however far the mean is from zero. The deviation of a channel
    that says nothing is a thousandth of the largest, so that it can be divided by.
    """
    count = latents.shape[0] * int(np.prod(latents.shape[3:]))
    mean = sum(_piece(latents, i).sum((0, 2, 3)) for i in _starts(latents)) / count
    centre = np.asarray(mean)[None, :, None, None]
    squares = sum(np.square(_piece(latents, i) - centre).sum((0, 2, 3)) for i in _starts(latents)) / count
    deviation = np.sqrt(squares)
    deviation = np.maximum(deviation, max(1e-3 * float(deviation.max()), 1e-12))
    return tuple(np.asarray(mean).tolist()), tuple(deviation.tolist())


_PIECE = 256


def _starts(latents: NDArray[np.float16]) -> range:
    return range(0, len(latents), _PIECE)


def _piece(latents: NDArray[np.float16], begin: int) -> NDArray[np.float64]:
    return np.asarray(latents[begin : begin + _PIECE, 0], np.float64)


@dataclass(frozen=True)
class Normalise:
    """LatentArrays latents as the network sees them: callable on float16 [B, K, C, H, W], as `Augment` is on pixels.

    Each channel gets mean 0 and deviation `sigma_data`, which is what noise levels and preconditioning count on.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    sigma_data: float
    flip: bool = False

    def __call__(self, stored: Tensor) -> tuple[Tensor, None]:
        """(x0 float32 [B, C, H, W], None: nothing that the network would have to be told of).

        With `flip` the mirrored copy with probability 1/2, by the coin that decides of pixels (`Augment`).
        """
        latents = stored[:, 0]
        if self.flip:
            mirrored = draw_rows(len(stored), lambda n: torch.rand(n, device=stored.device)) < 0.5
            latents = torch.where(mirrored.view(-1, 1, 1, 1), stored[:, 1], latents)
        return self.forward(latents), None

    def forward(self, latents: Tensor) -> Tensor:
        """Latents [B, C, H, W] in the codec's scale -> x0."""
        mean, deviation = self._sides(latents)
        return (latents.float() - mean) * (self.sigma_data / deviation)

    def inverse(self, x0: Tensor) -> Tensor:
        """x0 -> latents in the codec's scale."""
        mean, deviation = self._sides(x0)
        return x0 * (deviation / self.sigma_data) + mean

    def _sides(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (torch.tensor(v, device=like.device)[:, None, None] for v in (self.mean, self.deviation))
        return mean, deviation
