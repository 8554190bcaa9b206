"""Features of many images: computed in chunks, cached on disk, shared between processes and resumed after a kill.

Chunks always start at multiples of CHUNK, so any number of processes, and a resumed one, end with the same numbers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from unfog.cache_folder import cache_folder
from unfog.errors import RequestError, RunError
from unfog.evaluation.distances import FeatureStatistics, feature_statistics
from unfog.evaluation.features import Features

_FORMAT = 1  # part of the cache key: a new one makes old entries unused
CHUNK = 500


class PixelSource(Protocol):
    """uint8 [N, C, H, W] by slices: an array, a pack, or images generated on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> NDArray[np.uint8]: ...


def compute_features(
    pixels: PixelSource,
    features: Features,
    cache_key: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> Tensor:
    """Compute features of all images, float32 [N, D] on the CPU, the same on every rank.

    `cache_key` identifies the images: the data's fingerprint, which covers their size, or a hash of all that generated
    ones depend on. Chunks that are cached under it are not read from `pixels`; None caches nothing. `progress` gets the
    number of this rank's images that are done, and of all. Each of `world` processes computes every `world`-th chunk,
    waits at `barrier`, and reads the chunks of the others from the shared cache folder.

    Raises:
        RequestError: there are no images; several processes without a key.
        RunError: the network's output is not finite; another rank's chunk is missing.
    """
    if not len(pixels):
        raise RequestError("there are no images to take features of")
    if world > 1 and cache_key is None:
        raise RequestError("several processes share features through the cache: give cache_key")
    folder = None if cache_key is None else features_folder(cache_key, len(pixels), features)
    starts = range(0, len(pixels), CHUNK)
    mine = starts[rank::world]
    found: dict[int, Tensor] = {}
    total, done = sum(min(CHUNK, len(pixels) - first) for first in mine), 0
    for first in mine:
        chunk = None if folder is None else _load(folder, first, len(pixels))
        if chunk is None:
            chunk = _compute(pixels, features, first)
            if folder is not None:
                _keep(folder, first, chunk, features, must=world > 1)
        found[first] = chunk
        done += len(chunk)
        progress(done, total)
    if folder is not None and world > 1:
        barrier()
        for first in starts:
            chunk = found[first] if first in found else _load(folder, first, len(pixels))
            if chunk is None:
                raise RunError(
                    f"{_chunk(folder, first)} of another process is missing; UNFOG_CACHE must be a folder they share"
                )
            found[first] = chunk
    return torch.cat([found[first] for first in starts])


def compute_statistics(x: Tensor, features: Features, cache_key: str) -> FeatureStatistics:
    """Return mean and covariance of features [N, D] that `compute_features` gave under this key, cached on disk."""
    folder = features_folder(cache_key, len(x), features)
    path = folder / "statistics.safetensors"
    with suppress(OSError, SafetensorError, KeyError):
        kept = load_file(path)
        mean, covariance = kept["mean"], kept["covariance"]
        if mean.shape == (x.shape[1],) and covariance.shape == (x.shape[1], x.shape[1]):
            return FeatureStatistics(len(x), mean.to(x.device), covariance.to(x.device))
    made = feature_statistics(x)
    with suppress(OSError):
        _write(path, {"mean": made.mean.cpu(), "covariance": made.covariance.cpu()}, features)
    return made


def features_folder(cache_key: str, count: int, features: Features) -> Path:
    """Return the cache folder of features of these images by this extractor; it need not exist."""
    name = hashlib.sha256(repr((_FORMAT, CHUNK, cache_key, count, features.digest)).encode()).hexdigest()[:32]
    return cache_folder() / "features" / name


def delete_features(cache_key: str, count: int, features: Features) -> None:
    """Delete the cached features of these images; no process may still be reading them."""
    shutil.rmtree(features_folder(cache_key, count, features), ignore_errors=True)


def _compute(pixels: PixelSource, features: Features, first: int) -> Tensor:
    # The number of images at once is the same on every rank, and so is the rounding.
    chunk = torch.from_numpy(np.ascontiguousarray(pixels[first : min(first + CHUNK, len(pixels))]))
    # On a CPU 50 at a time took a third longer than 25, to the same bits: every layer waits for fresh pages then.
    at_once = 25 if features.device.type == "cpu" else 250
    made = torch.cat([features(part).cpu() for part in torch.split(chunk, at_once)])
    if not made.isfinite().all():
        raise RunError(f"features = {features.name} gave what is no number for images {first} to {first + len(made)}")
    return made


def _chunk(folder: Path, first: int) -> Path:
    return folder / f"{first:08d}.safetensors"


def _load(folder: Path, first: int, count: int) -> Tensor | None:
    """Load the cached chunk that starts at image `first` of `count`; None if it is missing or damaged."""
    with suppress(OSError, SafetensorError, KeyError):
        x: Tensor = load_file(_chunk(folder, first))["features"]
        whole = len(x) == min(CHUNK, count - first)
        if x.dtype == torch.float32 and x.ndim == 2 and whole and bool(x.isfinite().all()):
            return x
    return None


def _keep(folder: Path, first: int, chunk: Tensor, features: Features, must: bool) -> None:
    # A full disk stops the run only where other processes wait for the chunk.
    try:
        _write(_chunk(folder, first), {"features": chunk}, features)
    except OSError as error:
        if must:
            raise RunError(f"{folder} could not be written ({error.strerror}); set UNFOG_CACHE or free it") from error


def _write(path: Path, tensors: dict[str, Tensor], features: Features) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write one chunk at a time, so each has a partial file of its own.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(save(tensors, {"features": features.name, "resize": features.resize}))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
