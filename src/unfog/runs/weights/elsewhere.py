"""Settings of a run that goes on from weights of another program: its objective, sampler and latents."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.diffusion.ddpm import TimestepSchedule
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Linear, LogNormal
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.sigmoid import Sigmoid
from unfog.diffusion.target import X0, Eps, Target, V
from unfog.errors import RequestError
from unfog.export.elsewhere import ElsewhereModel
from unfog.models.autoencoder_settings import AutoencoderFolder, Latents

_LEVELS = {"edm": LogNormal(), "edm2": LogNormal(mean=-0.4, std=1.0)}  # for EDM2: Karras et al. 2024, table 5
# A checkpoint has no name for it, but the weight of the loss at SNR s: 1 for noise, s for x0, s / (s + 1) for v.
_TARGETS: dict[str, Target] = {"noise": Eps(), "x0": X0(), "v": V()}


class Objective(NamedTuple):
    """The objective that weights were trained with, and their usual sampler."""

    diffusion: Diffusion
    sampler: Sampler | None
    """None: that of the recipe."""
    reason: str


def objective_of(model: ElsewhereModel, base: Diffusion, known: bool) -> Objective:
    """Return the objective of weights, with everything else, such as the weighting, of `base` where it is open.

    `known`: path, schedule and target are given, so that `base` is the objective. RequestError if it cannot be told.
    """
    if model.network.kind in _LEVELS:
        recipe = preset("edm")
        diffusion = replace(recipe.diffusion, schedule=_LEVELS[model.network.kind])
        return Objective(diffusion, recipe.sampler, "EDM's preconditioning, EDMPrecond, as the weights cannot tell")
    if known:
        return Objective(base, None, "as given")
    plain = replace(base, path=VP(), conditioning="timestep", scale_input=False)
    betas, weight = model.buffers.get("betas"), model.buffers.get("loss_weight")
    if betas is None or weight is None:
        reason = "the program's defaults, as the file has weights alone; if it was another: --target, --schedule"
        return Objective(replace(plain, schedule=Sigmoid(), target=V()), None, reason)
    diffusion = replace(plain, schedule=_schedule(betas), target=_target(betas, weight))
    return Objective(diffusion, None, "as the noise levels and the loss weights in the file say")


def _schedule(betas: Tensor) -> Sigmoid | Cosine | Linear:
    steps = len(betas)
    if betas.ndim == 1 and 2 <= steps <= 100_000:
        candidates: list[TimestepSchedule] = [Sigmoid(steps=steps), Cosine(steps=steps), Linear(steps=steps)]
        for schedule in candidates:
            ours = torch.tensor(schedule.betas(), dtype=torch.float64)
            # Loosely, as they are stored in float32 and were computed in other ways.
            if torch.allclose(ours, betas.double(), rtol=1e-3, atol=1e-7):
                return schedule  # type: ignore[return-value]
    raise RequestError(
        "the noise levels in this checkpoint are those of no schedule with its usual settings; there is sigmoid, "
        "cosine and linear: give --path, --schedule and --target"
    )


def _target(betas: Tensor, weight: Tensor) -> Target:
    kept = (1 - betas.double()).cumprod(0)
    snr = kept / (1 - kept)
    # Where the SNR is a half, below the limits that min-SNR weighting has.
    at = int((snr - 0.5).abs().argmin())
    s, found = snr[at].item(), weight[at].item()
    for name, expected in {"noise": 1.0, "x0": s, "v": s / (s + 1)}.items():
        if math.isclose(found, expected, rel_tol=1e-3):
            return _TARGETS[name]
    raise RequestError(
        "the loss weights in this checkpoint are of no objective that is known; give --target and others"
    )


def with_latents_of(config: Config, pipeline: Path, side: int) -> Config:
    """Return settings with the autoencoder of a diffusers pipeline, and the scale of latents that it was trained with.

    `side` is that of the latents. Unchanged if the pipeline has no autoencoder.
    """
    folder = pipeline / "vae"
    if not (folder / "config.json").is_file():
        return config
    opened = AutoencoderFolder.open(str(folder))
    scale, shift = (opened.config.get(name) for name in ("scaling_factor", "shift_factor"))
    scale = float(scale) if isinstance(scale, int | float) and 1e-6 < abs(scale) < 1e6 else 1.0
    shift = float(shift) if isinstance(shift, int | float) else 0.0
    # There, the network sees (latent - shift) * scale; here, (latent - mean) / deviation * sigma_data.
    count, deviation = opened.channels, config.diffusion.sigma_data / scale
    latents = Latents(opened.sha256(), opened.factor, count, (shift,) * count, (deviation,) * count)
    data = replace(config.data, size=side * opened.factor, channels=opened.image_channels)
    return replace(config, data=data, latents=latents, autoencoder_folder=str(folder))
