"""Agreement of images with the true ones: PSNR, SSIM, and the CRPS of several draws for each.

For conditions that are images, such as a smaller or a grey one: the truth is the image that they were made of, and no
judge is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.evaluation.held_out import MeanEstimate
from unfog.evaluation.metrics import Z

_WINDOW, _SIGMA = 11, 1.5  # of SSIM, and below its constants, as Wang et al. 2004 have them
_K1, _K2 = 0.01, 0.03
PSNR, SSIM, CRPS = "PSNR", "SSIM", "CRPS"
_MOST_DECIBELS = 100.0  # of images that are equal to rounding errors


def psnr(images: Tensor, truth: Tensor, reach: float) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, float64 [N]; infinite for equal images.

    Args:
        images: [N, C, H, W].
        truth: like `images`.
        reach: difference of the largest and the least value that images can have, such as 255.
    """
    _check_equal(images, truth)
    error = (images.double() - truth.double()).square().flatten(1).mean(1)
    return 10 * torch.log10(reach**2 / error)


def ssim(images: Tensor, truth: Tensor, reach: float) -> Tensor:
    """Return the structural similarity of each image, float64 [N], at most 1; arguments as `psnr`.

    As by Wang et al. 2004: a Gaussian window of 11 pixels and deviation 1.5, mean over places where it is inside the
    image, and over channels. RequestError if images are smaller than the window.
    """
    _check_equal(images, truth)
    if min(images.shape[2:]) < _WINDOW:
        raise RequestError(f"images {list(images.shape[2:])} are smaller than the window of SSIM, {_WINDOW} pixels")
    place = torch.arange(_WINDOW, dtype=torch.float64, device=images.device) - _WINDOW // 2
    window = torch.exp(-place.square() / (2 * _SIGMA**2))
    window = window / window.sum()
    count, channels, height, width = images.shape

    def smooth(x: Tensor) -> Tensor:
        x = F.conv2d(x.reshape(-1, 1, height, width), window.view(1, 1, -1, 1))
        return F.conv2d(x, window.view(1, 1, 1, -1)).view(count, channels, -1)

    x, y = images.double(), truth.double()
    mean_x, mean_y = smooth(x), smooth(y)
    variances = smooth(x * x) - mean_x.square() + smooth(y * y) - mean_y.square()
    covariance = smooth(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * reach) ** 2, (_K2 * reach) ** 2
    same_mean = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    return (same_mean * (2 * covariance + c2) / (variances + c2)).flatten(1).mean(1)


def crps(draws: Tensor, truth: Tensor) -> Tensor:
    """Return the continuous ranked probability score of M draws [M, N, C, H, W] for each image, float64 [N]; 0 is best.

    It is the mean over values of |draw - truth| less half of |draw - other draw|, over all pairs of different draws:
    the fair estimate (Ferro 2014), whose mean does not depend on M. Draws that are all alike have their mean absolute
    error. `truth` is [N, C, H, W]. RequestError for fewer than two draws.
    """
    count = len(draws)
    if count < 2:
        raise RequestError("CRPS needs at least two draws for each image")
    _check_equal(draws[0], truth)
    ordered = draws.double().sort(0).values
    # The sum of |a - b| over all pairs is that of the ordered values with weights 1 - M, 3 - M, ..., M - 1.
    weights = 2 * torch.arange(count, dtype=torch.float64, device=draws.device) - (count - 1)
    apart = torch.einsum("m,mn->n", weights, ordered.flatten(2).mean(2)) * 2 / (count * (count - 1))
    return (draws.double() - truth.double()).abs().flatten(2).mean((0, 2)) - apart / 2


@dataclass(frozen=True)
class ImageAgreement:
    """Agreement of draws with the true images whose conditions they were given: mean over images, 95% interval."""

    condition: str
    """Names of the conditions that are images, with commas between them."""
    measure: str
    """PSNR in decibels, SSIM, or CRPS as a share of the range of values, of which 0 is best."""
    value: float
    """Of one draw; CRPS is of all draws of an image together."""
    low: float
    high: float
    mean: float
    """Of the mean of the draws of an image."""
    given: float | None
    """Of what is given, such as the bicubic enlargement; None if it is of other values than the image."""
    shuffled: float
    """Of one draw, compared with another image."""
    n: int
    """Images."""
    draws: int
    """Of each image."""


def agreement(condition: str, draws: Tensor, truth: Tensor, given: Tensor | None, reach: float) -> list[ImageAgreement]:
    """Return PSNR, SSIM unless images are too small, and CRPS.

    Args:
        condition: name of what was given.
        draws: [M, N, C, H, W], M and N at least 2.
        truth: [N, C, H, W].
        given: like `truth`, or None.
        reach: see `psnr`.
    """
    count, images = draws.shape[:2]
    other, found = truth.roll(1, 0), list[ImageAgreement]()
    for measure, of_pair in ((PSNR, _decibels), (SSIM, ssim), (CRPS, _absolute_error)):
        if measure == SSIM and min(truth.shape[2:]) < _WINDOW:
            continue
        if measure == CRPS:
            each, shuffled = (crps(draws, truth) / reach)[None], crps(draws, other) / reach
        else:
            each = torch.stack([of_pair(one, truth, reach) for one in draws])  # [M, N]
            shuffled = torch.stack([of_pair(one, other, reach) for one in draws])
        mean = MeanEstimate.over_images(each)
        of_mean = float(of_pair(draws.double().mean(0), truth, reach).mean())
        of_given = None if given is None else float(of_pair(given, truth, reach).mean())
        ends = mean.value - Z * mean.error, mean.value + Z * mean.error
        one = condition, measure, mean.value, *ends, of_mean, of_given, float(shuffled.mean()), images, count
        found.append(ImageAgreement(*one))
    return found


def _decibels(images: Tensor, truth: Tensor, reach: float) -> Tensor:
    return psnr(images, truth, reach).clamp(max=_MOST_DECIBELS)


def _absolute_error(images: Tensor, truth: Tensor, reach: float) -> Tensor:
    """Return the CRPS of draws that are all alike, as a share of the range."""
    return (images.double() - truth.double()).abs().flatten(1).mean(1) / reach


def _check_equal(images: Tensor, truth: Tensor) -> None:
    if images.shape != truth.shape or images.ndim != 4:
        raise RequestError(f"images {list(images.shape)} and {list(truth.shape)} must both be [N, C, H, W]")
