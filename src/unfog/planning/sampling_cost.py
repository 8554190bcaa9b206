"""Cost of a sample: its network calls, counted from the settings, and its time, from a few steps of the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Conditional, inside_interval
from unfog.diffusion.noise import Schedule
from unfog.diffusion.sampler import TWO_CALLS, Sampler
from unfog.diffusion.steps import PURE_NOISE
from unfog.pipeline.generate import GenerationSettings, generate_images


def sample_calls(drawing: GenerationSettings, schedule: Schedule) -> int:
    """Return the network calls for a sample; those for its guidance, by a class or a guide, count as well."""
    levels = drawing.sampler.visits(schedule)[:-1]
    if drawing.sampler.kind in TWO_CALLS:
        # Once more where a step ends, but for those from pure noise and into the clean image: see `steps.heun`.
        levels = torch.cat([levels, levels[1:][levels[:-1] >= -2 * math.log(PURE_NOISE)]])
    if drawing.guidance == 1:
        return len(levels)
    # In float32, as the sampler gives the levels to the denoiser: some are at the ends of the interval.
    guided = inside_interval(levels.float(), drawing.interval)
    return len(levels) + math.ceil(sum(guided) / drawing.guide_every)


def cost_per_sample(
    network: nn.Module,
    config: Config,
    drawing: GenerationSettings,
    measure: Callable[[Callable[[], object]], float],
    guide: Conditional | None = None,
) -> float:
    """Extrapolate `measure` of one sample from two steps of the sampler in `drawing`, by the network calls."""
    trial = replace(drawing, sampler=replace(drawing.sampler, steps=trial_steps(drawing.sampler)))
    whole, part = (sample_calls(one, config.diffusion.schedule) for one in (drawing, trial))
    return measure(lambda: generate_images(network, config, trial, guide=guide)) / drawing.count * whole / part


def trial_steps(sampler: Sampler) -> int:
    """Return the sampler steps of a timing trial: two at most, or all of an adaptive sampler."""
    # The adaptive sampler decides itself how many steps it takes, so a part of them says nothing.
    return sampler.steps if sampler.kind == "adaptive" else min(2, sampler.steps)
