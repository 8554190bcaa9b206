"""Cost of a sample: its network calls, counted from the settings, and its time, from a few steps of the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Labelled, inside_interval
from unfog.diffusion.noise import Schedule
from unfog.diffusion.sampler import TWO_CALLS, Sampler
from unfog.pipeline.generate import GenerationSettings, generate_images


def sample_calls(drawing: GenerationSettings, schedule: Schedule) -> int:
    """Return the network calls for a sample; those for its guidance, by a class or a guide, count as well."""
    calls = drawing.sampler.steps
    if drawing.guidance != 1:
        # In float32, as the sampler gives the levels to the denoiser: some are at the ends of the interval.
        guided = inside_interval(drawing.sampler.visits(schedule)[:-1].float(), drawing.interval)
        calls += math.ceil(sum(guided) / drawing.guide_every)
    return calls * (2 if drawing.sampler.kind in TWO_CALLS else 1)


def cost_per_sample(
    network: nn.Module,
    config: Config,
    drawing: GenerationSettings,
    measure: Callable[[Callable[[], object]], float],
    guide: Labelled | None = None,
) -> float:
    """Return what `measure` gives for one sample, from two steps of the sampler in `drawing`, by the network calls."""
    trial = replace(drawing, sampler=replace(drawing.sampler, steps=_trial_steps(drawing.sampler)))
    whole, part = (sample_calls(one, config.diffusion.schedule) for one in (drawing, trial))
    return measure(lambda: generate_images(network, config, trial, guide=guide)) / drawing.count * whole / part


def _trial_steps(sampler: Sampler) -> int:
    # The adaptive sampler decides itself how many steps it takes, so a part of them says nothing.
    return sampler.steps if sampler.kind == "adaptive" else min(2, sampler.steps)
