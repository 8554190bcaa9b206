"""Feature extractors of metrics, networks or simple arithmetic; and features of many images, cached on disk.

`inception` is the network of the literature's FID, read from a file that is known by its SHA-256. `texture` and
`pixels` need no file. Any other TorchScript file is named by its path, with options: `net.pt:size=224,range=imagenet`.

Features are computed in chunks, shared between processes and resumed after a kill. Chunks always start at multiples of
CHUNK, so any number of processes, and a resumed one, end with the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from unfog.device.copies import to_device
from unfog.errors import RequestError, RunError
from unfog.evaluation.distances import FeatureStatistics
from unfog.evaluation.feature_networks import load_inception, load_torchscript, parse_network_file
from unfog.files.cache_folder import cache_folder, hold, make_room, release
from unfog.files.safe_files import remove_tree, tensor_file, write_atomic
from unfog.values.image_format import CHANNELS, planes_to_rgb

_FORMAT = 1  # part of the cache key: a new one makes old entries unused
CHUNK = 500

_SIDE = 8  # of the small image that `pixels` compares
# Of `texture`:
_LEAST = 4  # side of the last scale
_FAINT = 1 / 512  # half of the smallest step of a pixel
_USUAL = 4.0  # what is taken from a logarithm, so that the features of photographs are about 1


@dataclass(frozen=True)
class Features:
    """An extractor: uint8 pixels [N, C, H, W], one channel or three, to float32 [N, D] on `device`."""

    name: str
    """Printed name; for a file that is not Inception, with the first eight digits of its SHA-256."""
    resize: str
    """How images are resized."""
    digest: str
    """Cache key; equal if and only if the extracted features are equal, up to rounding."""
    device: torch.device
    embed: Callable[[Tensor], Tensor]
    """float32 [N, 3, H, W] in 0 to 255 -> [N, D]."""

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Extract features; grey is made RGB. Always in full float32, whatever autocast or TF32 settings are active.

        RequestError if the pixels have another form, or the network does not return [N, D].
        """
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in CHANNELS:
            raise RequestError(f"pixels are {pixels.dtype} {list(pixels.shape)}; give uint8 [N, 1 or 3, H, W]")
        x = planes_to_rgb(to_device(pixels, self.device).float())
        # TF32 would make features depend on the machine, and caches would mix them.
        exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
        with torch.autocast(self.device.type, enabled=False), exact:
            y = self.embed(x)
        if y.ndim != 2 or len(y) != len(x):
            raise RequestError(f"features = {self.name} answers {list(y.shape)} for {len(x)} images; it must be [N, D]")
        return y.float()


def open_features(name_or_path: str, device: torch.device | str = "cpu", only_known: bool = False) -> Features:
    """Return an extractor: `inception`, `texture`, `pixels`, or the path of a TorchScript file with options.

    A TorchScript file is a program, and PyTorch has no safe way to load one. Naming a file is taken for consent to run
    it. Where the name comes out of something that a stranger may have written, such as the settings of a run that was
    sent, `only_known` refuses every file but Inception's, whose SHA-256 is checked before it is loaded. RequestError
    for an unknown name, file or option; a file that is not TorchScript, or may not be run.
    """
    device = torch.device(device)
    # MPS pools to sizes that divide the image's alone.
    pooling = torch.device("cpu") if device.type == "mps" else device
    if name_or_path == "pixels":
        return Features("pixels", f"area {_SIDE}", f"pixels-{_SIDE}-1", pooling, _small_pixels)
    if name_or_path == "texture":
        return Features("texture", "none", "texture-1", pooling, _texture)
    if name_or_path == "inception":
        network = load_inception(device)
    elif ".pt" in name_or_path:
        network = load_torchscript(parse_network_file(name_or_path), device, only_known)
    else:
        raise RequestError(
            f"features = {name_or_path!r} is not inception, texture, pixels or the path of a TorchScript file"
        )
    return Features(network.name, network.resize, network.digest, device, network)


def _small_pixels(x: Tensor) -> Tensor:
    """Means over 8 x 8 parts, in 0 to 1: [N, 192]. What is where in an image, and nothing finer."""
    return F.adaptive_avg_pool2d(x / 255, _SIDE).flatten(1)


