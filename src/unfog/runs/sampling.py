"""Pictures from a network: labels, noise by picture, sampler, uint8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unfog.config.tree import Config
from unfog.diffusion.denoiser import Denoiser, Guided
from unfog.diffusion.sampler import Denoise, NoiseSource, Observe, Sampler
from unfog.errors import RequestError
from unfog.reporting.figures import Pixels, grid


@dataclass(frozen=True)
class Drawing:
    """What to draw. Picture i depends on the seed, i and its label alone, whatever `count` and `batch` are."""

    count: int
    sampler: Sampler
    labels: tuple[int, ...] = ()
    """Pictures cycle through these; () without classes."""
    seed: int = 0
    guidance: float = 1.0
    batch: int = 64
    """Pictures at once, which memory limits."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance):
            raise RequestError(f"guidance = {self.guidance} must be a finite number; 1 to 3 is usual")
        for name in ("count", "batch"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} of pictures = {getattr(self, name)} must be at least 1")


def usual(config: Config, count: int, batch: int) -> Drawing:
    """What the run draws unless told otherwise: its sampler, seed 0, all classes in turn, guided as it is set."""
    labels = tuple(range(len(config.classes)))
    return Drawing(count, config.sampler, labels, guidance=config.usual_guidance, batch=batch)


@torch.inference_mode()
def draw(
    network: nn.Module,
    config: Config,
    drawing: Drawing,
    progress: Callable[[int], None] = lambda done: None,
    observe: Observe | None = None,
) -> Pixels:
    """Pictures, uint8 [N, H, W, C]; the network is in evaluation mode meanwhile, and computes in fp32.

    `progress` is told how many pictures are done; `observe` sees every step of the first batch.
    """
    device = next(network.parameters()).device
    shape = (config.data.channels, config.data.size, config.data.size)
    was_training, pictures = network.training, []
    network.eval()
    try:
        for first in range(0, drawing.count, drawing.batch):
            indices = range(first, min(first + drawing.batch, drawing.count))
            x0 = drawing.sampler(
                conditional(Denoiser(network, config.diffusion), config, drawing, indices, device),
                config.diffusion.path,
                config.diffusion.schedule,
                NoiseSource(drawing.seed, indices, shape, device).draw,
                observe if first == 0 else None,
            )
            pictures.append(to_pixels(x0).permute(0, 2, 3, 1).cpu().numpy())
            progress(indices.stop)
    finally:
        network.train(was_training)
    return np.concatenate(pictures)


def conditional(
    denoiser: Denoiser, config: Config, drawing: Drawing, indices: Sequence[int], device: torch.device
) -> Denoise:
    """The denoiser with the labels of these pictures, and with guidance where it is asked for.

    Raises:
        RequestError: guidance without classes, or of a network that never saw an image without its class.
    """
    if not drawing.labels:
        if drawing.guidance != 1:
            raise RequestError(f"guidance = {drawing.guidance} needs classes, and this run has none")
        return denoiser
    label = torch.tensor([drawing.labels[i % len(drawing.labels)] for i in indices], device=device)
    if drawing.guidance == 1:
        return lambda x, logsnr: denoiser(x, logsnr, label)
    if config.label_dropout == 0:
        raise RequestError(f"guidance = {drawing.guidance} needs a network trained with --label-dropout, such as 0.1")
    guided = Guided(denoiser, drawing.guidance, len(config.classes))
    return lambda x, logsnr: guided(x, logsnr, label)


def to_pixels(x: Tensor) -> Tensor:
    """Float [-1, 1] to uint8 [0, 255], clamped: the way back of what the training loop does to pixels."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def picture_grid(pictures: Pixels, classes: Sequence[str]) -> Pixels:
    """One image of them all; whole cycles through the classes make a column for each."""
    columns = len(classes) if 1 < len(classes) <= 20 and len(pictures) % len(classes) == 0 else None
    return grid(pictures, columns)


def find_labels(words: Sequence[str], classes: Sequence[str]) -> tuple[int, ...]:
    """Labels by class name or number; all classes if there are no words. RequestError for one that is none."""
    if words and not classes:
        raise RequestError(f"label = {words[0]!r}, but this run has no classes; leave --label away")
    labels = []
    for word in words:
        if word in classes:
            labels.append(list(classes).index(word))
        elif word.isdecimal() and int(word) < len(classes):
            labels.append(int(word))
        else:
            raise RequestError(f"label = {word!r} is no class of this run; there is {', '.join(classes)}")
    return tuple(labels) or tuple(range(len(classes)))
