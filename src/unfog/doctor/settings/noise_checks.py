"""What the network will be shown: the range of the images, the noise levels, and where sampling starts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.augmentation.augment import Augment
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
    """Evenly spread images of the set, uint8 [B, C, H, W]."""
    index = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(images.pixels.take(index, axis=0)))


def check_range(pixels: Tensor, augment: Augment) -> Finding:
    """Whether these pixels, as the loop takes them, lie in [-1, 1] and on both sides of 0 where they should."""
    with torch.random.fork_rng(devices=[]):
        x0, _ = augment(pixels)
    low, high, mean, std = (float(v) for v in (x0.min(), x0.max(), x0.mean(), x0.std()))
    darkest, brightest = int(pixels.min()), int(pixels.max())
    facts = {"images": len(pixels), "low": low, "high": high, "mean": mean, "std": std}
    said = f"pixels from {darkest} to {brightest} of {len(pixels)} images become {low:.3f} to {high:.3f}"
    # Jitter, and what flows in from the sides when a picture is turned, keep within the range, not to its ends.
    wrong_side = (darkest < 100 and low >= 0) or (brightest > 155 and high <= 0)
    if x0.dtype != torch.float32 or not -1.001 <= low <= high <= 1.001 or wrong_side:
        remedy = "the network expects float32 from -1 to 1; this is a fault of the program, so please report it"
        return Finding("settings.range", "fatal", f"{said} ({x0.dtype})", remedy, facts)
    return Finding("settings.range", "fine", f"{said}, mean {mean:.2f}, deviation {std:.2f}", facts=facts)


def check_timesteps(diffusion: Diffusion) -> Finding:
    """Whether training meets every timestep of a schedule of T, as whole numbers, 0 and T - 1 among them."""
    schedule, count = diffusion.schedule, diffusion.schedule.steps
    if not count or diffusion.conditioning != "timestep":
        u = torch.linspace(1e-3, 1 - 1e-3, 999)
        told = _told(diffusion, u)
        facts = {"from": float(told.min()), "to": float(told.max())}
        rising = bool(torch.isfinite(told).all() and (told.diff() > 0).all())
        said = f"noise levels are told as numbers from {facts['from']:.3g} to {facts['to']:.3g}"
        if rising or count:
            return Finding("settings.timesteps", "fine", said, facts=facts)
        return Finding("settings.timesteps", "fatal", f"{said}, and do not rise with the noise", "report it", facts)
    told = _told(diffusion, (torch.arange(4 * count) + 0.5) / (4 * count))
    whole = told.round()
    met = torch.unique(whole)
    facts = {"steps": count, "met": len(met), "from": int(whole.min()), "to": int(whole.max())}
    said = f"{len(met):,} of the {count:,} timesteps of the {schedule.kind} schedule are trained, {facts['from']} to "
    said += f"{facts['to']}"
    if not torch.allclose(told, whole, rtol=0, atol=0.01):
        said = (
            f"timesteps of the {schedule.kind} schedule are told as fractions, off by {(told - whole).abs().max():.2g}"
        )
        return Finding("settings.timesteps", "fatal", said, f"--schedule {schedule.kind}:steps=1000", facts)
    if torch.equal(met, torch.arange(count, dtype=met.dtype)):
        return Finding("settings.timesteps", "fine", f"{said}, whole numbers", facts=facts)
    return Finding("settings.timesteps", "fatal", said, f"--schedule {schedule.kind}:steps=1000", facts)


def _told(diffusion: Diffusion, u: Tensor) -> Tensor:
    """What the network is told of these noise quantiles."""
    return diffusion.network_input(torch.zeros(len(u), 1, 1, 1), diffusion.schedule(u))[1]


def check_terminal_signal(config: Config) -> Finding:
    """How much of the image is left in what training shows at the level where sampling starts from nothing but noise.

    Lin et al. 2023, section 3.1: the network learns to read brightness from what is left, and in sampling reads it from
    noise, so that all pictures come out in medium brightness.
    """
    diffusion, sampler = config.diffusion, config.sampler
    noisiest = sampler.visits(diffusion.schedule)[:1]
    alpha, sigma = (float(part) for part in diffusion.path(noisiest))
    signal = alpha / (alpha**2 + sigma**2) ** 0.5
    facts = {"logsnr": float(noisiest), "alpha": alpha, "sigma": sigma, "signal": signal}
    said = f"{100 * signal:.2g}% of the image's amplitude is left at the level where sampling starts from pure noise"
    if signal <= _MOST_SIGNAL:
        return Finding("settings.terminal_snr", "fine", said, facts=facts)
    remedy = "let the schedule end in noise: --schedule cosine, or linear with its own beta_start and beta_end"
    severity: Severity = "fatal" if signal > _HOPELESS_SIGNAL else "warning"
    said += ", so that pictures come out washed out"
    return Finding("settings.terminal_snr", severity, said, remedy, facts)


def check_input_scale(diffusion: Diffusion, x0: Tensor) -> Finding:
    """How loud the network's input is, over the noise levels of training, on images x0 [B, C, H, W] in [-1, 1]."""
    u = torch.linspace(1e-3, 1 - 1e-3, 33)
    noise = torch.randn(x0[:1].shape, generator=torch.Generator().manual_seed(0))
    loudness = []
    for logsnr in diffusion.schedule(u):
        level = logsnr.expand(len(x0))
        shown, _ = diffusion.network_input(diffusion.add_noise(x0, noise, level), level)
        loudness.append(float(shown.square().mean().sqrt()))
    quietest, loudest = min(loudness), max(loudness)
    facts = {"quietest": quietest, "loudest": loudest, "path": diffusion.path.kind}
    said = f"the network's input has a root mean square from {quietest:.2g} to {loudest:.2g} over the noise levels"
    if loudest <= _LOUDEST:
        return Finding("settings.input_scale", "fine", said, facts=facts)
    return Finding("settings.input_scale", "warning", f"{said}, which trains badly", "--diffusion.scale-input", facts)


def check_sampler(config: Config) -> Finding:
    """Whether the sampler takes enough steps for pictures to come out of it."""
    sampler = config.sampler
    said = f"pictures are drawn by {sampler.kind} in {sampler.steps} steps"
    facts = {"kind": sampler.kind, "steps": sampler.steps}
    if sampler.kind == "adaptive":
        said = f"pictures are drawn by adaptive, in as many steps as a tolerance of {sampler.tolerance} takes"
        return Finding("settings.sampler", "fine", said, facts=facts)
    if sampler.steps <= _FEW_STEPS and sampler.grid != "tuned":
        return Finding("settings.sampler", "hint", f"{said}, which leaves them blurred", "--sampler.steps 20", facts)
    if sampler.kind == "ddpm" and sampler.steps < _FEW_DDPM_STEPS:
        remedy = "--sampler.kind dpmpp, or --sampler.steps 250"
        return Finding("settings.sampler", "hint", f"{said}, which leaves noise in them", remedy, facts)
    return Finding("settings.sampler", "fine", said, facts=facts)
