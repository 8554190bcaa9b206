"""Generate samples from a network: labels, noise by sample, guidance, sampler, uint8 images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unfog.config.schema import Config, check_guidance_interval
from unfog.diffusion.denoiser import Denoiser, Guided
from unfog.diffusion.editing import Edit
from unfog.diffusion.guidance import Autoguided, Labelled, Within
from unfog.diffusion.sampler import Denoise, NoiseSource, Observe, Sampler
from unfog.errors import RequestError
from unfog.pipeline.build import input_shape
from unfog.pipeline.latents import encode_edit, latent_decoder
from unfog.reporting.image_grids import Pixels, grid
from unfog.training.precision import DTYPES, default_memory_format
from unfog.training.settings import SamplingPrecision


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation. Sample i depends on the seed, i and its label alone, not on `count` or `batch`."""

    count: int
    sampler: Sampler
    labels: tuple[int, ...] = ()
    """Samples cycle through these; () without classes."""
    seed: int = 0
    guidance: float = 1.0
    batch: int = 64
    """Samples at once."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Share of noise, sigma / (alpha + sigma), within which there is guidance."""
    first: int = 0
    """Number of the first sample."""
    precision: SamplingPrecision = "fp32"
    """Of the network; the sampler itself always computes in fp32."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance):
            raise RequestError(f"guidance = {self.guidance} must be a finite number; 1 to 3 is usual")
        check_guidance_interval(self.interval)
        for name in ("count", "batch"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} of pictures = {getattr(self, name)} must be at least 1")


def default_generation(config: Config, count: int, batch: int) -> GenerationSettings:
    """Return the settings of a run's previews: its sampler and guidance, seed 0, all classes in turn."""
    labels = tuple(range(len(config.classes)))
    guidance, interval = config.usual_guidance, config.guidance_interval
    return GenerationSettings(count, config.sampler, labels, guidance=guidance, interval=interval, batch=batch)


@torch.inference_mode()
def generate_images(
    network: nn.Module,
    config: Config,
    drawing: GenerationSettings,
    progress: Callable[[int], None] = lambda done: None,
    observe: Observe | None = None,
    guide: Labelled | None = None,
    calls: Callable[[int], None] = lambda calls: None,
    edit: Edit | None = None,
) -> Pixels:
    """Return samples, uint8 [N, H, W, C]. The network is in evaluation mode meanwhile.

    Args:
        network: the denoising network.
        config: of its run.
        drawing: what to generate.
        progress: called with the number of finished samples.
        observe: called at every step of the first batch, unless `edit` is given.
        guide: a weaker denoiser for autoguidance; None guides away from the unconditional output.
        calls: called with the number of network evaluations of each batch.
        edit: an image to start from, or to paint into.
    """
    device = next(network.parameters()).device
    shape, decode = input_shape(config), latent_decoder(config, device)
    sampler, seen = _without_pixel_clipping(drawing.sampler, config), encode_edit(edit, config, device)
    was_training, pictures, memory_format = network.training, [], getattr(network, "channels_last", False)
    network.eval()
    # Independent of the format in training, so that a preview equals the output of `sample`.
    network.channels_last = default_memory_format(device, drawing.precision)[0] == "channels_last"  # type: ignore[assignment]
    try:
        end = drawing.first + drawing.count
        for first in range(drawing.first, end, drawing.batch):
            indices = range(first, min(first + drawing.batch, end))
            # Known pixels constrain the predicted image, not the learned variance.
            plain = edit is None or edit.unknown is None
            variance = config.diffusion.learned_variance and drawing.sampler.kind == "ddpm" and plain
            denoiser = Denoiser(network, config.diffusion, variance, DTYPES.get(drawing.precision))
            denoise = _CallCounter(conditional_denoiser(denoiser, config, drawing, indices, device, guide))
            parts = (
                denoise,
                config.diffusion.path,
                config.diffusion.schedule,
                NoiseSource(drawing.seed, indices, shape, device).draw,
            )
            if edit is None or seen is None:
                images = decode(sampler(*parts, observe if first == drawing.first else None))
            else:
                images = edit.keep(decode(seen(sampler, *parts)))
            pictures.append(to_pixels(images).permute(0, 2, 3, 1).cpu().numpy())
            progress(indices.stop - drawing.first)
            calls(denoise.calls)
    finally:
        network.train(was_training)
        network.channels_last = memory_format  # type: ignore[assignment]
    return np.concatenate(pictures)


