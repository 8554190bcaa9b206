"""Presets: functions that return a whole configuration, which flags and TOML files change; also of an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from unfog.config.schema import Config
from unfog.config.spec_strings import quote
from unfog.config.task import AutoencoderTask, DiffusionTask, RunTask
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, VP, Cosine, Flow, LogitNormal, LogNormal
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import EdmF, Eps, FlowVelocity
from unfog.diffusion.weighting import Edm, Plain
from unfog.errors import RequestError
from unfog.models.settings import SIZES
from unfog.reporting.log_settings import Log
from unfog.settings import setting
from unfog.text import suggest
from unfog.training.settings import (
    Checkpoint,
    EmaSchedule,
    EmaSnapshots,
    Evaluate,
    FixedEma,
    Muon,
    Optimizer,
    PowerEma,
    Preview,
    Training,
)


def _default() -> Config:
    """The recipe with the best samples for the time, as measured (docs/decisions/0007-default-recipe.md).

    Rectified flow, logit-normal noise levels, Muon with a cosine schedule, a power-function EMA. Runs for an hour
    unless a length is given. Samples are recognisable after some 50,000 training images at 28 pixels.
    """
    return Config(
        diffusion=Diffusion(path=Flow(), schedule=LogitNormal(), target=FlowVelocity(), weighting=Plain()),
        training=Training(noise="batch"),
        optimizer=Optimizer(method=Muon(), schedule="cosine", betas=(0.9, 0.99), weight_decay=0.0),
        guidance=1.5,
        guidance_interval=(0.2, 0.8),
        guide="auto",
    )


def _ddpm() -> Config:
    """The textbook recipe (Ho et al. 2020, with the cosine schedule of Nichol and Dhariwal 2021).

    T = 1000, noise prediction, mean squared error, AdamW at 2e-4, clipping at 1, EMA of 0.9999. It needs hundreds of
    thousands of steps, about a day at 64x64 on a GPU of 2018. In short runs the samples of `default` are far better.
    """
    return Config(
        data=Data(flip=True),
        label_dropout=0.0,
        diffusion=Diffusion(path=VP(), schedule=Cosine(steps=1000), target=Eps(), weighting=Plain()),
        training=Training(noise="batch"),
        optimizer=Optimizer(lr=2e-4, betas=(0.9, 0.999), schedule="constant"),
        ema=FixedEma(decay_max=0.9999),
        sampler=Sampler(kind="ddim", steps=50),
    )


def _edm() -> Config:
    """EDM (Karras et al. 2022, Table 1): variance exploding, log-normal noise, F, Heun's 18 steps (35 calls).

    All else is that of `default`. The noise levels suit 32 to 64 pixels; `--schedule lognormal:mean=0` suits fewer.
    As in the paper, the network sees ln(sigma) / 4; `--network small:time_scale=100` separates levels further.
    """
    return replace(
        _default(),
        data=Data(upright=0.5),
        diffusion=Diffusion(VE(), LogNormal(), EdmF(), Edm(), conditioning="logsnr", scale_input=True),
        sampler=Sampler(kind="heun", steps=18),
    )


def _demo() -> Config:
    """`default` with a network of 1M parameters, for three minutes on two CPU cores: about 90,000 images."""
    recipe = _default()
    return replace(
        recipe,
        network=SIZES["tiny"],
        training=replace(recipe.training, budget="3m"),
        preview=Preview(images=40),
    )


PRESETS: dict[str, Callable[[], Config]] = {"default": _default, "ddpm": _ddpm, "edm": _edm, "demo": _demo}


def preset(name: str) -> Config:
    """Return the preset of this name. Raise RequestError with a suggestion if it is unknown."""
    if not isinstance(name, str) or name not in PRESETS:
        raise RequestError(f"preset = {quote(name)} is unknown{suggest(name, PRESETS)}")
    return PRESETS[name]()


@dataclass(frozen=True)
class _Evaluate:
    """Evaluation during training: error and PSNR of reconstructed held-out images."""

    every: int = setting(0, auto=0)
    """Steps between evaluations. 0: about ten in the run, fewer in a short one; -1: none."""
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
            raise RequestError(f"{other} is a setting of unfog train; training an autoencoder does not use it")
        values = {f.name: getattr(config, f.name) for f in fields(cls)}
        return cls(**values | {"evaluate": _Evaluate(config.evaluate.every, config.evaluate.images)})

    def config(self, source: str) -> Config:
        """Return the configuration of a run with these settings; `unfog.train_autoencoder` completes it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        recipe = autoencoder_recipe()
        evaluate = replace(recipe.evaluate, every=self.evaluate.every, images=self.evaluate.images)
        return replace(recipe, source=source, **values | {"evaluate": evaluate})


# RunTask -> (its settings, None for all; those that are allowed, as in a shared TOML file, and change nothing).
SETTINGS_OF: dict[type[RunTask], tuple[type | None, tuple[str, ...]]] = {
    DiffusionTask: (None, ()),
    AutoencoderTask: (AutoencoderRunSettings, ("ema_snapshots", "data.labels")),
}


def autoencoder_recipe() -> Config:
    """Return the default settings of autoencoder training; `unfog.train_autoencoder` adds the autoencoder itself."""
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


def _first_unused(config: Config) -> str:
    """Return the first setting that differs from the recipe and that the run would not read; "" without one."""
    facts = ("source", "classes", "columns", "latents", "autoencoder", "fingerprint", "buckets")  # found, not set
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
