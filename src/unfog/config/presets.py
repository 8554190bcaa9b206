"""Presets: functions that return a whole configuration. Flags and TOML files change any setting of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unfog.config.schema import Config
from unfog.config.values import sanitize, suggest
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, VP, Cosine, Flow, LogitNormal, LogNormal
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import EdmF, Eps, FlowVelocity
from unfog.diffusion.weighting import Edm, Plain
from unfog.errors import RequestError
from unfog.models.settings import SIZES
from unfog.training.settings import FixedEma, Muon, Optimizer, Preview, Training


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
    As in the paper, the network sees ln(sigma) / 4; `--network small:time_scale=100` tells levels further apart.
    """
    return replace(
        _default(),
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
    """Return the preset of this name. Raise RequestError with a suggestion if there is none."""
    if not isinstance(name, str) or name not in PRESETS:
        raise RequestError(f"preset = {sanitize(name)} is unknown{suggest(name, PRESETS)}")
    return PRESETS[name]()
