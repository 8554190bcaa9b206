"""Latents of a run: load, save and check its autoencoder, encode images, and decode samples with it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from unfog.config.representation import LatentSpace, PixelSpace, Representation
from unfog.config.schema import Config, ImageFacts
from unfog.config.toml import update
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.packs.latent_cache import FORMAT, EncodeJob, LatentArrays
from unfog.diffusion.editing import Edit
from unfog.errors import RequestError
from unfog.files.safe_files import move, new_file, regular_file, remove_tree, tensor_file, write_atomic
from unfog.models.autoencoder import AutoencoderModel, DiffusersAutoencoder
from unfog.models.autoencoder_settings import CONFIG, OURS, WEIGHTS, Autoencoder, AutoencoderFolder, check_multiple
from unfog.process.device import choose_device
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.progress import Progress, say, warn
from unfog.text import plural
from unfog.training.checkpoints.snapshot import sync
from unfog.values.image_format import StoredValues

Decode = Callable[[Tensor], Tensor]  # network output [B, C, H, W] -> images [B, C', H', W'] about [-1, 1]
Show = Callable[[Tensor], NDArray[np.uint8]]  # network output [B, C, H, W] -> pictures uint8 [B, H', W', 3]
_PIXELS_AT_ONCE = 2**18  # per batch: 64 images of 64x64, 4 of 256x256
_FEW = 64  # images that are encoded where only the shape and scale of latents are needed
_DEAD_CHANNEL = 0.02  # deviation of a channel over the largest one, below which it hardly carries information
_AnyAutoencoder = AutoencoderModel | DiffusersAutoencoder
_CHUNK = 256  # images that `_statistics` adds at once; its results depend on it in the last bits


def _load_autoencoder(described: AutoencoderFolder, device: torch.device) -> _AnyAutoencoder:
    """Return an autoencoder on a device, in evaluation mode and fp32, checked with an image of zeros.

    RequestError if its weights do not fit its description, or need a package that is missing.
    """
    ours, side = described.kind == OURS, 8 * described.factor
    autoencoder: _AnyAutoencoder
    autoencoder = _load_ours(described) if ours else DiffusersAutoencoder.load(described.folder, described.kind)
    autoencoder = autoencoder.to(device).float().eval().requires_grad_(False)
    with torch.inference_mode():
        latent = autoencoder.encode(torch.zeros(1, described.image_channels, side, side, device=device))
        shapes = (tuple(latent.shape), tuple(autoencoder.decode(latent).shape))
    if shapes != ((1, described.channels, 8, 8), (1, described.image_channels, side, side)):
        raise RequestError(
            f"autoencoder_folder = {described.folder} makes {shapes[0]} and {shapes[1]} of {side} pixels: not usable"
        )
    return autoencoder


def _load_ours(described: AutoencoderFolder) -> AutoencoderModel:
    given = {k: v for k, v in described.config.items() if k not in ("_class_name", "image_channels")}
    network = AutoencoderModel(update(Autoencoder(), given, "autoencoder"), described.image_channels)
    try:
        file = tensor_file(described.weights, described.folder, described.follows_links)
        network.load_state_dict(load_file(file), strict=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:160]
        raise RequestError(
            f"autoencoder_folder = {described.folder}: {described.weights.name} cannot be used: {said}"
        ) from None
    return network


def save_autoencoder(folder: Path, network: AutoencoderModel) -> AutoencoderFolder:
    """Write one of our autoencoders into a folder, which is replaced atomically."""
    config = {"_class_name": OURS, "image_channels": network.image_channels, **asdict(network.settings)}
    partial_folder = _empty_beside(folder)
    write_atomic(partial_folder / CONFIG, f"{json.dumps(config, indent=2)}\n".encode(), partial_folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_atomic(partial_folder / WEIGHTS[OURS], save(weights), partial_folder)
    _move_into_place(partial_folder, folder)
    return AutoencoderFolder.open(str(folder))


def _empty_beside(folder: Path) -> Path:
    made = folder.with_name(f".{folder.name}-partial")
    remove_tree(made, folder.parent)
    made.mkdir(parents=True)
    return made


def _move_into_place(made: Path, folder: Path) -> None:
    for path in (*made.iterdir(), made):  # before the old one is deleted, so that a power cut leaves either
        sync(path)
    old = folder.with_name(f".{folder.name}-old")
    remove_tree(old, folder.parent)
    if os.path.lexists(folder):
        move(folder, old, folder.parent)
    move(made, folder, folder.parent)
    remove_tree(old, folder.parent)


def copy_autoencoder_into_run(folder: RunFolder, config: Config) -> Config:
    """Copy the autoencoder, if any, into the run folder; return the settings that name the copy."""
    described, own = config.representation.autoencoder(), folder.path / AUTOENCODER_FOLDER
    if described is None:
        return config
    if own.resolve() != described.folder.resolve():
        made = _empty_beside(own)
        for path in (described.folder / CONFIG, described.weights):
            source = regular_file(path, described.folder, described.follows_links)
            shutil.copyfile(source, new_file(made / path.name, folder.path))
        _check_unchanged(AutoencoderFolder.open(str(made)), config)
        _move_into_place(made, own)
    return replace(config, autoencoder_folder=str(own.absolute()))


def _check_unchanged(described: AutoencoderFolder, config: Config) -> None:
    """RequestError unless it is the autoencoder that the run began with."""
    if described.sha256() != config.latents.sha256:
        raise RequestError(
            f"the autoencoder in {described.folder} is not the one that this run began with (sha256 "
            "differs); restore that one, or give its place: unfog resume RUN --autoencoder FOLDER"
        )


@lru_cache(maxsize=2)
def _opened(place: str, sha256: str, device: torch.device) -> _AnyAutoencoder:
    return _load_autoencoder(AutoencoderFolder.open(place), device)


def open_run_autoencoder(config: Config, device: torch.device) -> _AnyAutoencoder:
    """Return the autoencoder of a run on a device. RequestError if it is not the one that the run began with."""
    _check_unchanged(AutoencoderFolder.open(config.autoencoder_folder), config)
    return _opened(config.autoencoder_folder, config.latents.sha256, device)


class ImageMap:
    """The map between images and network input on one device: of pixels, which is the identity, or `_LatentMap`."""

    def __init__(self, config: Config, device: torch.device):
        self._config, self._device = config, device

    @staticmethod
    def of(config: Config, device: torch.device) -> ImageMap:
        """Return the map of a run. RequestError if its autoencoder is not the one that the run began with."""
        return _MAPS[type(config.representation)](config, device)

    def decode(self, x0: Tensor) -> Tensor:
        """Return the images [B, C', H', W'] about [-1, 1] of network output [B, C, H, W]."""
        return x0

    def view(self, x0: Tensor) -> NDArray[np.uint8]:
        """Return the pictures uint8 [B, H', W', 3] of network output, as people see them."""
        return self._config.view(self._config.image_format.to_pictures(self.decode(x0)))

    def encode_edit(self, edit: Edit) -> Edit:
        """Return an edit of an image as an edit of the network's input."""
        return edit


class _LatentMap(ImageMap):
    """Maps with the autoencoder of a run, in fp32: fp16 overflows in decoders such as that of Stable Diffusion XL."""

    def __init__(self, config: Config, device: torch.device):
        super().__init__(config, device)
        assert isinstance(config.representation, LatentSpace)
        self._factor, self._normalise = config.representation.factor, config.representation.normalise
        self._autoencoder = open_run_autoencoder(config, device)

    def decode(self, x0: Tensor) -> Tensor:
        latents = self._normalise.inverse(x0)
        parts = torch.split(latents, autoencoder_batch(math.prod(latents.shape[2:]) * self._factor**2))
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            return torch.cat([self._autoencoder.decode(part) for part in parts])

    def encode_edit(self, edit: Edit) -> Edit:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            latents = self._autoencoder.encode(edit.image[None].to(self._device)).float()
        image, unknown = self._normalise.forward(latents)[0], edit.unknown
        if unknown is not None:
            # A latent depends on all of its pixels, so it is unknown where any of them is; `Edit.keep` restores others.
            unknown = torch.nn.functional.max_pool2d(unknown.float(), self._factor) > 0
        return replace(edit, image=image, unknown=unknown)


_MAPS: dict[type[Representation], type[ImageMap]] = {PixelSpace: ImageMap, LatentSpace: _LatentMap}


def _encode_pixels(
    autoencoder: _AnyAutoencoder, values: StoredValues, device: torch.device, pixels: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return the latents of images uint8 [B, C, H, W], in the autoencoder's own scale."""
    x = values.to_model(torch.from_numpy(np.ascontiguousarray(pixels)).to(device))
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        latents: NDArray[np.float32] = autoencoder.encode(x).float().cpu().numpy()
    return latents


def autoencoder_batch(pixels: int) -> int:
    """Return the batch size for images of so many pixels."""
    # It depends on nothing else, as the batch size may change the rounding.
    return max(1, _PIXELS_AT_ONCE // pixels)


def apply_autoencoder_settings(config: Config) -> Config:
    """Return the configuration with the channels, factor and digest of its autoencoder; needs no images.

    RequestError if it is another autoencoder than the run began with.
    """
    described = config.representation.autoencoder()
    if described is None:
        return config
    if config.latents.sha256:  # latents of another would mean something else to the network
        _check_unchanged(described, config)
    latents = replace(config.latents, sha256=described.sha256(), factor=described.factor, channels=described.channels)
    return replace(config, latents=latents, data=replace(config.data, channels=described.image_channels))


def add_latents(
    dataset: Dataset, config: Config, facts: ImageFacts, stop: StopSignals, few: bool = False
) -> tuple[Dataset, ImageFacts]:
    """Return the dataset with latents, of only some images if `few`, and the facts with their statistics.

    Both are returned unchanged for a run on pixels. `config` has the settings of the autoencoder and the facts applied.
    Interrupted after a stop request.
    """
    if config.representation.autoencoder() is None:
        return dataset, facts
    check_multiple(config.data.size, config.latents.factor)
    sets = [_few_images(part) if few else part for part in (dataset.train, dataset.held_out)]
    key, stored = _encode_or_load(config, sets, stop, few)
    train, held_out = stored.image_sets(sets, key)
    if not config.latents.mean:  # a resumed run keeps the statistics that it began with, to the bit
        mean, deviation = _statistics(stored.latents[: len(train)])
        facts = replace(facts, latents=replace(config.latents, mean=mean, deviation=deviation))
        _report_statistics(config.adopt(facts), few)
    return replace(dataset, latents=(train, held_out)), facts


def _encode_or_load(config: Config, sets: list[ImageSet], stop: StopSignals, few: bool) -> tuple[str, LatentArrays]:
    """Return (cache key, latents), from the cache or encoded now."""
    device = torch.device("cpu")
    with suppress(RequestError):  # the run began on a machine with another device
        device = choose_device(config.training.device)
    latents, copies, batch = config.latents, 1 + config.data.flip, autoencoder_batch(config.image_format.pixels)
    prints = () if few else tuple(images.fingerprint for images in sets)
    key = hashlib.sha256(repr((FORMAT, prints, latents.sha256, copies, batch)).encode()).hexdigest()[:32]
    encode = partial(_encode_pixels, open_run_autoencoder(config, device), config.image_format.values, device)
    job = EncodeJob(sets, config.input_shape, copies, encode, batch)
    started, done = time.perf_counter(), 0
    with Progress("encoding latents", None) as progress:
        show = stop.watching(progress)

        def update(images: int, total: int) -> None:
            nonlocal done
            show(images, total)
            done = images

        stored = job.encode_all(update) if few else job.load_or_encode(key, update)
    if done and not few:
        say(f"  latents: {plural(done)} encoded in {time.perf_counter() - started:.1f} s")
    return key, stored


def _report_statistics(config: Config, few: bool) -> None:
    """Print the shape and deviation of the latents; warn of a channel without information."""
    latents, (channels, height, width) = config.latents, config.input_shape
    share = config.image_format.count / (channels * height * width)
    low, high = min(latents.deviation), max(latents.deviation)
    say(
        f"  latents: {width}x{height} of {channels} channels for {config.image_format.sides} pixels, "
        f"{share:.3g} times fewer values; "
        f"deviation {low:.3g} to {high:.3g} by channel, scaled to {config.diffusion.sigma_data:g}"
        + f", from {_FEW} images"
        * few
    )
    if low < _DEAD_CHANNEL * high:
        warn(f"a channel of the latents hardly varies (deviation {low:.2g}, another {high:.2g}); use fewer channels")


def _few_images(images: ImageSet) -> ImageSet:
    # Unlike `evenly_spaced`, which rounds: other images would change the statistics of a dry run.
    wanted = np.unique(np.linspace(0, max(0, len(images) - 1), min(len(images), _FEW)).astype(np.int64))
    pixels, columns, rows = images.take(wanted)
    return ImageSet(pixels, [images.names[int(i)] for i in rows], columns)


def _statistics(latents: NDArray[np.float16]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of [N, K, C, H, W], over the unmirrored copies, in float64.

    The deviation is at least a thousandth of the largest channel's, so that it can be divided by.
    """
    count = len(latents) * math.prod(latents.shape[3:])
    starts = range(0, len(latents), _CHUNK)

    def average(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        chunks = (np.asarray(latents[i : i + _CHUNK, 0], np.float64) for i in starts)
        return np.asarray(sum(of(chunk).sum((0, 2, 3)) for chunk in chunks) / count)

    # In two passes, so that no precision is lost however far the mean is from zero.
    mean = average(lambda chunk: chunk)
    deviation = np.sqrt(average(lambda chunk: np.square(chunk - mean[:, None, None])))
    deviation = np.maximum(deviation, max(1e-3 * float(deviation.max()), 1e-12))
    return tuple(mean.tolist()), tuple(deviation.tolist())
