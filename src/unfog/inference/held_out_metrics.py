"""Metrics of held-out images, which need no samples: their loss, and a bound on their likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.likelihood import bits_per_dim
from unfog.diffusion.sampler import NoiseSource
from unfog.evaluation.held_out import HeldOut, MeanEstimate, mean_over_images, paired_difference
from unfog.evaluation.metrics import MetricResult
from unfog.evaluation.precision_recall import Z
from unfog.pipeline.build import build_loss_at

MOST = 1000  # held-out images of the loss
LIKELY = 256  # held-out images of the bits, which take many more network calls
LEVELS = 64
"""Network calls per image for the bits; with 64 the bound is within a percent."""


def held_out_losses(
    network: nn.Module, config: Config, held_out: HeldOut, batch: int, progress: Callable[[int], None]
) -> Tensor:
    """Return the loss [L, N] of each image at each noise level; `progress` gets the images of every forward pass."""
    return held_out.losses(build_loss_at(network, config), batch, progress=progress)[0]


def held_out_loss(losses: Tensor) -> MetricResult:
    """Return the mean loss, with the confidence interval for the choice of images."""
    note = f"the noise of {losses.shape[0]} levels is the same each time, so two checkpoints compare: --against STEP"
    return _as_metric("held_out", mean_over_images(losses), note)


def held_out_difference(losses: Tensor, others: Tensor, step: int) -> MetricResult:
    """Return how much higher the loss is than that of another checkpoint, paired by image."""
    difference = paired_difference(losses, others)
    sure = abs(difference.value) > Z * difference.error
    which = "lower" if difference.value < 0 else "higher"
    note = f"{which} than at step {step:,}" if sure else f"not significantly different from step {step:,}"
    return _as_metric("held_out_difference", difference, f"{note}, by the same images and noise")


def bits_per_value(
    network: nn.Module, config: Config, held_out: HeldOut, batch: int, seed: int, progress: Callable[[int], None]
) -> MetricResult:
    """Return the variational bound on the bits per dimension (VDM, Kingma et al. 2021)."""
    denoiser, found = Denoiser(network, config.diffusion, config.diffusion.learned_variance), []
    for first in range(0, len(held_out.x0), batch):
        x0 = held_out.x0[first : first + batch]
        label = None if held_out.label is None else held_out.label[first : first + batch]
        source = NoiseSource(seed, range(first, first + len(x0)), (x0.shape[1], x0.shape[2], x0.shape[3]), x0.device)
        guess = partial(denoiser, label=label)
        found.append(bits_per_dim(guess, config.diffusion, x0, LEVELS, source.draw).cpu())
        progress(len(x0))
    note = f"upper bound on bits per dimension, from at most {LEVELS} noise levels"
    return _as_metric("bits", mean_over_images(torch.cat(found)[None]), note)


def _as_metric(name: str, mean: MeanEstimate, note: str) -> MetricResult:
    if math.isnan(mean.error):
        return MetricResult(name, mean.value, None, None, None, mean.n, 0, "none", "none", note)
    low, high = mean.value - Z * mean.error, mean.value + Z * mean.error
    return MetricResult(name, mean.value, low, high, mean.error, mean.n, 0, "none", "none", note)
