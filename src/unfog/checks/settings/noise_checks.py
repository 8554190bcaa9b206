"""Checks of the network's input: value range, timesteps, terminal signal, scale, and sampling steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.diffusion.diffusion import Diffusion
from unfog.reporting.findings import Finding, Severity

_IMAGES = 64  # images
_MOST_SIGNAL = 0.07
"""Signal at the noisiest level that goes unseen: Stable Diffusion's schedule ends at 0.068, DDPM's at 0.006."""
_HOPELESS_SIGNAL = 0.5
_LOUDEST = 3.0
"""Root mean square of what a network is shown; VP and flow stay below 1, EDM on the VE path reaches 80 unscaled."""
_FEW_STEPS, _FEW_DDPM_STEPS = 5, 50


def evenly_spread_pixels(images: ImageSet, count: int = _IMAGES) -> Tensor:
    """Return evenly spread images of the set, uint8 [B, C, H, W]."""
    index = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(images.pixels.take(index, axis=0)))


def check_range(pixels: Tensor, augment: Augment) -> Finding:
    """Check that the training loop sees these pixels in [-1, 1], and on both sides of 0 where they should be."""
    with torch.random.fork_rng(devices=[]):
        x0, _ = augment(pixels)
    low, high, mean, std = (float(v) for v in (x0.min(), x0.max(), x0.mean(), x0.std()))
    darkest, brightest = int(pixels.min()), int(pixels.max())
    facts = {"images": len(pixels), "low": low, "high": high, "mean": mean, "std": std}
    evidence = f"pixels from {darkest} to {brightest} of {len(pixels)} images become {low:.3f} to {high:.3f}"
    # Jitter and the padding of rotated images stay inside the range without reaching its ends.
    wrong_side = (darkest < 100 and low >= 0) or (brightest > 155 and high <= 0)
    if x0.dtype != torch.float32 or not -1.001 <= low <= high <= 1.001 or wrong_side:
        remedy = "the network expects float32 from -1 to 1; this is a bug: please report it"
        return Finding("settings.range", "fatal", f"{evidence} ({x0.dtype})", remedy, facts)
    return Finding("settings.range", "fine", f"{evidence}, mean {mean:.2f}, deviation {std:.2f}", facts=facts)


def check_timesteps(diffusion: Diffusion) -> Finding:
    """Check that training meets every timestep of a discrete schedule as a whole number, from 0 to T - 1."""
    schedule, count = diffusion.schedule, diffusion.schedule.steps
    if not count or diffusion.conditioning != "timestep":
        u = torch.linspace(1e-3, 1 - 1e-3, 999)
        values = _conditioning_values(diffusion, u)
        facts = {"from": float(values.min()), "to": float(values.max())}
        rising = bool(torch.isfinite(values).all() and (values.diff() > 0).all())
        evidence = f"the network gets noise levels as numbers from {facts['from']:.3g} to {facts['to']:.3g}"
        if rising or count:
            return Finding("settings.timesteps", "fine", evidence, facts=facts)
        return Finding(
            "settings.timesteps", "fatal", f"{evidence}, which do not rise with the noise", "report it", facts
        )
    values = _conditioning_values(diffusion, (torch.arange(4 * count) + 0.5) / (4 * count))
    whole = values.round()
    met = torch.unique(whole)
    facts = {"steps": count, "met": len(met), "from": int(whole.min()), "to": int(whole.max())}
    evidence = (
        f"{len(met):,} of the {count:,} timesteps of the {schedule.kind} schedule are trained, {facts['from']} to "
    )
    evidence += f"{facts['to']}"
    if not torch.allclose(values, whole, rtol=0, atol=0.01):
        evidence = f"timesteps of the {schedule.kind} schedule are fractions, off by {(values - whole).abs().max():.2g}"
        return Finding("settings.timesteps", "fatal", evidence, f"--schedule {schedule.kind}:steps=1000", facts)
    if torch.equal(met, torch.arange(count, dtype=met.dtype)):
        return Finding("settings.timesteps", "fine", f"{evidence}, whole numbers", facts=facts)
    return Finding("settings.timesteps", "fatal", evidence, f"--schedule {schedule.kind}:steps=1000", facts)


def _conditioning_values(diffusion: Diffusion, u: Tensor) -> Tensor:
    return diffusion.network_input(torch.zeros(len(u), 1, 1, 1), diffusion.schedule(u))[1]


def check_terminal_signal(config: Config) -> Finding:
    """Check how much of the image is left at the noise level where sampling starts from pure noise.

    The network learns to read the brightness from that signal. In sampling it reads noise instead, so that all samples
    have medium brightness (Lin et al. 2023, section 3.1).
    """
    diffusion, sampler = config.diffusion, config.sampler
    noisiest = sampler.visits(diffusion.schedule)[:1]
    alpha, sigma = (float(part) for part in diffusion.path(noisiest))
    signal = alpha / (alpha**2 + sigma**2) ** 0.5
    facts = {"logsnr": float(noisiest), "alpha": alpha, "sigma": sigma, "signal": signal}
    evidence = (
        f"{100 * signal:.2g}% of the image's amplitude is left at the level where sampling starts from pure noise"
    )
    if signal <= _MOST_SIGNAL:
        return Finding("settings.terminal_snr", "fine", evidence, facts=facts)
    remedy = "let the schedule end in noise: --schedule cosine, or linear with its own beta_start and beta_end"
    severity: Severity = "fatal" if signal > _HOPELESS_SIGNAL else "warning"
    evidence += ", so samples look washed out"
    return Finding("settings.terminal_snr", severity, evidence, remedy, facts)


def check_input_scale(diffusion: Diffusion, x0: Tensor) -> Finding:
    """Check the root mean square of the network's input over all noise levels, for images x0 [B, C, H, W]."""
    u = torch.linspace(1e-3, 1 - 1e-3, 33)
    noise = torch.randn(x0[:1].shape, generator=torch.Generator().manual_seed(0))
    loudness = []
    for logsnr in diffusion.schedule(u):
        level = logsnr.expand(len(x0))
        shown, _ = diffusion.network_input(diffusion.add_noise(x0, noise, level), level)
        loudness.append(float(shown.square().mean().sqrt()))
    quietest, loudest = min(loudness), max(loudness)
    facts = {"quietest": quietest, "loudest": loudest, "path": diffusion.path.kind}
    evidence = f"the network's input has a root mean square from {quietest:.2g} to {loudest:.2g} over the noise levels"
    if loudest <= _LOUDEST:
        return Finding("settings.input_scale", "fine", evidence, facts=facts)
    return Finding(
        "settings.input_scale", "warning", f"{evidence}, which slows training", "--diffusion.scale-input", facts
    )


def check_sampler(config: Config) -> Finding:
    """Check that the sampler takes enough steps."""
    sampler = config.sampler
    evidence = f"samples are generated by {sampler.kind} in {sampler.steps} steps"
    facts = {"kind": sampler.kind, "steps": sampler.steps}
    if sampler.kind == "adaptive":
        evidence = f"samples are generated by adaptive, with a tolerance of {sampler.tolerance}"
        return Finding("settings.sampler", "fine", evidence, facts=facts)
    if sampler.steps <= _FEW_STEPS and sampler.grid != "tuned":
        return Finding(
            "settings.sampler", "hint", f"{evidence}, which leaves samples blurred", "--sampler.steps 20", facts
        )
    if sampler.kind == "ddpm" and sampler.steps < _FEW_DDPM_STEPS:
        remedy = "--sampler.kind dpmpp, or --sampler.steps 250"
        return Finding("settings.sampler", "hint", f"{evidence}, which leaves noise in samples", remedy, facts)
    return Finding("settings.sampler", "fine", evidence, facts=facts)
