"""Checks of settings before training: all of them in order; network, input, noise levels, labels and held-out images.

To add a check, write a function that returns a Finding here or in a module beside this one, and call it in
`check_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unfog.checks.settings.learning_rate_checks import check_optimization
from unfog.checks.settings.length_checks import check_length
from unfog.checks.settings.machine_checks import check_machine, check_run_costs
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset, ImageSet
from unfog.diffusion.diffusion import Diffusion
from unfog.errors import RequestError
from unfog.models.network_settings import build_model
from unfog.reporting.findings import Finding
from unfog.text import plural

_IMAGES = 64  # images
# Signal at the noisiest level that goes unseen: Stable Diffusion's schedule ends at 0.068, DDPM's at 0.006.
_MOST_SIGNAL = 0.07
_HOPELESS_SIGNAL = 0.5
# Root mean square of what a network is shown; VP and flow stay below 1, EDM on the VE path reaches 80 unscaled.
_LOUDEST = 3.0
# Difference of opposite edges over that of neighbours: 1 of seamless images, 3 to 10 of photographs.
_SEAM = 2.0
_FEW_STEPS, _FEW_DDPM_STEPS = 5, 50
_FEW_HELD_OUT = 16
# Images, of fewer of which none is held out.
_ENOUGH_TO_HOLD_OUT = 100


def check_settings(
    config: Config,
    prepared: Dataset,
    device: torch.device,
    seconds_per_step: float | None = None,
    folder: Path = Path(),
) -> list[Finding]:
    """Run all checks, without a training step.

    Only settings.network is returned where the network does not fit the images. Network, learning rate, precision,
    length and intervals are chosen already. `folder` is that of the checkpoints, or one above it.
    """
    network = _check_network(config, prepared)
    if network.severity == "fatal":
        return [network]
    parameters, images = network.facts["parameters"], prepared.train
    return [
        network,
        _check_range(_evenly_spread_pixels(images), Augment.from_settings(config.data)),
        *([check_edges(_network_input(config, prepared), config.data.wrapped)] if config.data.wrapped else []),
        _check_timesteps(config.diffusion),
        _check_terminal_signal(config),
        _check_input_scale(config.diffusion, _network_input(config, prepared)),
        _check_labels(config, prepared),
        _check_guidance(config),
        *check_optimization(config, len(images), parameters),
        check_length(config, prepared),
        check_run_costs(config, len(prepared.held_out), seconds_per_step),
        _check_held_out(config, prepared),
        _check_sampler(config),
        *check_machine(config, parameters, device, seconds_per_step, folder),
    ]


def check_sampling(config: Config, command: Callable[[str, str], str]) -> list[Finding]:
    """Return hints of settings that spoil the samples of a trained run, with the command that samples with others.

    `command` takes a verb and flags, such as "sample" and "--steps 20".
    """
    findings = []
    for found in (_check_guidance(config), _check_sampler(config)):
        # `unfog sample` has flags of its own for what trains as sampler.steps, sampler.grid and sampler.kind.
        remedy = found.remedy.replace("sampler.kind", "sampler").replace("sampler.", "")
        if found.severity == "hint" and "dropout" not in remedy:  # which is a setting of training
            findings.append(replace(found, remedy=command("sample", remedy)))
    return findings


def _check_network(config: Config, prepared: Dataset) -> Finding:
    """Build the network, to check that it takes images of this size and these channels."""
    channels, height, width = prepared.as_network_input.train.pixels.shape[-3:]
    if config.network is None:
        raise RequestError("network = auto must be resolved before settings can be checked")
    try:
        config.network.check((height, width))
    except RequestError as error:
        return Finding("settings.network", "fatal", str(error), "--network small, or another --size")
    # Initial weights are drawn from torch's global generator, which a check must leave as it is.
    with torch.random.fork_rng(devices=[]):
        network = build_model(config.network, channels, config.conditions, wrap=config.data.wrapped)
    parameters = sum(p.numel() for p in network.parameters())
    facts = {"parameters": parameters, "height": height, "width": width, "channels": channels}
    seamless = f", seamless along {' and '.join(config.data.wrapped)}" if config.data.wrapped else ""
    said = f"{parameters / 1e6:.2f}M parameters {config.network.layout(height, width)}{seamless}"
    return Finding("settings.network", "fine", said, facts=facts)


def _evenly_spread_pixels(images: ImageSet) -> Tensor:
    """Return evenly spread images of the set, uint8 [B, C, H, W]."""
    index = np.unique(np.linspace(0, len(images) - 1, min(_IMAGES, len(images))).astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(images.pixels.take(index, axis=0)))


def _network_input(config: Config, prepared: Dataset) -> Tensor:
    """Return some images as the network sees them, [B, C, H, W]."""
    return config.representation.to_model(_evenly_spread_pixels(prepared.as_network_input.train)[:8])


def _check_range(pixels: Tensor, augment: Augment) -> Finding:
    """Check that the training loop sees these pixels in [-1, 1], and on both sides of 0 if they should be."""
    with torch.random.fork_rng(devices=[]):
        x0, _ = augment(pixels)
    x0 = x0 if augment.values.filler is None else x0[~x0.isnan()]
    low, high, mean, std = (float(v) for v in (x0.min(), x0.max(), x0.mean(), x0.std()))
    if not augment.values.bounded:
        said = f"values of {plural(len(pixels))} become {low:.3f} to {high:.3f}"
        if not torch.isfinite(x0).all():
            remedy = "choose another --data.map, such as percentile or arcsinh"
            return Finding("settings.range", "fatal", f"{said}, and are not all finite", remedy)
        return Finding("settings.range", "fine", said, facts={"images": len(pixels)})
    seen = augment.values.to_bytes(pixels.numpy())
    darkest, brightest = int(seen.min()), int(seen.max())
    facts = {"images": len(pixels), "low": low, "high": high, "mean": mean, "std": std}
    evidence = f"pixels from {darkest} to {brightest} of {plural(len(pixels))} become {low:.3f} to {high:.3f}"
    # Jitter and the padding of rotated images stay inside the range without reaching its ends.
    wrong_side = (darkest < 100 and low >= 0) or (brightest > 155 and high <= 0)
    if x0.dtype != torch.float32 or not -1.001 <= low <= high <= 1.001 or wrong_side:
        remedy = "the network expects float32 from -1 to 1; this is a bug: please report it"
        return Finding("settings.range", "fatal", f"{evidence} ({x0.dtype})", remedy, facts)
    return Finding("settings.range", "fine", f"{evidence}, mean {mean:.2f}, deviation {std:.2f}", facts=facts)


def check_edges(x0: Tensor, wrap: str) -> Finding:
    """Check that images [B, C, H, W] are seamless along the axes `wrap`: that their opposite edges meet."""
    jumps = {axis: _jump_at_edge(x0, 3 if axis == "x" else 2) for axis in wrap}
    worst = max(jumps, key=lambda axis: jumps[axis])
    said = " and ".join(f"{jump:.2g} times along {axis}" for axis, jump in jumps.items())
    seam = ", so the images have a seam, and samples will have one anywhere"
    remedy = f"omit {worst} from wrap; if the files are seamless, choose a size of their shape, which crops nothing"
    return Finding.graded(
        "settings.wrap",
        f"opposite edges differ {said} as much as neighbouring pixels",
        (jumps[worst] > _SEAM, "warning", seam, remedy),
        facts=jumps,
    )


def _jump_at_edge(x0: Tensor, dim: int) -> float:
    """Return the mean difference of the first and last pixels along `dim`, over that of neighbours."""
    side = x0.shape[dim]
    edge = (x0.select(dim, 0) - x0.select(dim, side - 1)).abs().nanmean()  # NaN is unknown
    return float(edge / x0.diff(dim=dim).abs().nanmean().clamp_min(1e-6))


def _check_timesteps(diffusion: Diffusion) -> Finding:
    """Check that training meets every timestep of a discrete schedule as a whole number, from 0 to T - 1."""
    kind, count = diffusion.schedule.kind, diffusion.schedule.steps
    if not count or diffusion.conditioning != "timestep":
        values = _conditioning_values(diffusion, torch.linspace(1e-3, 1 - 1e-3, 999))
        low, high = float(values.min()), float(values.max())
        wrong = not (count or bool(torch.isfinite(values).all() and (values.diff() > 0).all()))
        return Finding.graded(
            "settings.timesteps",
            f"the network gets noise levels as numbers from {low:.3g} to {high:.3g}",
            (wrong, "fatal", ", which do not rise with the noise", "report it"),
            facts={"from": low, "to": high},
        )
    # Four to a timestep, off its borders: an error by one then shows as a timestep that is missed or met twice.
    values = _conditioning_values(diffusion, (torch.arange(4 * count) + 0.5) / (4 * count))
    whole = values.round()
    met = torch.unique(whole)
    first, last = int(whole.min()), int(whole.max())
    facts = {"steps": count, "met": len(met), "from": first, "to": last}
    evidence = f"{len(met):,} of the {count:,} timesteps of the {kind} schedule are trained, {first} to {last}"
    remedy = f"--schedule {kind}:steps=1000"
    # float32 divides and multiplies by T again, which is off by a thousandth at most.
    if not torch.allclose(values, whole, rtol=0, atol=0.01):
        evidence = f"timesteps of the {kind} schedule are fractions, off by {(values - whole).abs().max():.2g}"
        return Finding("settings.timesteps", "fatal", evidence, remedy, facts)
    if torch.equal(met, torch.arange(count, dtype=met.dtype)):
        return Finding("settings.timesteps", "fine", f"{evidence}, whole numbers", facts=facts)
    return Finding("settings.timesteps", "fatal", evidence, remedy, facts)


def _conditioning_values(diffusion: Diffusion, u: Tensor) -> Tensor:
    return diffusion.network_input(torch.zeros(len(u), 1, 1, 1), diffusion.schedule(u))[1]


def _check_terminal_signal(config: Config) -> Finding:
    """Check how much of the image is left at the noise level where sampling starts from pure noise.

    The network learns to read the brightness from that signal. In sampling it reads noise instead, so that all samples
    have medium brightness (Lin et al. 2023, section 3.1).
    """
    noisiest = config.sampler.visits(config.diffusion.schedule)[:1]
    alpha, sigma = (float(part) for part in config.diffusion.path(noisiest))
    signal = alpha / (alpha**2 + sigma**2) ** 0.5
    washed = ", so samples look washed out"
    remedy = "use a schedule that ends in noise: --schedule cosine, or linear with its default beta_start and beta_end"
    return Finding.graded(
        "settings.terminal_snr",
        f"{100 * signal:.2g}% of the image's amplitude is left at the level where sampling starts from pure noise",
        (signal > _HOPELESS_SIGNAL, "fatal", washed, remedy),
        (signal > _MOST_SIGNAL, "warning", washed, remedy),
        facts={"logsnr": float(noisiest), "alpha": alpha, "sigma": sigma, "signal": signal},
    )


def _check_input_scale(diffusion: Diffusion, x0: Tensor) -> Finding:
    """Check the root mean square of the network's input over all noise levels, for images x0 [B, C, H, W]."""
    # A generator of its own, as a check must not move the numbers that the run begins with.
    noise = torch.randn(x0[:1].shape, generator=torch.Generator().manual_seed(0))
    loudness = []
    for logsnr in diffusion.schedule(torch.linspace(1e-3, 1 - 1e-3, 33)):
        level = logsnr.expand(len(x0))
        shown, _ = diffusion.network_input(diffusion.add_noise(x0, noise, level), level)
        loudness.append(float(shown.square().nanmean().sqrt()))
    low, high = min(loudness), max(loudness)
    return Finding.graded(
        "settings.input_scale",
        f"the network's input has a root mean square from {low:.2g} to {high:.2g} over the noise levels",
        (high > _LOUDEST, "warning", ", which slows training", "--diffusion.scale-input"),
        facts={"quietest": low, "loudest": high, "path": diffusion.path.kind},
    )


