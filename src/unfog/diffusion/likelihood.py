"""Likelihood of images under a model: the evidence lower bound, in bits per dimension.

-log p(x0) <= prior + diffusion + decoder. The prior term is the signal left at the noisiest level, the diffusion term
sums the errors of the denoising steps, and the decoder maps the guess at the cleanest level to one of 256 shades. As
functions of logsnr none of them depends on the path (Kingma et al. 2021).

The bound holds whatever the cleanest level is. Noise below half a shade, a share of 0.004, separates the shades, so
there the diffusion term measures whether the network knows that there are 256 of them, and the bound rises by 1 to 2
bits for one that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.diffusion.ddpm_schedules import TimestepSchedule
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import Schedule
from unfog.diffusion.variance import Prediction, decoder_nll, step_kl
from unfog.errors import RequestError

_ENDS = (0.05, 0.02, 0.01, 0.005, 0.002)
"""Shares of noise among which `best_end` chooses, noisiest first."""
_BETWEEN = 4  # network calls between two of them

_Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], logsnr [B]) -> E[x0 | x_t], with a learned variance behind it [B, 2 C, H, W]."""

_Predict = Callable[[float | Tensor], Prediction]
"""logsnr, or one for each image -> prediction of the image from fresh noise at that level."""


@torch.no_grad()
def bits_per_dim(
    denoise: _Denoise, diffusion: Diffusion, x0: Tensor, levels: int, noise: Callable[[], Tensor], end: float = 0.01
) -> Tensor:
    """Return a bound on -log2 of the probability of each image, per dimension; float32 [B].

    With a schedule of T timesteps it is the variational bound of DDPM (Ho et al. 2020, eq. 5) over all T of them. If
    `levels` is below T, the terms are divided evenly by logsnr into `levels` groups, and one term of each, drawn for
    each image in proportion to its gain in SNR, represents its group. That estimate is unbiased, and may be below the
    bound by chance. With a continuous schedule it is the bound of infinitely many steps, an integral over logsnr by the
    midpoint rule with `levels` points (Kingma et al. 2021, section 4), down to the level `end`.

    Args:
        denoise: such as a `Denoiser`, with conditions bound.
        diffusion: the one that it was trained with.
        x0: float32 [B, C, H, W] in [-1, 1], of 256 shades.
        levels: network calls, besides one for the decoder; 64 are good for a percent.
        noise: fresh standard normal noise like x0, for example `NoiseSource(...).draw`; called up to twice per network
            call.
        end: share of noise, sigma / (alpha + sigma), of the cleanest level of a continuous schedule; at least that of
            the schedule's own end. A chain has its own. `best_end` finds the lowest bound.

    Raises:
        RequestError: `levels` is below 2, or `end` is not a share of noise.
    """
    if levels < 2:
        raise RequestError(f"levels = {levels}: the bound needs at least 2 noise levels; 64 are good for a percent")
    if not 0 < end < 1:
        raise RequestError(f"end = {end}: the cleanest level is a share of noise between 0 and 1; 0.01 is usual")
    predict, schedule = _predictor(denoise, diffusion, x0, noise), diffusion.schedule
    if _has_timesteps(schedule):
        nats = _chain(predict, diffusion, x0, levels, noise)
    else:
        nats = _integral(predict, diffusion, x0, levels, _within(schedule, end))
    # KL(N(alpha x0, sigma^2) | N(0, sigma^2)): samplers start from the latter, with the same sigma, so that only the
    # signal that is left counts.
    noisiest, _ = schedule.limits()
    prior = math.exp(noisiest) / 2 * x0.square().mean((1, 2, 3))
    return (nats + prior) / math.log(2)


@torch.no_grad()
def best_end(denoise: _Denoise, diffusion: Diffusion, x0: Tensor, noise: Callable[[], Tensor]) -> float:
    """Return the `end` of `bits_per_dim`, of a few, at which the mean bound of images x0 [B, C, H, W] is lowest.

    Choose it on other images than those that are measured. A schedule with timesteps has one end, which is returned.
    """
    predict, schedule = _predictor(denoise, diffusion, x0, noise), diffusion.schedule
    if _has_timesteps(schedule):
        return _share(schedule.limits()[1])
    ends = sorted({_within(schedule, end) for end in _ENDS})
    bounds, diffusing = [], torch.zeros(len(x0), device=x0.device, dtype=x0.dtype)
    for before, logsnr in zip([ends[0], *ends], ends):
        if logsnr > before:
            diffusing = diffusing + _diffusion_term(predict, x0, before, logsnr, _BETWEEN)
        bounds.append(float((diffusing + _decoder(predict, diffusion, x0, logsnr, logsnr)).mean()))
    return _share(ends[bounds.index(min(bounds))])