def _texture(x: Tensor) -> Tensor:
    """RGB [N, 3, H, W] in 0 to 255 -> [N, 33 L], L scales from the pixels to a side of 4, each half of the one before.

    Of each scale: logarithms of mean and root mean square of the Haar details (across, down, diagonal) of luma and the
    two colour differences; those of luma in each quarter of the image; deviation of each channel, and of the pixels
    their mean. Logarithms, so that a blur or a grain counts by how much of the detail it changes, however little
    detail there is. After Portilla & Simoncelli 2000, whose statistics are of this kind; these see less and are few.
    """
    x = _luma_and_chroma(x / 255)
    found = [4 * x.mean((2, 3))]
    while True:
        details = _details(x)  # [N, 3 channels, 3 directions, H - 1, W - 1]
        strength = details.abs()
        quarters = F.adaptive_avg_pool2d(strength[:, 0], 2)
        found += [_log(strength.mean((3, 4))), _log(details.square().mean((3, 4)).sqrt())]
        found += [_log(quarters)]
        x = F.avg_pool2d(x, 2)
        if min(x.shape[2:]) < _LEAST:
            return torch.cat([part.flatten(1) for part in found], 1)
        found.append(4 * x.std((2, 3)))


def _luma_and_chroma(x: Tensor) -> Tensor:
    """Y, Cb, Cr of RGB (BT.601)."""
    matrix = torch.tensor([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]])
    return torch.einsum("ij,njhw->nihw", to_device(matrix, x.device), x)


def _details(x: Tensor) -> Tensor:
    """Haar details of each channel at every place, in three directions."""
    haar = torch.tensor([[[1, -1], [1, -1]], [[1, 1], [-1, -1]], [[1, -1], [-1, 1]]]) / 2
    found = F.conv2d(x.flatten(0, 1)[:, None], to_device(haar[:, None], x.device).to(x.dtype))
    return found.reshape(*x.shape[:2], *found.shape[1:])


def _log(x: Tensor) -> Tensor:
    return (x + _FAINT).log() + _USUAL


