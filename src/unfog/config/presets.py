"""Recipes. Each is a function that returns a whole configuration; its docstring says what to run, what it costs and
what to expect. Whatever a recipe sets can be changed by a flag or a TOML file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unfog.config.kinds import named
from unfog.config.tree import Config
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import Eps
from unfog.diffusion.weighting import Plain
from unfog.models.settings import SIZES
from unfog.training.settings import FixedEma, Optimizer, Preview, Training


def default() -> Config:
    """The best that was measured here."""
    return Config(
        training=Training(batch=64),
        optimizer=Optimizer(lr=1e-3, schedule="cosine", betas=(0.9, 0.99), weight_decay=0.0),
    )


def ddpm() -> Config:
    """The textbook recipe."""
    return Config(
        data=Data(flip=True),
        label_dropout=0.0,
        diffusion=Diffusion(
            path=VP(),
            schedule=Cosine(steps=1000),
            target=Eps(),
            weighting=Plain(),
            conditioning="timestep",
            scale_input=False,
        ),
        training=Training(batch=64, clip=1.0),
        optimizer=Optimizer(lr=2e-4, betas=(0.9, 0.999), schedule="constant"),
        ema=FixedEma(decay_max=0.9999),
        sampler=Sampler(kind="ddim", steps=50, grid="schedule"),
    )


def demo() -> Config:
    """Three minutes on two CPU cores."""
    recipe = default()
    return replace(
        recipe,
        network=SIZES["tiny"],
        training=replace(recipe.training, budget="3m"),
        preview=Preview(images=40),
    )


PRESETS: dict[str, Callable[[], Config]] = {"default": default, "ddpm": ddpm, "demo": demo}


def preset(name: str) -> Config:
    """The recipe of this name. RequestError with a suggestion if there is none."""
    recipe: Callable[[], Config] = named(PRESETS, name)
    return recipe()
