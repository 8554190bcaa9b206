"""Latents of images: encoded once, kept in the cache, and read in place of pixels.

An entry is a folder named by a hash of the images, the autoencoder and the copies. It is written beside its place and
renamed when complete; an interrupted one is gone on with. Entries may be deleted at any time.

    latents.f16    float16 [N, K, C, H, W]: one copy of each image, or two, the second of the image mirrored
    rows.i64       int64 [N], the row of each image in its set: not its own where it could not be decoded
    latents.json   {"format", "shape"}
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.cache import free_bytes, over_limit, remove_stale_entries
from unfog.data.dataset import ImageSet, PixelArray
from unfog.data.decode_pool import Progress
from unfog.data.file_rows import FileRows, is_local
from unfog.data.outages import Outage
from unfog.data.packs.pack_writer import BusyError, locked, sync
from unfog.device.copies import to_device
from unfog.device.sharded_rng import draw_rows
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import cache_folder, hold, make_room
from unfog.files.locks import OwnedError
from unfog.files.safe_files import (
    LARGEST_TEXT,
    disk_usage,
    move,
    open_file,
    read_file,
    regular_file,
    remove,
    remove_tree,
    write_atomic,
)
from unfog.files.work_folder import work_folder, work_folders
from unfog.text import format_bytes

FORMAT = 1
# Bytes of latents that are kept in memory where the cache cannot be written.
_IN_MEMORY = 2**30
_SYNC_EVERY = 32  # batches
_WAIT = 0.2  # seconds between two looks at what another process is encoding
_FACTS, _LATENTS, _ROWS, _DONE = "latents.json", "latents.f16", "rows.i64", "done.json"

# Images uint8 [B, C, H, W] -> latents [B, c, h, w]; the same to the bit for the same images.
_Encode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


class LatentArrays(NamedTuple):
    """The latents of some sets of images, one set behind the other."""

    latents: NDArray[np.float16] | FileRows
    """[N, K, C, H, W]."""
    rows: NDArray[np.int64]
    """[N], the row of each image in its set."""

    def image_sets(self, sets: Sequence[ImageSet], key: str) -> list[ImageSet]:
        """Return the sets with latents in place of pixels, [N, K, C, H, W], and the columns of the encoded images."""
        latent_sets, begin = [], 0
        for images in sets:
            part = slice(begin, begin + len(images))
            # An ImageSet says uint8 of its pixels, but neither it nor the stream looks at them.
            some = self.latents.rows(part) if isinstance(self.latents, FileRows) else self.latents[part]
            latents, columns = cast(PixelArray, some), images.columns_at(self.rows[part])
            fingerprint = f"latents:{key}:{begin}"
            latent_sets.append(replace(images, pixels=latents, columns=columns, known_fingerprint=fingerprint))
            begin += len(images)
        return latent_sets


class EncodeJob(NamedTuple):
    """The images to encode, and how."""

    sets: Sequence[ImageSet]
    shape: tuple[int, int, int]
    """Shape of one latent."""
    copies: int
    """1, or 2 to encode each image mirrored as well."""
    encode: _Encode
    batch: int
    """Batch size. Always the same, as sums of floating-point numbers depend on it."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of all latents, [N, K, C, H, W]."""
        return (sum(map(len, self.sets)), self.copies, *self.shape)

    def batches(self, done: int) -> Iterator[tuple[NDArray[np.float16], NDArray[np.int64]]]:
        """Encode batch after batch from image number `done` on. Yields (latents [B, K, C, H, W], rows [B])."""
        begin = 0
        for images in self.sets:
            for first in range(0, len(images), self.batch):
                if begin + first >= done:
                    pixels, _, rows = images.take(np.arange(first, min(first + self.batch, len(images))))
                    yield self._encode_copies(pixels), rows
            begin += len(images)

    def encode_all(self, progress: Progress) -> LatentArrays:
        """Encode all images into memory, without the cache."""
        latents, rows, done = np.empty(self.full_shape, np.float16), np.empty(self.full_shape[0], np.int64), 0
        for some, some_rows in self.batches(0):
            latents[done : done + len(some)], rows[done : done + len(some)] = some, some_rows
            done += len(some)
            progress(done, len(rows))
        return LatentArrays(latents, rows)

    def _encode_copies(self, pixels: NDArray[np.uint8]) -> NDArray[np.float16]:
        # Contiguous, as torch takes no array with negative strides.
        copies = [pixels, np.ascontiguousarray(pixels[..., ::-1])][: self.copies]
        latents = np.stack([self.encode(copy) for copy in copies], axis=1)
        with np.errstate(over="ignore"):  # an overflow is an error below rather than a warning
            half = latents.astype(np.float16)
        if not np.isfinite(half).all():
            problem = "beyond what float16 holds" if np.isfinite(latents).all() else "not finite"
            raise RunError(f"the autoencoder makes latents that are {problem}; use another one")
        return half

    def replacements_hold(self, rows: NDArray[np.int64], progress: Progress) -> bool:
        """Return True if the images that were replaced in an entry still are, and by the same ones.

        `rows` are those of the entry, or of its beginning.
        """
        begin = 0
        for images in self.sets:
            used = rows[begin : begin + len(images)]
            replaced = np.flatnonzero(used != np.arange(len(used)))
            for first in range(0, len(replaced), self.batch):
                some = replaced[first : first + self.batch]
                # Reading them also makes their sets list them as skipped, in this run too.
                if not np.array_equal(images.take(some).rows, used[some]):
                    return False
                progress(0, self.full_shape[0])
            begin += len(images)
        return True

    def load_or_encode(self, key: str, progress: Progress) -> LatentArrays:
        """Return the entry of a key, encoded now if it is missing. `progress` is called with (images done, in all).

        Raises:
            RequestError: the cache cannot be written, and the latents are too large for memory.
            RunError: the disk fails; the autoencoder's latents are not finite.
        """
        folder = cache_folder() / f"latents-{key}"
        needed, partial = 2 * math.prod(self.full_shape), folder.with_name(f"{folder.name}.partial")
        hold(folder)
        entry = _open_valid(folder, self, progress)
        if entry is None:
            remove_stale_entries(cache_folder())
        while entry is None:
            fits, free = make_room(needed, keep=partial), free_bytes()
            if not fits or free is None or free + _unfinished_bytes(folder, partial) < needed:
                if needed <= _IN_MEMORY:
                    return self.encode_all(progress)
                if not fits:
                    raise RequestError(over_limit(needed, "train at a smaller size"))
                why = "cannot be written" if free is None else f"has {format_bytes(free)} free"
                raise RequestError(f"latents take {format_bytes(needed)} and {cache_folder()} {why}; set UNFOG_CACHE")
            try:
                entry = _write_entry(folder, partial, self, progress)
            except (BusyError, OwnedError):  # another process is writing it
                time.sleep(_WAIT)
                progress(0, self.full_shape[0])
                entry = _open_valid(folder, self, progress)
            except OSError as error:
                raise RunError(
                    f"{folder} could not be written ({error.strerror}); free some space, then repeat the command"
                ) from error
        return entry