class PixelSource(Protocol):
    """uint8 [N, C, H, W] by slices: an array, a pack, or images generated on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> NDArray[np.uint8]: ...


class Ranks(NamedTuple):
    """Processes that share the computation of features."""

    rank: int = 0
    """Of this process."""
    size: int = 1
    barrier: Callable[[], None] = lambda: None
    """Waits for all of them."""


_ALONE = Ranks()


def compute_features(
    pixels: PixelSource,
    features: Features,
    cache_key: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = _ALONE,
) -> Tensor:
    """Compute features of all images, float32 [N, D] on the CPU, the same on every rank.

    `cache_key` identifies the images: the data's fingerprint, which covers their size, or a hash of all that generated
    ones depend on; None caches nothing. `progress` gets the number of this rank's images that are done, and of all.
    Of several `ranks` each computes every `size`-th chunk, waits at `barrier`, and reads the others' from the cache.

    Raises:
        RequestError: there are no images; several processes without a key.
        RunError: the network's output is not finite; another rank's chunk is missing.
    """
    if not len(pixels):
        raise RequestError("there are no images to take features of")
    if ranks.size > 1 and cache_key is None:
        raise RequestError("several processes share features through the cache: give cache_key")
    folder = None if cache_key is None else features_folder(cache_key, len(pixels), features)
    starts = range(0, len(pixels), CHUNK)
    # In turns, so that each rank has about as many, and no chunk depends on the number of ranks.
    mine = starts[ranks.rank :: ranks.size]
    if folder is not None:
        hold(folder)
    found, total = dict[int, Tensor](), sum(min(CHUNK, len(pixels) - first) for first in mine)
    for first in mine:
        found[first] = _cached_chunk(pixels, features, first, folder, must=ranks.size > 1)
        progress(sum(map(len, found.values())), total)
    if folder is not None:
        make_room()
        if ranks.size > 1:
            ranks.barrier()
            others = [first for first in starts if first not in found]
            found |= {first: _of_other_process(folder, first, len(pixels)) for first in others}
        release(folder)
    return torch.cat([found[first] for first in starts])


def _cached_chunk(pixels: PixelSource, features: Features, first: int, folder: Path | None, must: bool) -> Tensor:
    """Return the features of a chunk from the cache, or compute and keep them there."""
    chunk = None if folder is None else _load(folder, first, len(pixels))
    if chunk is None:
        chunk = _compute(pixels, features, first)
        if folder is not None:
            _keep(folder, first, chunk, features, must)
    return chunk


def compute_statistics(x: Tensor, features: Features, cache_key: str) -> FeatureStatistics:
    """Return mean and covariance of features [N, D] that `compute_features` gave under this key, cached on disk."""
    folder = features_folder(cache_key, len(x), features)
    path = folder / "statistics.safetensors"
    with suppress(OSError, SafetensorError, KeyError):
        kept = load_file(tensor_file(path, cache_folder()))
        mean, covariance = kept["mean"], kept["covariance"]
        if mean.shape == (x.shape[1],) and covariance.shape == (x.shape[1], x.shape[1]):
            return FeatureStatistics(len(x), mean.to(x.device), covariance.to(x.device))
    made = FeatureStatistics.of(x)
    with suppress(OSError):
        _write(path, {"mean": made.mean.cpu(), "covariance": made.covariance.cpu()}, features)
    return made


def features_folder(cache_key: str, count: int, features: Features) -> Path:
    """Return the cache folder of features of these images by this extractor; it need not exist."""
    # The size of a chunk too: other chunks round otherwise, and must not be mixed.
    name = hashlib.sha256(repr((_FORMAT, CHUNK, cache_key, count, features.digest)).encode()).hexdigest()[:32]
    return cache_folder() / "features" / name


def delete_features(cache_key: str, count: int, features: Features) -> None:
    """Delete the cached features of these images; no process may still be reading them."""
    remove_tree(features_folder(cache_key, count, features), cache_folder())


def _compute(pixels: PixelSource, features: Features, first: int) -> Tensor:
    # The number of images at once is the same on every rank, and so is the rounding.
    chunk = torch.from_numpy(np.ascontiguousarray(pixels[first : min(first + CHUNK, len(pixels))]))
    # On a CPU 50 at a time took a third longer than 25, to the same bits: every layer waits for fresh pages then.
    at_once = 25 if features.device.type == "cpu" else 250
    made = torch.cat([features(part).cpu() for part in torch.split(chunk, at_once)])
    if not made.isfinite().all():
        raise RunError(
            f"features = {features.name} gave values that are not finite for images {first} to {first + len(made)}"
        )
    return made


def _chunk(folder: Path, first: int) -> Path:
    return folder / f"{first:08d}.safetensors"


def _load(folder: Path, first: int, count: int) -> Tensor | None:
    """Load the cached chunk that starts at image `first` of `count`; None if it is missing or damaged."""
    with suppress(OSError, SafetensorError, KeyError):
        x: Tensor = load_file(tensor_file(_chunk(folder, first), cache_folder()))["features"]
        whole = len(x) == min(CHUNK, count - first)
        if x.dtype == torch.float32 and x.ndim == 2 and whole and bool(x.isfinite().all()):
            return x
    return None


def _of_other_process(folder: Path, first: int, count: int) -> Tensor:
    if (chunk := _load(folder, first, count)) is None:
        raise RunError(
            f"{_chunk(folder, first)} of another process is missing; UNFOG_CACHE must be a folder they share"
        )
    return chunk


def _keep(folder: Path, first: int, chunk: Tensor, features: Features, must: bool) -> None:
    # A full disk stops the run only where other processes wait for the chunk.
    try:
        _write(_chunk(folder, first), {"features": chunk}, features)
    except OSError as error:
        if must:
            raise RunError(
                f"{folder} could not be written ({error.strerror}); free some space there, or set UNFOG_CACHE"
            ) from error


def _write(path: Path, tensors: dict[str, Tensor], features: Features) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = save(tensors, {"features": features.name, "resize": features.resize})
    write_atomic(path, data, cache_folder(), shared=True)
