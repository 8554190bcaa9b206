"""How likely images are under a model: the evidence lower bound, in bits per number of the image.

-log p(x0) <= prior + diffusion + decoder. The prior term is what is left of the image at the noisiest level, the
diffusion term sums what each step of denoising gets wrong, the decoder turns the guess at the cleanest level into one
of 256 shades. In logsnr none of it depends on the path (Kingma et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import Cosine, Linear, Path
from unfog.diffusion.variance import decoder_nll, step_kl
from unfog.errors import RequestError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], logsnr [B]) -> E[x0 | x_t], with a learned variance behind it [B, 2 C, H, W]."""

Look = Callable[[float | Tensor], tuple[Tensor, Tensor | None]]
"""logsnr, or one for each image -> (guess of the image, how far up its variance is), of fresh noise at that level."""


@torch.no_grad()
def bits_per_dim(
    denoise: Denoise, diffusion: Diffusion, x0: Tensor, levels: int, noise: Callable[[], Tensor]
) -> Tensor:
    """Bound on -log2 of the probability of each image, divided by the count of its numbers; float32 [B].

    With a schedule of T timesteps it is the variational bound of DDPM (Ho et al. 2020, eq. 5) for all T of them: each
    term if `levels` is at least T; else the terms, evenly divided by logsnr into `levels` groups, of each of which one
    stands for all, drawn for each image in proportion to the SNR that it gains. Its mean is that of all T (of each
    term, with the variance that is usual, half the gain times the squared error), so it may be below the bound by
    chance. Otherwise it is the bound of infinitely many steps, an integral over logsnr by the midpoint rule with
    `levels` points (Kingma et al. 2021, section 4). Images of fewer shades than 256 have fewer bits than this says.

    Args:
        denoise: such as a `Denoiser`, with labels bound.
        diffusion: what it was trained with.
        x0: float32 [B, C, H, W] in [-1, 1], of 256 shades.
        levels: network calls, besides one for the decoder; 64 are good for a percent.
        noise: fresh standard normal noise like x0, for example `NoiseSource(...).draw`; called up to twice per network
            call.

    Raises:
        RequestError: `levels` is below 2.
    """
    if levels < 2:
        raise RequestError(f"levels = {levels}: the bound needs at least 2 noise levels; 64 are good for a percent")

    def look(logsnr: float | Tensor) -> tuple[Tensor, Tensor | None]:
        level = torch.as_tensor(logsnr, dtype=x0.dtype, device=x0.device).expand(len(x0))
        answer = denoise(diffusion.add_noise(x0, noise(), level), level)
        channels = x0.shape[1]
        return answer[:, :channels], answer[:, channels:] if answer.shape[1] > channels else None

    schedule, path = diffusion.schedule, diffusion.path
    noisiest, cleanest = schedule.limits()
    if isinstance(schedule, Linear | Cosine) and schedule.steps:
        nats = _chain(look, path, x0, schedule.table(), levels, noise)
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


def _chain(look: Look, path: Path, x0: Tensor, table: Tensor, levels: int, noise: Callable[[], Tensor]) -> Tensor:
    """The same of the chain through all levels of a table, cleanest first; of each group, one for all."""
    nats = _decoder(look, path, x0, float(table[0]), float(table[1]))
    gain = -table.exp().diff()
    # A step's gain in SNR is a small difference: to many digits, where the device knows them.
    wide = torch.float32 if x0.device.type == "mps" else torch.float64
    for links in _groups(table, levels):
        share, chosen = gain[links] / gain[links].sum(), torch.zeros(len(x0), dtype=torch.long)
        if len(links) > 1:
            uniform = torch.special.ndtr(noise()[:, 0, 0, 0].cpu().double())
            chosen = torch.searchsorted(share.cumsum(0), uniform).clamp(max=len(links) - 1)
        link = torch.tensor(links)[chosen]
        level, then, weight = (v.to(x0.device, wide) for v in (table[link + 1], table[link], 1 / share[chosen]))
        guess, fraction = look(level)
        kl = step_kl(path, x0, guess, fraction, level[:, None, None, None], then[:, None, None, None])
        nats = nats + (kl.mean((1, 2, 3)) * weight).to(x0.dtype)
    return nats


def _decoder(look: Look, path: Path, x0: Tensor, logsnr: float, second: float) -> Tensor:
    guess, fraction = look(logsnr)
    nll = decoder_nll(path, x0, guess, fraction, *torch.tensor([logsnr, second], dtype=torch.float64))
    return nll.mean((1, 2, 3))


def _groups(table: Tensor, count: int) -> list[list[int]]:
    """The links i of a chain, from level i + 1 to i: each alone, or in `count` groups evenly divided by logsnr.

    A last level of pure noise is infinitely far away, and alone. Groups that would hold no link are not there.
    """
    links = len(table) - 1
    if count > links:
        return [[i] for i in range(links)]
    finite = links - int(table[-1].isinf())
    place = (table[0] - table[1 : finite + 1]) / (table[0] - table[finite]) * (count - 1)
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(place.ceil().tolist()):
        groups.setdefault(int(group), []).append(i)
    return [*groups.values(), *([[links - 1]] if finite < links else [])]