def _unfinished_bytes(folder: Path, partial: Path) -> int:
    """Return the bytes on disk of an entry that is begun and not finished."""
    return sum(disk_usage(path) for path in (partial, *work_folders(folder)) if path.is_dir())


def _open_valid(folder: Path, job: EncodeJob, progress: Progress) -> LatentArrays | None:
    """Map the entry in a folder; None if there is no valid one, and then what lies there is removed."""
    entry = _open(folder, job.full_shape)
    if entry is not None and job.replacements_hold(entry.rows, progress):
        return entry
    remove_tree(folder, cache_folder())  # other processes keep what they have mapped
    return None


def _open(folder: Path, shape: tuple[int, ...]) -> LatentArrays | None:
    with suppress(OSError, ValueError, RecursionError):
        facts = json.loads(read_file(folder / _FACTS, cache_folder(), LARGEST_TEXT))
        sizes = ((folder / _LATENTS).stat().st_size, (folder / _ROWS).stat().st_size)
        if facts == {"format": FORMAT, "shape": list(shape)} and sizes == (2 * math.prod(shape), 8 * shape[0]):
            file = regular_file(folder / _LATENTS, cache_folder())
            if is_local(file):
                latents: NDArray[np.float16] | FileRows = np.memmap(file, np.float16, "r", shape=shape)
            else:
                latents = FileRows(file, cache_folder(), np.float16, shape, waits=Outage())
            return LatentArrays(latents, np.fromfile(regular_file(folder / _ROWS, cache_folder()), np.int64))
    return None


