"""Encode the images of a run to latents, and measure their statistics."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.latents import (
    FORMAT,
    EncodeJob,
    LatentArrays,
    encode_into_memory,
    latent_image_sets,
    load_or_encode,
    statistics,
)
from unfog.errors import RequestError
from unfog.models.autoencoder_folder import describe
from unfog.models.autoencoder_settings import check_multiple
from unfog.pipeline.autoencoder_folder import autoencoder_batch, encode_pixels, open_run_autoencoder
from unfog.process.device import choose_device
from unfog.reporting.progress import Progress, say, warn

_FEW = 64
"""Images that are encoded where only the shape and scale of latents are needed."""
_DEAD_CHANNEL = 0.02
"""Deviation of a channel over the largest one, below which it hardly carries information."""


def apply_autoencoder_settings(config: Config) -> Config:
    """Return the configuration with the channels, factor and digest of its autoencoder; needs no images.

    Raises:
        RequestError: it is another autoencoder than the run began with.
    """
    if not config.uses_latents:
        return config
    described = describe(config.autoencoder_folder)
    digest, stored = described.sha256(), config.latents
    if stored.sha256 and stored.sha256 != digest:
        raise RequestError(
            f"the autoencoder in {config.autoencoder_folder} is not the one that this run was trained with (sha256 "
            "differs), so its latents mean something else; bring that one back, or start a new run"
        )
    latents = replace(stored, sha256=digest, factor=described.factor, channels=described.channels)
    return replace(config, latents=latents, data=replace(config.data, channels=described.image_channels))


def add_latents(
    prepared: Dataset, config: Config, stop: Callable[[], None], few: bool = False
) -> tuple[Dataset, Config]:
    """Return the dataset with latents, and the configuration with their statistics.

    A resumed run keeps the statistics that it began with, to the bit.

    Args:
        prepared: the images.
        config: with the settings of the autoencoder applied and the image size known.
        stop: called regularly; it may raise.
        few: encode only some of the images.
    """
    if not config.uses_latents:
        return prepared, config
    check_multiple(config.data.size, config.latents.factor)
    sets = [_few_images(prepared.train), _few_images(prepared.held_out)] if few else [prepared.train, prepared.held_out]
    key, stored = _encoded(config, sets, stop, few)
    train, held_out = latent_image_sets(stored, sets, key)
    if not config.latents.mean:
        mean, deviation = statistics(stored.latents[: len(train)])
        config = replace(config, latents=replace(config.latents, mean=mean, deviation=deviation))
        _tell(config, few)
    return replace(prepared, latents=(train, held_out)), config


def _encoded(config: Config, sets: list[ImageSet], stop: Callable[[], None], few: bool) -> tuple[str, LatentArrays]:
    """Return (cache key, latents), from the cache or encoded now."""
    try:
        device = choose_device(config.training.device)
    except RequestError:  # the run began on a machine with another device
        device = torch.device("cpu")
    latents, size = config.latents, config.data.size
    side, copies = size // latents.factor, 1 + config.data.flip
    prints = () if few else tuple(images.fingerprint for images in sets)
    matters = (FORMAT, prints, latents.sha256, copies, autoencoder_batch(size))
    key = hashlib.sha256(repr(matters).encode()).hexdigest()[:32]
    encode = partial(encode_pixels, open_run_autoencoder(config, device), device)
    wanted = EncodeJob(sets, (latents.channels, side, side), copies, encode, autoencoder_batch(size))
    started, done = time.perf_counter(), 0
    with Progress("encoding latents", None) as progress:

        def update(images: int, total: int) -> None:
            nonlocal done
            stop()
            progress.total, done = total, images
            progress.update(images)

        stored = encode_into_memory(wanted, update) if few else load_or_encode(key, wanted, update)
    if done and not few:
        say(f"  latents: {done:,} images encoded in {time.perf_counter() - started:.1f} s")
    return key, stored


def _tell(config: Config, few: bool) -> None:
    """Print the shape and deviation of the latents; warn of a channel without information."""
    latents, data = config.latents, config.data
    side = data.size // latents.factor
    share = data.channels * latents.factor**2 / latents.channels
    low, high = min(latents.deviation), max(latents.deviation)
    say(
        f"  latents: {latents.channels}x{side}x{side} of {data.size}x{data.size} pixels, {share:.3g} times fewer; "
        f"deviation {low:.3g} to {high:.3g} by channel, made {config.diffusion.sigma_data:g}"
        + (f", from {_FEW} images" if few else "")
    )
    if low < _DEAD_CHANNEL * high:
        warn(f"a channel of the latents hardly varies (deviation {low:.2g}, another {high:.2g}); fewer would do")


def _few_images(images: ImageSet) -> ImageSet:
    """Return at most _FEW images of a set, evenly spaced."""
    wanted = np.unique(np.linspace(0, max(0, len(images) - 1), min(len(images), _FEW)).astype(np.int64))
    pixels, labels, rows = images.take(wanted)
    return ImageSet(pixels, labels, [images.names[int(i)] for i in rows], images.classes)
