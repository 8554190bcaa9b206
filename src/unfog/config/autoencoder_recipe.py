"""The recipe for training an autoencoder, and the settings that such a run reads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from unfog.config.schema import Config
from unfog.config.values import sanitize, suggest
from unfog.data.settings import Data
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import FACTORS, WIDTHS, Autoencoder
from unfog.reporting.settings import Log
from unfog.training.settings import (
    Checkpoint,
    EmaSchedule,
    EmaSnapshots,
    Evaluate,
    Optimizer,
    PowerEma,
    Preview,
    Training,
)


@dataclass(frozen=True)
class _Evaluate:
    """Evaluation during training: error and PSNR of reconstructed held-out images."""

    every: int = 0
    """Steps between evaluations. 0: about ten in the run; -1: none."""
    images: int = 128
    """Number of held-out images."""


@dataclass(frozen=True)
class AutoencoderRunSettings:
    """The settings of `Config` that autoencoder training reads, by the same names: no noise levels, no sampler."""

    data: Data
    training: Training
    optimizer: Optimizer
    ema: EmaSchedule = PowerEma()
    """EMA of the weights, which becomes the autoencoder: power:width=0.1 or fixed:decay_max=0.9999."""
    ema_snapshots: EmaSnapshots = EmaSnapshots()
    log: Log = Log()
    preview: Preview = Preview()
    evaluate: _Evaluate = _Evaluate()
    checkpoint: Checkpoint = Checkpoint()

    @classmethod
    def of(cls, config: Config) -> AutoencoderRunSettings:
        """Return these settings of a run. Raise RequestError if another one is not as in the recipe."""
        if other := _first_unused(config):
            raise RequestError(f"{other} is a setting for unfog train, and an autoencoder has no use for it")
        values = {f.name: getattr(config, f.name) for f in fields(cls)}
        return cls(**values | {"evaluate": _Evaluate(config.evaluate.every, config.evaluate.images)})

    def config(self, source: str) -> Config:
        """Return the configuration of a run with these settings; `add_autoencoder` completes it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        recipe = autoencoder_recipe()
        evaluate = replace(recipe.evaluate, every=self.evaluate.every, images=self.evaluate.images)
        return replace(recipe, source=source, **values | {"evaluate": evaluate})


def autoencoder_recipe() -> Config:
    """Return the default settings of autoencoder training; `add_autoencoder` adds the autoencoder itself."""
    # Small batches, as each image has thousands of pixels to learn from. Nothing is sampled: the sampler's two steps
    # only stand for the two passes that a preview costs.
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
    """Return `config`, made from `autoencoder_recipe`, with an autoencoder; `weights` are kl and pyramid."""
    if width not in WIDTHS:
        raise RequestError(f"width = {sanitize(width)} is unknown{suggest(width, WIDTHS)}")
    if factor not in FACTORS:
        raise RequestError(f"factor = {sanitize(factor)} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
    levels = WIDTHS[width][: factor.bit_length() - 1]
    codec = Autoencoder(factor=factor, latent_channels=channels, channels=levels)
    return replace(config, autoencoder=replace(codec, **weights))  # type: ignore[arg-type]


def _first_unused(config: Config) -> str:
    """Return the first setting that differs from the recipe and that the run would not read; "" without one."""
    facts = ("source", "classes", "latents", "autoencoder", "fingerprint")  # found by the run, not set
    usual = autoencoder_recipe()
    for ours, theirs, used, where in (
        (config, usual, AutoencoderRunSettings, ""),
        (config.evaluate, usual.evaluate, _Evaluate, "evaluate."),
    ):
        names = {f.name for f in fields(ours)} - {f.name for f in fields(used)} - {*facts}
        for name in sorted(names):
            if getattr(ours, name) != getattr(theirs, name):
                return where + name
    return ""