def _write_entry(folder: Path, partial: Path, job: EncodeJob, progress: Progress) -> LatentArrays | None:
    """Write an entry, or finish an interrupted one. OwnedError or BusyError if another process is writing it."""
    with work_folder(folder, rest=partial) as own:
        if (entry := _open_valid(folder, job, progress)) is not None:  # another process has finished it meanwhile
            remove_tree(own, cache_folder())
            return entry
        _write_latents(own, job, progress)
        if not folder.exists():  # it does if another process was faster
            move(own, folder, cache_folder())
    return _open(folder, job.full_shape)


def _write_latents(partial: Path, job: EncodeJob, progress: Progress) -> None:
    with locked(partial):
        done, count = _images_done(partial, job, progress), job.full_shape[0]
        root = cache_folder()
        with open_file(partial / _LATENTS, "ab", root) as latents, open_file(partial / _ROWS, "ab", root) as rows:
            # What was written after the last sync may be torn.
            latents.truncate(done * 2 * math.prod(job.full_shape[1:]))
            rows.truncate(done * 8)
            for number, (some, which) in enumerate(job.batches(done), 1):
                latents.write(np.ascontiguousarray(some).data)
                rows.write(np.ascontiguousarray(which, dtype=np.int64).data)
                done += len(some)
                if number % _SYNC_EVERY == 0 or done == count:
                    sync(latents)
                    sync(rows)
                    _write_json(partial / _DONE, {"done": done})  # after the data that it vouches for
                progress(done, count)
        _write_json(partial / _FACTS, {"format": FORMAT, "shape": list(job.full_shape)})
        remove(partial / _DONE, root)


def _images_done(partial: Path, job: EncodeJob, progress: Progress) -> int:
    """Return the number of images in an interrupted entry that are safe on disk and still valid."""
    try:
        done = json.loads(read_file(partial / _DONE, cache_folder(), LARGEST_TEXT))["done"]
        rows = np.fromfile(regular_file(partial / _ROWS, cache_folder()), np.int64, max(0, int(done)))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return 0
    return len(rows) if len(rows) == done and job.replacements_hold(rows, progress) else 0


def _write_json(path: Path, facts: object) -> None:
    write_atomic(path, json.dumps(facts).encode(), cache_folder())


@dataclass(frozen=True)
class Normalise:
    """Normalise cached latents for the network: callable on float16 [B, K, C, H, W], as `Augment` is on pixels.

    Each channel gets mean 0 and deviation `sigma_data`, which noise levels and preconditioning assume.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    sigma_data: float
    flip: bool = False
    _placed: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, stored: Tensor) -> tuple[Tensor, None]:
        """Return (x0 float32 [B, C, H, W], None for the augmentation condition).

        With `flip`, take the mirrored copy with probability 1/2, by the same random draw as `Augment` on pixels.
        """
        return self.moving(stored)[:2]

    def moving(self, stored: Tensor) -> tuple[Tensor, None, list[Callable[[Tensor, bool], Tensor]]]:
        """Return the result of a call, and the moves that it made, as `Augment.moving` does."""
        latents, moves = stored[:, 0], list[Callable[[Tensor, bool], Tensor]]()
        if self.flip:
            mirrored = draw_rows(len(stored), lambda n: torch.rand(n, device=stored.device)) < 0.5
            places = mirrored.view(-1, 1, 1, 1)
            latents = torch.where(places, stored[:, 1], latents)
            moves.append(lambda x, smooth: torch.where(places, x.flip(3), x))
        return self.forward(latents), None, moves

    def forward(self, latents: Tensor) -> Tensor:
        """Map latents [B, C, H, W] in the autoencoder's scale to x0."""
        mean, deviation = self._statistics(latents.device).unbind()
        return (latents.float() - mean) * (self.sigma_data / deviation)

    def inverse(self, x0: Tensor) -> Tensor:
        """Map x0 to latents in the autoencoder's scale."""
        mean, deviation = self._statistics(x0.device).unbind()
        return x0 * (deviation / self.sigma_data) + mean

    def _statistics(self, device: torch.device) -> Tensor:
        if device not in self._placed:  # kept, as a copy in a captured step would read memory that is given out again
            self._placed[device] = to_device(torch.tensor([self.mean, self.deviation])[:, :, None, None], device)
        return self._placed[device]
