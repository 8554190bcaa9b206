"""Objectives of weights from diffusers and other programs, read from their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.spec_strings import quote
from unfog.diffusion.ddpm_schedules import Sigmoid, TimestepSchedule
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Flow, FlowUniform, Linear, LogNormal
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import X0, Eps, FlowVelocity, Target, V
from unfog.diffusion.weighting import MinSnr, Plain, Snr
from unfog.errors import RequestError
from unfog.export.foreign_weights import ForeignModel
from unfog.models.autoencoder_settings import AutoencoderFolder, Latents
from unfog.values.image_format import Size, scaled

_LEVELS = {"edm": LogNormal(), "edm2": LogNormal(mean=-0.4, std=1.0)}  # for EDM2: Karras et al. 2024, table 5
_TARGETS: dict[str, Target] = {"epsilon": Eps(), "sample": X0(), "v_prediction": V()}


def objective_from_scheduler(scheduler: Mapping[str, Any], base: Diffusion) -> Diffusion:
    """Return the objective of a scheduler_config.json of diffusers, and everything else, such as the weighting, of
    `base`. RequestError if it has no equivalent here."""
    # Missing keys have the defaults of diffusers' DDPMScheduler.
    kind, steps = str(scheduler.get("_class_name", "DDPMScheduler")), scheduler.get("num_train_timesteps", 1000)
    plain = replace(base, conditioning="timestep", scale_input=False)
    if kind.startswith("FlowMatch"):
        return replace(plain, path=Flow(), schedule=FlowUniform(), target=FlowVelocity())
    # Levels is of our own exports: their levels say nothing about what the network predicts.
    if kind.startswith(("EDM", "KarrasVe", "ScoreSdeVe", "VQ", "Cosine", "CM", "Levels")) or scheduler.get(
        "trained_betas"
    ):
        raise _untranslatable(kind, "has no equivalent that could be read off it")
    if not isinstance(steps, int) or steps < 2:
        raise _untranslatable(f"'s num_train_timesteps = {quote(steps)}", "is not a number of steps")
    betas, zero = scheduler.get("beta_schedule", "linear"), bool(scheduler.get("rescale_betas_zero_snr", False))
    if betas == "linear":
        ends = (float(scheduler.get(name, usual)) for name, usual in (("beta_start", 1e-4), ("beta_end", 0.02)))
        # Ours are stated for 1,000 steps. Rounded, as the product need not be the number that a person would write.
        first, last = (round(beta * steps / 1000, 12) for beta in ends)
        schedule: Linear | Cosine = Linear(steps=steps, beta_start=first, beta_end=last, zero_terminal=zero)
    elif betas == "squaredcos_cap_v2":
        schedule = Cosine(steps=steps, zero_terminal=zero)
    else:
        known = "has no equivalent; there is linear and squaredcos_cap_v2"
        raise _untranslatable(f"'s beta_schedule = {quote(betas)}", known)
    predicted = scheduler.get("prediction_type", "epsilon")
    if predicted not in _TARGETS:
        known = f"has no equivalent; there is {', '.join(_TARGETS)}"
        raise _untranslatable(f"'s prediction_type = {quote(predicted)}", known)
    return replace(plain, path=VP(), schedule=schedule, target=_TARGETS[predicted])


def _untranslatable(what: str, reason: str) -> RequestError:
    scheduler = f"the scheduler{what}" if what.startswith("'") else f"the scheduler {what}"
    return RequestError(f"{scheduler} {reason}; give --path, --schedule and --target")


class ForeignObjective(NamedTuple):
    """The objective that weights were trained with, and their usual sampler."""

    diffusion: Diffusion
    sampler: Sampler | None
    """None: that of the recipe."""
    reason: str

    @classmethod
    def of(cls, model: ForeignModel, base: Diffusion, known: bool) -> ForeignObjective:
        """Return the objective of weights, with everything else, such as the weighting, of `base` where it is open.

        `known`: path, schedule and target are given, so `base` is the objective. RequestError if nothing states it.
        """
        if model.network.kind in _LEVELS:
            recipe = preset("edm")
            diffusion = replace(recipe.diffusion, schedule=_LEVELS[model.network.kind])
            return cls(diffusion, recipe.sampler, "EDM's preconditioning, EDMPrecond, as the weights do not show it")
        if known:
            return cls(base, None, "as given")
        plain = replace(base, path=VP(), conditioning="timestep", scale_input=False)
        betas, weight = model.buffers.get("betas"), model.buffers.get("loss_weight")
        if betas is None or weight is None:
            reason = "the program's defaults, as the file has weights alone; if it was another: --target, --schedule"
            return cls(replace(plain, schedule=Sigmoid(), target=V(), weighting=Snr()), None, reason)
        schedule, target = _schedule(betas), _target(betas, weight)
        diffusion = replace(plain, schedule=schedule, target=target, weighting=_weighting(betas, weight, target))
        return cls(diffusion, None, "as the noise levels and the loss weights in the file say")


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


def _snr(betas: Tensor) -> Tensor:
    kept = (1 - betas.double()).cumprod(0)
    return kept / (1 - kept)


def _target(betas: Tensor, weight: Tensor) -> Target:
    snr = _snr(betas)
    # Where the SNR is a half, below the limits that min-SNR weighting has.
    at = int((snr - 0.5).abs().argmin())
    s, found = snr[at].item(), weight[at].item()
    # A checkpoint has no name for the target, but the weight of the loss at SNR s.
    known: list[tuple[Target, float]] = [(Eps(), 1.0), (X0(), s), (V(), s / (s + 1))]
    for target, expected in known:
        if math.isclose(found, expected, rel_tol=1e-3):
            return target
    raise _unknown_weights()


def _weighting(betas: Tensor, weight: Tensor, target: Target) -> Plain | Snr | MinSnr:
    """Return the weighting of denoising-diffusion-pytorch: SNR on the image's error for any target, or min-SNR."""
    snr = _snr(betas)
    on_image = weight.double() * {"eps": snr, "x0": torch.ones_like(snr), "v": snr + 1}[target.kind]
    if torch.allclose(on_image, snr, rtol=1e-3, atol=0):
        return Plain() if target == Eps() else Snr()  # the same for the noise
    gamma = float(on_image[0])
    if not torch.allclose(on_image, snr.clamp(max=gamma), rtol=1e-3, atol=0):
        raise _unknown_weights()
    return MinSnr(float(f"{gamma:.5g}"))  # stored in float32, of a number that a person wrote


def _unknown_weights() -> RequestError:
    return RequestError(
        "the loss weights in this checkpoint are of no known objective; give --path, --schedule and --target"
    )


def with_latents_of(config: Config, pipeline: Path, size: Size) -> Config:
    """Return settings with the autoencoder of a diffusers pipeline, and the scale of latents that it was trained with.

    `size` is that of the latents. Unchanged if the pipeline has no autoencoder.
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
    data = replace(config.data, size=scaled(size, opened.factor), channels=opened.image_channels)
    return replace(config, data=data, latents=latents, autoencoder_folder=str(folder))
