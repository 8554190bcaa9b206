"""Description of an exported model: all that a sampler has to know besides the weights, as JSON.

At each noise level the network's output y becomes E[x0 | x_t] by four numbers, whatever path, target and condition
the run was trained with:

    x0 = c_skip x_t + c_out y(c_in x_t, c_noise, label)
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.sampler import Level, Sampler
from unfog.inference.loaded_run import LoadedRun
from unfog.pipeline.build import input_shape
from unfog.pipeline.generate import without_pixel_clipping

_VERSION = 1


def describe_model(run: LoadedRun, sampler: Sampler) -> dict[str, Any]:
    """Return the description of a run's network and of its sampler, as plain values for JSON."""
    config, network = run.config, run.config.network
    assert network is not None  # a run's is settled
    channels, side, _ = input_shape(config)
    sampler, classes = without_pixel_clipping(sampler, config), list(config.classes)
    described: dict[str, Any] = {
        "format": "unfog-model",
        "version": _VERSION,
        "run": {"name": run.path.resolve().name, "step": run.checkpoint.step, "weights": run.weights, "ema": run.ema},
        "network": {"kind": network.kind, "settings": asdict(network)},
        "input": [channels, side, side],
        "out_channels": channels * (1 + config.diffusion.learned_variance),
        "classes": classes,
        "null_label": len(classes) if classes else None,
        "guidance": config.usual_guidance,
        "guidance_interval": list(config.guidance_interval),
        "sampler": {"kind": sampler.kind, "order": sampler.order, "clip": sampler.clip},
        "levels": noise_levels(config.diffusion, sampler),
        "latents": None,
    }
    if config.uses_latents:
        latents = config.latents
        scale = [deviation / config.diffusion.sigma_data for deviation in latents.deviation]
        described["latents"] = {"factor": latents.factor, "mean": list(latents.mean), "scale": scale}
    return described


def noise_levels(diffusion: Diffusion, sampler: Sampler) -> list[dict[str, float]]:
    """Return the noise levels of a sampler, noisiest first, with the coefficients at each; the last is clean."""
    levels = sampler.levels(diffusion.path, diffusion.schedule)
    return [*(_coefficients(diffusion, level) for level in levels[:-1]), {"alpha": 1.0, "sigma": 0.0}]


def _coefficients(diffusion: Diffusion, level: Level) -> dict[str, float]:
    """Return alpha, sigma, c_in, c_noise, c_skip and c_out at a level, computed in float32 as sampling does."""
    logsnr, one, zero = torch.tensor([level.logsnr]), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    # By calling what sampling calls, rather than by formulas of their own that could differ.
    c_in, c_noise = diffusion.network_input(one, logsnr)
    # x0 is linear in x_t and y.
    c_skip, c_out = diffusion.recover(zero, one, logsnr)[0], diffusion.recover(one, zero, logsnr)[0]
    names = {"c_in": c_in, "c_noise": c_noise, "c_skip": c_skip, "c_out": c_out}
    return {"alpha": level.alpha, "sigma": level.sigma} | {name: value.item() for name, value in names.items()}
