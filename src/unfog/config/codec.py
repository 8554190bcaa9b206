"""The recipe for training a codec."""

from __future__ import annotations

from dataclasses import replace

from unfog.config.text import shown, suggest
from unfog.config.tree import Config
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.codec_settings import FACTORS, WIDTHS, Autoencoder
from unfog.training.settings import Evaluate, Optimizer, Preview, Training


def codec_recipe() -> Config:
    """What a codec is trained with, unless told otherwise; `with_codec` adds the codec itself.

    A cosine schedule and large steps, as in the default preset; small batches, as each image has thousands of pixels
    to learn from. Nothing is drawn, so the sampler only says that a look costs two passes.
    """
    return Config(
        label_dropout=0.0,
        training=Training(batch=16),
        optimizer=Optimizer(lr=3e-3, schedule="cosine", betas=(0.9, 0.99), weight_decay=0.0),
        sampler=Sampler(steps=2),
        preview=Preview(images=16),
        evaluate=Evaluate(images=128, levels=1),
    )


def with_codec(config: Config, factor: int = 4, channels: int = 4, width: str = "small", **weights: float) -> Config:
    """The configuration of a run that trains a codec.

    Args:
        config: `codec_recipe`, changed.
        factor: pixels across one latent.
        channels: numbers at each place of a latent.
        width: one of WIDTHS.
        weights: other fields of `Autoencoder`, such as kl and pyramid.

    Raises:
        RequestError: there is no such codec, or a codec is given to be trained on.
    """
    if width not in WIDTHS:
        raise RequestError(f"width = {shown(width)} is unknown{suggest(width, WIDTHS)}")
    if factor not in FACTORS:
        raise RequestError(f"factor = {shown(factor)} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
    if config.codec or config.network is not None:
        raise RequestError("a codec is trained on images, by itself: leave --codec and --network away")
    levels = WIDTHS[width][: factor.bit_length() - 1]
    codec = Autoencoder(factor=factor, latent_channels=channels, channels=levels)
    return replace(config, autoencoder=replace(codec, **weights))  # type: ignore[arg-type]
