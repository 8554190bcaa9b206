"""Pictures from a network: labels, noise by picture, sampler, uint8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

from unfog.config.schema import Config, check_guidance_interval
from unfog.diffusion.denoiser import Denoiser, Guided
from unfog.diffusion.editing import Edit
from unfog.diffusion.guidance import Autoguided, Labelled, Within
from unfog.diffusion.sampler import Denoise, NoiseSource, Observe, Sampler
from unfog.errors import RequestError
from unfog.pipeline.autoencoder_folder import encode_edit, latent_decoder
from unfog.pipeline.build import input_shape
from unfog.reporting.image_grids import Pixels, grid
from unfog.training.precision import DTYPES, default_memory_format
from unfog.training.settings import SamplingPrecision


@dataclass(frozen=True)
class GenerationSettings:
    """What to draw. Picture i depends on the seed, i and its label alone, whatever `count` and `batch` are."""

    count: int
    sampler: Sampler
    labels: tuple[int, ...] = ()
    """Pictures cycle through these; () without classes."""
    seed: int = 0
    guidance: float = 1.0
    batch: int = 64
    """Pictures at once, which memory limits."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Share of noise, sigma / (alpha + sigma), within which there is guidance."""
    first: int = 0
    """Number of the first picture."""
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
    """What the run draws unless told otherwise: its sampler, seed 0, all classes in turn, guided as it is set."""
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
    """Pictures, uint8 [N, H, W, C]; the network is in evaluation mode meanwhile.

    `progress` is told how many pictures are done; `observe` sees every step of the first batch, unless they are made
    of a picture that there is, by `edit`. `guide` is a weaker denoiser, which guidance leads away from, rather than
    from pictures of no class. `calls` is told how often each batch asked the network.
    """
    device = next(network.parameters()).device
    shape, decode = input_shape(config), latent_decoder(config, device)
    sampler, seen = _without_pixel_clipping(drawing.sampler, config), encode_edit(edit, config, device)
    was_training, pictures, memory_format = network.training, [], getattr(network, "channels_last", False)
    network.eval()
    # However it is trained, so that a preview is what `sample` draws.
    network.channels_last = default_memory_format(device, drawing.precision)[0] == "channels_last"  # type: ignore[assignment]
    try:
        end = drawing.first + drawing.count
        for first in range(drawing.first, end, drawing.batch):
            indices = range(first, min(first + drawing.batch, end))
            # What is known of a picture is known of the image's half of an answer only.
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
    """The sampler, which clips guesses to the range of pixels only where it is pixels that are drawn."""
    return replace(sampler, clip=False) if config.uses_latents else sampler


class _CallCounter:
    """A denoiser that counts how often it is asked."""

    def __init__(self, denoise: Denoise) -> None:
        self.denoise, self.calls = denoise, 0

    def __call__(self, x_t: Tensor, logsnr: Tensor) -> Tensor:
        """As the denoiser."""
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
    """The denoiser with the labels of these pictures, and with guidance where it is asked for.

    Guidance leads away from what the weaker `guide` says, told the same label; without one, from what the network
    itself says when it is told no class.

    Raises:
        RequestError: guidance without classes, or of a network that never saw an image without its class.
    """
    label = None
    if drawing.labels:
        label = torch.tensor([drawing.labels[i % len(drawing.labels)] for i in indices], device=device)
    asked = guided_denoiser(denoiser, config, drawing, guide)
    return lambda x, logsnr: asked(x, logsnr, label)


def guided_denoiser(
    denoiser: Denoiser, config: Config, drawing: GenerationSettings, guide: Labelled | None
) -> Labelled:
    """The denoiser, with the guidance that a drawing asks for. RequestError as `conditional`."""
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
    """Float [-1, 1] to uint8 [0, 255], clamped: the way back of what the training loop does to pixels."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def sample_grid(pictures: Pixels, classes: Sequence[str]) -> Pixels:
    """One image of them all; whole cycles through the classes make a column for each."""
    columns = len(classes) if 1 < len(classes) <= 20 and len(pictures) % len(classes) == 0 else None
    return grid(pictures, columns)


def parse_labels(words: Sequence[object], classes: Sequence[str]) -> tuple[int, ...]:
    """Labels by class name or number; all classes if there are no words. RequestError for one that is none.

    An integer is the number of a class, and a text its name; where no name is a number, a text may be one, too.
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