def _check_sampler(config: Config) -> Finding:
    """Check that the sampler takes enough steps."""
    kind, steps, fixed = config.sampler.kind, config.sampler.steps, config.sampler.kind != "adaptive"
    how = f"{kind} in {plural(steps, 'step')}" if fixed else f"adaptive, with a tolerance of {config.sampler.tolerance}"
    # Tuned noise levels were chosen for so few steps.
    blurred = fixed and steps <= _FEW_STEPS and config.sampler.grid != "tuned"
    noisy = kind == "ddpm" and steps < _FEW_DDPM_STEPS

    def more(count: int) -> str:
        # The schedule's own grid has no more levels than timesteps.
        other = config.sampler.grid == "schedule" and 0 < config.diffusion.schedule.steps < count
        return f"--sampler.steps {count}" + " --sampler.grid karras" * other

    return Finding.graded(
        "settings.sampler",
        f"samples are generated by {how}",
        (blurred, "hint", ", which leaves samples blurred", more(20)),
        (noisy, "hint", ", which leaves noise in samples", f"--sampler.kind dpmpp, or {more(250)}"),
        facts={"kind": kind, "steps": steps},
    )


def _check_held_out(config: Config, prepared: Dataset) -> Finding:
    """Check that enough images are held out for a meaningful held-out loss."""
    held, trained = len(prepared.held_out), len(prepared.train)
    used, levels = min(held, config.evaluate.images), config.evaluate.levels
    facts = {"held_out": held, "used": used, "levels": levels}
    if config.evaluate.every < 0:
        return Finding("settings.held_out", "fine", "evaluation is turned off", facts=facts)
    if not held and trained < _ENOUGH_TO_HOLD_OUT:
        said = f"none of {plural(trained)} is held out, as a small set needs all for training; judge by the samples"
        return Finding("settings.held_out", "fine", said, facts=facts)
    if not held:
        said = "nothing is held out, so memorization would go unnoticed"
        return Finding("settings.held_out", "hint", said, "--data.held-out 0.05", facts)
    share = min(0.5, math.ceil(100 * _FEW_HELD_OUT / (held + trained)) / 100)
    remedy = f"--evaluate.images {min(64, held)}" if held >= _FEW_HELD_OUT else f"--data.held-out {share:g}"
    return Finding.graded(
        "settings.held_out",
        f"the held-out loss is over {plural(used)} at {plural(levels, 'noise level')} each",
        (used < _FEW_HELD_OUT, "hint", ", too few for a reliable loss", remedy),
        facts=facts,
    )


