"""Counterparts in diffusers: the objective of a scheduler there, and the outputs of an exported network."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unfog.config.values import quote
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Flow, FlowUniform, Linear
from unfog.diffusion.target import X0, Eps, FlowVelocity, Target, V
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network
from unfog.inference.run import Run
from unfog.pipeline.build import input_shape

_TARGETS: dict[str, Target] = {"epsilon": Eps(), "sample": X0(), "v_prediction": V()}


def objective_from_scheduler(scheduler: Mapping[str, Any], base: Diffusion) -> Diffusion:
    """Return the objective of a scheduler_config.json of diffusers, and everything else, such as the weighting, of
    `base`. RequestError if it has no equivalent here."""
    # Missing keys have the defaults of diffusers' DDPMScheduler.
    kind, steps = str(scheduler.get("_class_name", "DDPMScheduler")), scheduler.get("num_train_timesteps", 1000)
    plain = replace(base, conditioning="timestep", scale_input=False)
    if kind.startswith("FlowMatch"):
        return replace(plain, path=Flow(), schedule=FlowUniform(), target=FlowVelocity())
    # Levels is of our own exports: their levels say nothing of what the network predicts.
    if kind.startswith(("EDM", "KarrasVe", "ScoreSdeVe", "VQ", "Cosine", "CM", "Levels")) or scheduler.get(
        "trained_betas"
    ):
        raise _untranslatable(kind, "has no equivalent that could be read off it")
    if not isinstance(steps, int) or steps < 2:
        raise _untranslatable(f"'s num_train_timesteps = {quote(steps)}", "is no number of steps")
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


@torch.inference_mode()
def export_difference(run: Run) -> float:
    """Return the largest output difference between a run's network and its export to diffusers, relative to ours.

    RequestError if diffusers has no equivalent network.
    """
    from diffusers import UNet2DModel

    # Many branches of a network start at zero and are nearly zero after two steps, so that an exchanged weight would
    # go unnoticed: both get random weights.
    config, network = run.config, _randomized(run.network.cpu())
    assert config.network is not None  # a run's is settled
    channels, side, _ = input_shape(config)
    out = channels * (2 if config.diffusion.learned_variance else 1)
    settings, state = Network(config.network, channels, len(config.classes), network.state_dict(), out).to_unet2d(side)
    exported = UNet2DModel(**settings).eval()
    exported.load_state_dict(state)
    x = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(1))
    level = torch.tensor([10.0, 500.0])
    label = torch.tensor([0, len(config.classes)]) if config.classes else None  # a class, and no class
    expected = network(x, level, label)
    difference = (exported(x, level, class_labels=label).sample - expected).abs().max()
    # A network may answer 0 everywhere, which is no division.
    return float(difference / expected.abs().max().clamp_min(1e-12))


def _randomized(network: nn.Module) -> nn.Module:
    """Return a copy of a network with random weights of ordinary size, so that all of them affect the output."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # biases about 0, the scales of normalisations about 1
            parameter.copy_(parameter.round().clamp(0, 1) + 0.1 * noise)
    return copy
