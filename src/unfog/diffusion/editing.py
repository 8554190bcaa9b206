"""Editing images with any denoiser and sampler: image-to-image, and inpainting.

Image-to-image noises an image up to some level of the sampler and samples on from there (SDEdit, Meng et al. 2022).

Inpainting is RePaint (Lugmayr et al. 2022), with the known pixels put into the denoiser rather than into the state: its
guess of the clean image contains them unchanged (as in DDNM, Wang et al. 2023, eq. 13). The unknown pixels are then
drawn from p(x_t) given the *noisy* known values, which hold less information than the clean ones. So each stretch of
levels is walked several times, with fresh noise added in between (RePaint, Algorithm 1): this is Gibbs sampling whose
bias vanishes with the noise. For a Gaussian it nears the exact conditional distribution as steps and repeats grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unfog.diffusion.steps import Observe, Watch
from unfog.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from unfog.diffusion.noise import Path, Schedule
    from unfog.diffusion.sampler import Denoise, Level, Sampler

_STRETCHES = 10  # that inpainting divides the levels into; RePaint has 25 of 10 levels each


@dataclass(frozen=True, eq=False)
class Edit:
    """An image to edit, and how; callable like a `Sampler`."""

    image: Tensor
    """float32 [C, H, W] in [-1, 1]."""
    unknown: Tensor | None = None
    """bool [1, H, W]: True for pixels to paint anew; None is everything."""
    strength: float = 1.0
    """Share of the sampler's levels that the image is noised by: 0 keeps the image, 1 is pure noise."""
    repeats: int = 10
    """Times that inpainting walks each stretch of levels; with 1 the new pixels fit the known ones least."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise RequestError(f"strength = {self.strength} must be from 0, the unchanged image, to 1; 0.6 is usual")
        if not 1 <= self.repeats <= 1000:
            raise RequestError(f"repeats = {self.repeats} must be from 1 to 1000; 10 is usual")

    def __call__(
        self,
        sampler: Sampler,
        denoise: Denoise,
        path: Path,
        schedule: Schedule,
        draw: Callable[[], Tensor],
        observe: Observe | None = None,
    ) -> Tensor:
        """Return edited images, float32 [N, C, H, W] in [-1, 1]; the arguments are those of `Sampler`.

        Known pixels are exactly those of the image, also where `observe` ends the sampling. Inpainting costs `repeats`
        times the network calls of sampling.
        """
        import torch

        levels = sampler.levels(path, schedule)
        last = len(levels) - 1
        first = last - round(self.strength * last)
        noise = draw()
        image = self.image.to(noise).expand_as(noise)
        if first == last:
            # A copy, as the samples of a batch share the memory of an expanded image.
            return image.clone()
        watch = observe and Watch(observe)  # which counts the steps of all walks
        kept = image * (first > 0)  # at full strength the new pixels start from pure noise
        if self.unknown is None:
            x = levels[first].alpha * kept + levels[first].sigma * noise
            return sampler(denoise, path, schedule, draw, watch, start=x, stretch=slice(first, None))
        unknown = self.unknown.to(noise.device)

        def denoise_unknown(x_t: Tensor, logsnr: Tensor) -> Tensor:
            return torch.where(unknown, denoise(x_t, logsnr), image)

        x = levels[first].alpha * torch.where(unknown, kept, image) + levels[first].sigma * noise
        # The last walk of a stretch adds no noise, as the next stretch begins where it ends.
        for here, there, again in self._walks(first, last):
            x = sampler(denoise_unknown, path, schedule, draw, watch, start=x, stretch=slice(here, there + 1))
            if watch and watch.stopped:
                break
            if again:
                x = renoise(x, levels[there], levels[here], draw)
        return torch.where(unknown, x, image)

    def steps(self, steps: int) -> int:
        """Return the number of steps that this edit makes with a sampler of so many."""
        return round(self.strength * steps) * (1 if self.unknown is None else self.repeats)

    def keep(self, images: Tensor) -> Tensor:
        """Put the known pixels back into edited images [N, C, H, W], as an autoencoder changes them."""
        import torch

        if self.unknown is None:
            return images
        return torch.where(self.unknown.to(images.device), images, self.image.to(images))

    def _walks(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (first level, last level, True to return to the first) of each walk."""
        length = math.ceil((last - first) / _STRETCHES)
        for here in range(first, last, length):
            for walk in range(self.repeats):
                yield here, min(here + length, last), walk < self.repeats - 1


def renoise(x: Tensor, now: Level, noisier: Level, draw: Callable[[], Tensor]) -> Tensor:
    """Draw from q(x at the noisier level | x now): the forward process between two levels (DDPM, eq. 2)."""
    kept = noisier.alpha / now.alpha
    return kept * x + math.sqrt(noisier.sigma**2 - (kept * now.sigma) ** 2) * draw()