def _check_guidance(config: Config) -> Finding:
    """Check that guidance has an effect and that labels are learned."""
    guidance, dropout = config.guidance, config.label_dropout
    facts = {"guidance": guidance, "label_dropout": dropout, "classes": len(config.classes)}
    if not config.classes:
        return Finding("settings.guidance", "fine", "no classes", facts=facts)
    if dropout == 1:
        said = "label_dropout = 1 hides every label, so classes are not learned"
        return Finding("settings.guidance", "warning", said, "--label-dropout 0.1", facts)
    if guidance != 1 and dropout == 0:
        said = f"guidance = {guidance:g} has no effect, because the network never sees an image without its class"
        return Finding("settings.guidance", "warning", said, "--label-dropout 0.1", facts)
    if guidance > 10:
        said = f"guidance = {guidance:g} oversaturates colours and leaves little variety"
        return Finding("settings.guidance", "hint", said, "--guidance 1.5", facts)
    if dropout > 0.5:
        said = f"{100 * dropout:.0f}% of the images lose their class, so classes are learned slowly"
        return Finding("settings.guidance", "hint", said, "--label-dropout 0.1", facts)
    used = f"guidance {guidance:g}, {100 * dropout:.0f}% of labels hidden in training"
    return Finding("settings.guidance", "fine", used, facts=facts)


def _check_labels(config: Config, prepared: Dataset) -> Finding:
    """Check that every label is a class of the network."""
    rows, sets = len(config.classes), [images for images in (prepared.train, prepared.held_out) if len(images)]
    found = [images.labels for images in sets if images.labels is not None]
    if not rows and found:
        said = "the images have labels, and the network has no classes"
        return Finding("settings.labels", "fatal", said, "--data.labels none")
    if not rows:
        return Finding("settings.labels", "fine", "no classes")
    labels = np.concatenate(found) if found else np.array([-1])
    low, high = int(labels.min()), int(labels.max())
    wrong = len(found) != len(sets) or low < 0 or high >= rows
    return Finding.graded(
        "settings.labels",
        f"labels {low} to {high} for {rows} classes and the null class",
        (wrong, "fatal", "", "--data.labels folders reads them again"),
        facts={"classes": rows, "lowest": low, "highest": high},
    )