def _predictor(denoise: _Denoise, diffusion: Diffusion, x0: Tensor, noise: Callable[[], Tensor]) -> _Predict:
    def predict(logsnr: float | Tensor) -> Prediction:
        # Numbers are filled in there: a tensor made of one here would be copied, and waited for.
        each = logsnr if isinstance(logsnr, Tensor) else torch.full((), logsnr, device=x0.device, dtype=x0.dtype)
        level = each.to(x0.dtype).expand(len(x0))
        answer = denoise(diffusion.add_noise(x0, noise(), level), level)
        channels = x0.shape[1]
        return Prediction(answer[:, :channels], answer[:, channels:] if answer.shape[1] > channels else None)

    return predict


def _has_timesteps(schedule: Schedule) -> bool:
    return isinstance(schedule, TimestepSchedule) and schedule.steps > 0


def _within(schedule: Schedule, share: float) -> float:
    """Return the logsnr of a share of noise, or the schedule's end if that is noisier."""
    return min(schedule.limits()[1], 2 * math.log((1 - share) / share))


def _share(logsnr: float) -> float:
    return 1 / (1 + math.exp(logsnr / 2))


def _integral(predict: _Predict, diffusion: Diffusion, x0: Tensor, levels: int, cleanest: float) -> Tensor:
    """Return diffusion and decoder terms, nats per dimension [B]."""
    noisiest, _ = diffusion.schedule.limits()
    nats = _decoder(predict, diffusion, x0, cleanest, cleanest)
    return nats + _diffusion_term(predict, x0, noisiest, cleanest, levels)


def _diffusion_term(predict: _Predict, x0: Tensor, noisiest: float, cleanest: float, levels: int) -> Tensor:
    """Return half the integral of SNR |x0 - D|^2 over logsnr, nats per dimension [B]."""
    # Even in logsnr and not in u, so that the points do not depend on where the schedule trains most.
    width, nats = (cleanest - noisiest) / levels, torch.zeros(len(x0), device=x0.device, dtype=x0.dtype)
    for i in range(levels):
        logsnr = cleanest - (i + 0.5) * width
        nats = nats + width / 2 * math.exp(logsnr) * (predict(logsnr).x0 - x0).square().mean((1, 2, 3))
    return nats


def _chain(predict: _Predict, diffusion: Diffusion, x0: Tensor, levels: int, noise: Callable[[], Tensor]) -> Tensor:
    """Return the same terms of the chain through all levels of a table, with one step sampled of each group."""
    assert isinstance(diffusion.schedule, TimestepSchedule)
    table = diffusion.schedule.table()
    nats = _decoder(predict, diffusion, x0, float(table[0]), float(table[1]))
    gain = -table.exp().diff()
    # A step's gain in SNR is a small difference, so float64, which MPS does not have.
    wide = torch.float32 if x0.device.type == "mps" else torch.float64

    def there(values: Tensor) -> Tensor:
        return to_device(values.to(wide), x0.device)

    levels_there = there(table)
    for links in group_steps(table, levels):
        share, chosen = gain[links] / gain[links].sum(), torch.zeros(len(x0), dtype=torch.long, device=x0.device)
        if len(links) > 1:
            # From the same stream as the noise, which an image has to itself: the choice depends on no other image.
            uniform = torch.special.ndtr(noise()[:, 0, 0, 0].to(wide))
            # Summed on the CPU, as sums along a dimension are not deterministic on CUDA.
            chosen = torch.searchsorted(there(share.cumsum(0)), uniform).clamp(max=len(links) - 1)
        link = to_device(torch.tensor(links), x0.device)[chosen]
        level, then, weight = levels_there[link + 1], levels_there[link], there(1 / share)[chosen]
        predicted = predict(level)
        kl = step_kl(diffusion.path, x0, predicted, level[:, None, None, None], then[:, None, None, None])
        nats = nats + (kl.mean((1, 2, 3)) * weight).to(x0.dtype)
    return nats


def _decoder(predict: _Predict, diffusion: Diffusion, x0: Tensor, logsnr: float, second: float) -> Tensor:
    levels = torch.tensor([logsnr, second], dtype=torch.float64)
    nll = decoder_nll(diffusion.path, x0, predict(logsnr), *levels)
    return nll.mean((1, 2, 3))


def group_steps(table: Tensor, count: int) -> list[list[int]]:
    """Group the links i of a chain, from level i + 1 to i: each alone, or in `count` groups even in logsnr.

    The link to a level of pure noise is infinitely long, and alone in its group. Empty groups are left out.
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
