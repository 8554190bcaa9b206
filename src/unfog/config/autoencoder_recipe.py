"""The recipe for training a codec, and what of the settings it reads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from unfog.config.schema import Config
from unfog.config.values import sanitize, suggest
from unfog.data.settings import Data
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import FACTORS, WIDTHS, Autoencoder
from unfog.reporting.settings import Log
from unfog.training.ema_schedules import EmaSchedule, PowerEma
from unfog.training.settings import Checkpoint, EmaSnapshots, Evaluate, Optimizer, Preview, Training


@dataclass(frozen=True)
class AutoencoderEvaluate:
    """What is measured during training: the error and the PSNR of held-out images that come back of the codec."""

    every: int = 0
    """Steps between evaluations. 0: about ten in the run; -1: none."""
    images: int = 128
    """Held-out images that are used."""


@dataclass(frozen=True)
class AutoencoderRunSettings:
    """Those of `Config` that training a codec reads, by the same names; it has no noise levels, and draws nothing."""

    data: Data
    training: Training
    optimizer: Optimizer
    ema: EmaSchedule = PowerEma()
    """Average of the weights, which becomes the codec: power:width=0.1 or fixed:decay_max=0.9999."""
    ema_snapshots: EmaSnapshots = EmaSnapshots()
    log: Log = Log()
    preview: Preview = Preview()
    evaluate: AutoencoderEvaluate = AutoencoderEvaluate()
    checkpoint: Checkpoint = Checkpoint()

    @classmethod
    def of(cls, config: Config) -> AutoencoderRunSettings:
        """These settings of a run."""
        kept = {f.name: getattr(config, f.name) for f in fields(cls)}
        return cls(**kept | {"evaluate": AutoencoderEvaluate(config.evaluate.every, config.evaluate.images)})


def autoencoder_recipe() -> Config:
    """What a codec is trained with, unless told otherwise; `with_codec` adds the codec itself.

    A cosine schedule and large steps, as in the default preset; small batches, as each image has thousands of pixels
    to learn from. Nothing is drawn, so the sampler only says that a look costs two passes.
    """
    return Config(
        label_dropout=0.0,
        training=Training(batch=16, noise="batch"),
        optimizer=Optimizer(lr=3e-3, schedule="cosine", betas=(0.9, 0.99), weight_decay=0.0),
        sampler=Sampler(steps=2),
        preview=Preview(images=16),
        evaluate=Evaluate(images=128, levels=1),
    )


def add_autoencoder(
    config: Config, factor: int = 4, channels: int = 4, width: str = "small", **weights: float
) -> Config:
    """The configuration of a run that trains a codec.

    Args:
        config: `codec_recipe`, changed.
        factor: pixels across one latent.
        channels: numbers at each place of a latent.
        width: one of WIDTHS.
        weights: other fields of `Autoencoder`, such as kl and pyramid.

    Raises:
        RequestError: there is no such codec, or a setting is given that means nothing to one.
    """
    if width not in WIDTHS:
        raise RequestError(f"width = {sanitize(width)} is unknown{suggest(width, WIDTHS)}")
    if factor not in FACTORS:
        raise RequestError(f"factor = {sanitize(factor)} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
    if other := _of_no_use(config):
        raise RequestError(f"{other} is a setting for unfog train, and a codec has no use for it: leave it away")
    levels = WIDTHS[width][: factor.bit_length() - 1]
    codec = Autoencoder(factor=factor, latent_channels=channels, channels=levels)
    return replace(config, autoencoder=replace(codec, **weights))  # type: ignore[arg-type]


def _of_no_use(config: Config) -> str:
    """The first setting that is not as the recipe has it, and that a codec does not read; "" if there is none."""
    found_out = ("source", "classes", "latents", "autoencoder", "fingerprint")  # rather than set
    usual = autoencoder_recipe()
    for ours, theirs, read, where in (
        (config, usual, AutoencoderRunSettings, ""),
        (config.evaluate, usual.evaluate, AutoencoderEvaluate, "evaluate."),
    ):
        names = {f.name for f in fields(ours)} - {f.name for f in fields(read)} - {*found_out}
        for name in sorted(names):
            if getattr(ours, name) != getattr(theirs, name):
                return where + name
    return ""
