"""How likely images are under a model: the evidence lower bound, in bits per number of the image.

-log p(x0) <= prior + diffusion + decoder. The prior term is what is left of the image at the noisiest level, the
diffusion term sums what each step of denoising gets wrong, the decoder turns the guess at the cleanest level into one
of 256 shades. In logsnr none of it depends on the path (Kingma et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import Cosine, Linear, Path
from unfog.diffusion.variance import decoder_nll, step_kl
from unfog.errors import RequestError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], logsnr [B]) -> E[x0 | x_t], with a learned variance behind it [B, 2 C, H, W]."""

Look = Callable[[float], tuple[Tensor, Tensor | None]]
"""logsnr -> (guess of the image, how far up its variance is), of fresh noise at that level."""


@torch.no_grad()
def bits_per_dim(
    denoise: Denoise, diffusion: Diffusion, x0: Tensor, levels: int, noise: Callable[[], Tensor]
) -> Tensor:
    """Bound on -log2 of the probability of each image, divided by the count of its numbers; float32 [B].

    With a schedule of T timesteps it is the variational bound of DDPM (Ho et al. 2020, eq. 5) for a chain of `levels`
    of them, evenly spaced in logsnr: all T, if `levels` is as large, is the usual figure; fewer give a looser bound,
    never a tighter one. Otherwise it is the bound of infinitely many steps, an integral over logsnr by the midpoint
    rule with `levels` points (Kingma et al. 2021, section 4). Images of fewer shades than 256 have fewer bits than
    this says.

    Args:
        denoise: such as a `Denoiser`, with labels bound.
        diffusion: what it was trained with.
        x0: float32 [B, C, H, W] in [-1, 1], of 256 shades.
        levels: network calls, besides one for the decoder where the schedule is continuous; 64 are good for a percent.
        noise: fresh standard normal noise like x0, for example `NoiseSource(...).draw`; called once per network call.

    Raises:
        RequestError: `levels` is below 2.
    """
    if levels < 2:
        raise RequestError(f"levels = {levels}: the bound needs at least 2 noise levels; 64 are good for a percent")

    def look(logsnr: float) -> tuple[Tensor, Tensor | None]:
        level = x0.new_full((len(x0),), logsnr)
        answer = denoise(diffusion.add_noise(x0, noise(), level), level)
        channels = x0.shape[1]
        return answer[:, :channels], answer[:, channels:] if answer.shape[1] > channels else None

    schedule, path = diffusion.schedule, diffusion.path
    noisiest, cleanest = schedule.limits()
    if isinstance(schedule, Linear | Cosine) and schedule.steps:
        nats = _chain(look, path, x0, _links(schedule.table(), levels))
    else:
        nats = _integral(look, path, x0, noisiest, cleanest, levels)
    # KL(N(alpha x0, sigma^2) | N(0, sigma^2)): samplers start from the latter.
    prior = math.exp(noisiest) / 2 * x0.square().mean((1, 2, 3))
    return (nats + prior) / math.log(2)


def _integral(look: Look, path: Path, x0: Tensor, noisiest: float, cleanest: float, levels: int) -> Tensor:
    """Diffusion and decoder terms, nats per number [B]: half the integral of SNR |x0 - D|^2 over logsnr."""
    width = (cleanest - noisiest) / levels
    nats = _decoder(look, path, x0, cleanest, cleanest)
    for i in range(levels):
        logsnr = cleanest - (i + 0.5) * width
        nats = nats + width / 2 * math.exp(logsnr) * (look(logsnr)[0] - x0).square().mean((1, 2, 3))
    return nats


def _chain(look: Look, path: Path, x0: Tensor, chain: list[float]) -> Tensor:
    """The same of a chain through these levels, cleanest first."""
    nats = _decoder(look, path, x0, chain[0], chain[1])
    for cleaner, logsnr in pairwise(chain):
        guess, fraction = look(logsnr)
        kl = step_kl(path, x0, guess, fraction, *torch.tensor([logsnr, cleaner], dtype=torch.float64))
        nats = nats + kl.mean((1, 2, 3))
    return nats


def _decoder(look: Look, path: Path, x0: Tensor, logsnr: float, second: float) -> Tensor:
    guess, fraction = look(logsnr)
    nll = decoder_nll(path, x0, guess, fraction, *torch.tensor([logsnr, second], dtype=torch.float64))
    return nll.mean((1, 2, 3))


def _links(table: Tensor, count: int) -> list[float]:
    """The timesteps of a chain, as logsnr, cleanest first: all, or `count` of them evenly spaced in logsnr."""
    finite = table[table.isfinite()]  # a last level of pure noise is infinitely far away, and always in the chain
    if count < len(table):
        wanted = torch.linspace(float(finite[0]), float(finite[-1]), count, dtype=table.dtype)
        finite = finite[sorted(set((finite[:, None] - wanted).abs().argmin(0).tolist()))]
    return [*finite.tolist(), *table[table.isinf()].tolist()]