def _without_pixel_clipping(sampler: Sampler, config: Config) -> Sampler:
    """Return the sampler without clipping to the pixel range if the network generates latents."""
    return replace(sampler, clip=False) if config.uses_latents else sampler


class _CallCounter:
    """A denoiser that counts its evaluations."""

    def __init__(self, denoise: Denoise) -> None:
        self.denoise, self.calls = denoise, 0

    def __call__(self, x_t: Tensor, logsnr: Tensor) -> Tensor:
        self.calls += 1
        return self.denoise(x_t, logsnr)


def conditional_denoiser(
    denoiser: Denoiser,
    config: Config,
    drawing: GenerationSettings,
    indices: Sequence[int],
    device: torch.device,
    guide: Labelled | None = None,
) -> Denoise:
    """Return the denoiser with the labels of these samples, and with the guidance of `drawing`.

    Guidance extrapolates away from the weaker `guide` with the same label; without one, from the unconditional output.

    Raises:
        RequestError: guidance without classes, or of a network trained without label dropout.
    """
    label = None
    if drawing.labels:
        label = torch.tensor([drawing.labels[i % len(drawing.labels)] for i in indices], device=device)
    asked = guided_denoiser(denoiser, config, drawing, guide)
    return lambda x, logsnr: asked(x, logsnr, label)


def guided_denoiser(
    denoiser: Denoiser, config: Config, drawing: GenerationSettings, guide: Labelled | None
) -> Labelled:
    """Return the denoiser with the guidance of `drawing`. RequestError as `conditional_denoiser`."""
    if drawing.guidance == 1:
        return denoiser
    led: Labelled
    if guide is not None:
        led = Autoguided(denoiser, guide, drawing.guidance)
    elif not drawing.labels:
        raise RequestError(f"guidance = {drawing.guidance} needs classes, and this run has none; or a weaker --guide")
    elif config.label_dropout == 0:
        raise RequestError(f"guidance = {drawing.guidance} needs a network trained with --label-dropout, such as 0.1")
    else:
        led = Guided(denoiser, drawing.guidance, len(config.classes))
    return led if drawing.interval == (0.0, 1.0) else Within(led, denoiser, drawing.interval)


def to_pixels(x: Tensor) -> Tensor:
    """Convert float [-1, 1] to uint8 [0, 255], clamped: the inverse of `to_model_range`."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def sample_grid(pictures: Pixels, classes: Sequence[str]) -> Pixels:
    """Return one image of all samples; whole cycles through up to 20 classes get a column for each class."""
    columns = len(classes) if 1 < len(classes) <= 20 and len(pictures) % len(classes) == 0 else None
    return grid(pictures, columns)


def parse_labels(words: Sequence[object], classes: Sequence[str]) -> tuple[int, ...]:
    """Return labels by class name or number; all classes if `words` is empty. RequestError for an unknown one.

    An integer is the number of a class, a text its name; where no name is a number, a text may be a number.
    """
    if words and not classes:
        raise RequestError(f"label = {words[0]!r}, but this run has no classes; leave --label away")
    labels, names_are_numbers = [], any(name.isdecimal() for name in classes)
    for word in words:
        text, label = str(word), -1
        if not isinstance(word, bool) and isinstance(word, Integral):
            label = int(word)
        elif text in classes:
            label = list(classes).index(text)
        elif text.isdecimal() and not names_are_numbers:
            label = int(text)
        if not 0 <= label < len(classes):
            raise RequestError(f"label = {text!r} is no class of this run; there is {', '.join(classes)}")
        labels.append(label)
    return tuple(labels) or tuple(range(len(classes)))


_GOLDEN = (5**0.5 - 1) / 2


def proportional_labels(labels: NDArray[np.integer] | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return labels for `count` samples, in the class proportions of a data set.

    Sample i gets the class at the fraction (i + 1/2) / golden ratio (mod 1) of the data set sorted by class, so its
    label depends on i alone. After n samples the share of a class is off by about log(n) / n, against 1 / sqrt(n) for
    random labels, whose scatter would add to a Frechet distance.

    Args:
        labels: of the data set, integers from 0; None without classes, which returns ().
        count: number of samples.

    Raises:
        RequestError: `labels` is empty.
    """
    if labels is None:
        return ()
    present = np.asarray(labels, dtype=np.int64)
    if present.ndim != 1 or not len(present):
        raise RequestError("labels like those of a data set need one that has labels; without classes, give none")
    cumulative = np.bincount(present).cumsum() / len(present)
    fractions = (np.arange(count) + 0.5) * _GOLDEN % 1
    return tuple(np.searchsorted(cumulative, fractions, side="right").tolist())
