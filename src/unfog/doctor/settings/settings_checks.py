"""The settings of a run, looked at before it begins: each against the data, the machine, and the length of the run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.augmentation.augment import Augment, to_model_range
from unfog.data.augmentation.nonleaking import CONDITIONS
from unfog.data.dataset import Dataset
from unfog.data.latents import Normalise
from unfog.doctor.settings.interval_checks import (
    check_checkpoints,
    check_guidance,
    check_held_out,
    check_labels,
    check_run_costs,
)
from unfog.doctor.settings.learning_rate_checks import (
    check_batch,
    check_clipping,
    check_ema,
    check_learning_rate,
    check_optimizer,
    check_warmup,
)
from unfog.doctor.settings.length_checks import check_length
from unfog.doctor.settings.machine_checks import check_disk, check_precision
from unfog.doctor.settings.noise_checks import (
    check_input_scale,
    check_range,
    check_sampler,
    check_terminal_signal,
    check_timesteps,
    evenly_spread_pixels,
)
from unfog.errors import RequestError
from unfog.models.registry import build_model
from unfog.reporting.findings import Finding


def check_settings(
    config: Config,
    prepared: Dataset,
    device: torch.device,
    seconds_per_step: float | None = None,
    folder: Path = Path(),
) -> list[Finding]:
    """A finding for each thing that is looked at, named settings.*; no training step is taken.

    Args:
        config: settled: network, learning rate, precision, length and intervals are chosen.
        prepared: the images.
        device: where the run will compute.
        seconds_per_step: pace, where it was measured; what costs time is then told in time.
        folder: where checkpoints will be written, or one above.
    """
    network = check_network(config, prepared)
    if network.severity == "fatal":
        return [network]
    parameters = network.facts["parameters"]
    pixels = evenly_spread_pixels(prepared.train)
    return [
        network,
        check_range(pixels, Augment.from_settings(config.data)),
        check_timesteps(config.diffusion),
        check_terminal_signal(config),
        check_input_scale(config.diffusion, first_seen(config, prepared)),
        check_labels(config, prepared),
        check_guidance(config),
        check_batch(config, len(prepared.train)),
        check_learning_rate(config, parameters),
        check_warmup(config),
        check_optimizer(config),
        check_clipping(config),
        check_ema(config),
        check_length(config, prepared),
        check_run_costs(config, len(prepared.held_out), seconds_per_step),
        check_held_out(config, prepared),
        check_sampler(config),
        check_checkpoints(config, seconds_per_step),
        check_precision(config, device),
        check_disk(config, parameters, folder),
    ]


def first_seen(config: Config, prepared: Dataset) -> Tensor:
    """Some images as the network sees them, [B, C, H, W]."""
    stored = evenly_spread_pixels(prepared.as_network_input.train)[:8]
    if not config.uses_latents:
        return to_model_range(stored)
    return Normalise(config.latents.mean, config.latents.deviation, config.diffusion.sigma_data).forward(stored[:, 0])


def check_network(config: Config, prepared: Dataset) -> Finding:
    """Whether the network takes images of this size and these channels, by building it."""
    channels, height, width = prepared.as_network_input.train.pixels.shape[-3:]
    if config.network is None:
        raise RequestError("network = auto has to be settled before settings can be examined")
    try:
        config.network.check((height, width))
    except RequestError as error:
        return Finding("settings.network", "fatal", str(error), "--network small, or another --size")
    with torch.random.fork_rng(devices=[]):
        told = CONDITIONS if config.data.augment else 0
        network = build_model(config.network, channels, len(config.classes), told)
    parameters = sum(p.numel() for p in network.parameters())
    facts = {"parameters": parameters, "height": height, "width": width, "channels": channels}
    said = f"{parameters / 1e6:.2f}M parameters {config.network.layout(height, width)}"
    return Finding("settings.network", "fine", said, facts=facts)
