"""Checks of the settings of a run before it begins: the table of all of them, and how to run them.

To add a check, write a function that returns a Finding in one of the modules beside this one, and give it a line in
CHECKS, under the code of its finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from unfog.checks.settings import interval_checks, learning_rate_checks, length_checks, machine_checks, noise_checks
from unfog.config.schema import Config
from unfog.data.augmentation import CONDITIONS, Augment, to_model_range
from unfog.data.dataset import Dataset
from unfog.data.latents import Normalise
from unfog.errors import RequestError
from unfog.models.registry import build_model
from unfog.reporting.findings import Finding


@dataclass(frozen=True)
class SettingsInput:
    """Everything that a check of settings may look at."""

    config: Config
    """Resolved: network, learning rate, precision, length and intervals are chosen."""
    prepared: Dataset
    device: torch.device
    seconds_per_step: float | None
    """None where it was not measured."""
    folder: Path
    """Folder of the checkpoints, or one above it."""
    parameters: int
    """Number of weights of the network."""

    @cached_property
    def pixels(self) -> Tensor:
        """Some training images, uint8 [B, C, H, W]."""
        return noise_checks.evenly_spread_pixels(self.prepared.train)

    @property
    def network_input(self) -> Tensor:
        """Some images as the network sees them, [B, C, H, W]."""
        stored = noise_checks.evenly_spread_pixels(self.prepared.as_network_input.train)[:8]
        config = self.config
        if not config.uses_latents:
            return to_model_range(stored)
        latents = Normalise(config.latents.mean, config.latents.deviation, config.diffusion.sigma_data)
        return latents.forward(stored[:, 0])


CHECKS: Mapping[str, Callable[[SettingsInput], Finding]] = {
    "settings.range": lambda x: noise_checks.check_range(x.pixels, Augment.from_settings(x.config.data)),
    "settings.timesteps": lambda x: noise_checks.check_timesteps(x.config.diffusion),
    "settings.terminal_snr": lambda x: noise_checks.check_terminal_signal(x.config),
    "settings.input_scale": lambda x: noise_checks.check_input_scale(x.config.diffusion, x.network_input),
    "settings.labels": lambda x: interval_checks.check_labels(x.config, x.prepared),
    "settings.guidance": lambda x: interval_checks.check_guidance(x.config),
    "settings.batch": lambda x: learning_rate_checks.check_batch(x.config, len(x.prepared.train)),
    "settings.lr": lambda x: learning_rate_checks.check_learning_rate(x.config, x.parameters),
    "settings.warmup": lambda x: learning_rate_checks.check_warmup(x.config),
    "settings.optimizer": lambda x: learning_rate_checks.check_optimizer(x.config),
    "settings.clip": lambda x: learning_rate_checks.check_clipping(x.config),
    "settings.ema": lambda x: learning_rate_checks.check_ema(x.config),
    "settings.length": lambda x: length_checks.check_length(x.config, x.prepared),
    "settings.asides": lambda x: interval_checks.check_run_costs(
        x.config, len(x.prepared.held_out), x.seconds_per_step
    ),
    "settings.held_out": lambda x: interval_checks.check_held_out(x.config, x.prepared),
    "settings.sampler": lambda x: noise_checks.check_sampler(x.config),
    "settings.checkpoints": lambda x: interval_checks.check_checkpoints(x.config, x.seconds_per_step),
    "settings.precision": lambda x: machine_checks.check_precision(x.config, x.device),
    "settings.disk": lambda x: machine_checks.check_disk(x.config, x.parameters, x.folder),
}


def check_settings(
    config: Config,
    prepared: Dataset,
    device: torch.device,
    seconds_per_step: float | None = None,
    folder: Path = Path(),
) -> list[Finding]:
    """Run all checks, without a training step; see `SettingsInput` for the arguments.

    Only settings.network is returned where the network does not fit the images.
    """
    network = check_network(config, prepared)
    if network.severity == "fatal":
        return [network]
    given = SettingsInput(config, prepared, device, seconds_per_step, folder, network.facts["parameters"])
    return [network, *(check(given) for check in CHECKS.values())]


def check_network(config: Config, prepared: Dataset) -> Finding:
    """Build the network, to check that it takes images of this size and these channels."""
    channels, height, width = prepared.as_network_input.train.pixels.shape[-3:]
    if config.network is None:
        raise RequestError("network = auto must be resolved before settings can be checked")
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
