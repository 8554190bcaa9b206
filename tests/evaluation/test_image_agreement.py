"""PSNR, SSIM and CRPS against their definitions, computed place by place and by integration."""

import numpy as np
import pytest
import torch

from unfog.errors import RequestError
from unfog.evaluation.image_agreement import agreement, crps, psnr, ssim

RNG = np.random.default_rng(0)
TRUTH = RNG.uniform(0, 255, (3, 2, 13, 16))
IMAGES = np.clip(TRUTH + RNG.normal(0, [[[[5]]], [[[20]]], [[[60]]]], TRUTH.shape), 0, 255)


def naive_ssim(a, b, reach):
    place = np.arange(11) - 5
    weight = np.exp(-(place[:, None] ** 2 + place**2) / 4.5)
    weight /= weight.sum()
    found = []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mp, mq = (weight * p).sum(), (weight * q).sum()
            vp, vq = (weight * (p - mp) ** 2).sum(), (weight * (q - mq) ** 2).sum()
            cov = (weight * (p - mp) * (q - mq)).sum()
            c1, c2 = (0.01 * reach) ** 2, (0.03 * reach) ** 2
            found.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return np.mean(found)


def test_psnr_and_ssim_are_those_of_their_definitions():
    images, truth = torch.from_numpy(IMAGES), torch.from_numpy(TRUTH)
    expected = [20 * np.log10(255 / np.sqrt(((a - b) ** 2).mean())) for a, b in zip(IMAGES, TRUTH, strict=True)]
    assert psnr(images, truth, 255).tolist() == pytest.approx(expected)
    each = [
        np.mean([naive_ssim(*pair, 255) for pair in zip(a, b, strict=True)]) for a, b in zip(IMAGES, TRUTH, strict=True)
    ]
    assert ssim(images, truth, 255).tolist() == pytest.approx(each)
    assert ssim(truth.byte(), truth.byte(), 255).tolist() == pytest.approx([1.0] * 3)
    assert psnr(truth, truth, 255).isinf().all()
    with pytest.raises(RequestError, match="smaller than the window"):
        ssim(images[..., :8], truth[..., :8], 255)
    with pytest.raises(RequestError, match="must both be"):
        psnr(images, truth[:2], 255)


def test_crps_is_the_integral_over_distribution_functions_without_its_bias():
    draws, truth = RNG.normal(size=(5, 2, 1, 2, 2)), RNG.normal(size=(2, 1, 2, 2))
    grid = np.linspace(-8, 8, 160_001)
    found = crps(torch.from_numpy(draws), torch.from_numpy(truth)).tolist()
    for n in range(2):
        expected = 0.0
        for i, j in np.ndindex(2, 2):
            own, true = draws[:, n, 0, i, j], truth[n, 0, i, j]
            integral = (((own[:, None] <= grid).mean(0) - (true <= grid)) ** 2).sum() * (grid[1] - grid[0])
            # The integral counts each draw as its own partner; the fair estimate takes different ones.
            bias = np.abs(own[:, None] - own).sum() / 2 * (1 / 25 - 1 / 20)
            expected += (integral + bias) / 4
        assert found[n] == pytest.approx(expected, abs=1e-3)
    alike = torch.from_numpy(draws[:1].repeat(4, 0))
    error = np.abs(draws[0] - truth).mean((1, 2, 3))
    assert crps(alike, torch.from_numpy(truth)).tolist() == pytest.approx(error.tolist())
    with pytest.raises(RequestError, match="two draws"):
        crps(torch.zeros(1, 2, 1, 4, 4), torch.zeros(2, 1, 4, 4))


def test_agreement_has_the_measures_of_one_draw_of_their_mean_and_of_what_is_given():
    truth = torch.from_numpy(TRUTH)
    draws = torch.stack([truth + 20, truth - 20])
    measured = agreement("grey", draws, truth, truth + 10, 255)
    psnr_, ssim_, crps_ = measured
    assert [one.measure for one in measured] == ["PSNR", "SSIM", "CRPS"]
    assert psnr_.value == pytest.approx(20 * np.log10(255 / 20)) == pytest.approx(psnr_.low)
    assert psnr_.given == pytest.approx(20 * np.log10(25.5))
    assert psnr_.mean == 100  # equal to the truth: no infinity, which files cannot hold
    assert ssim_.shuffled < 0.5 < ssim_.value < ssim_.mean
    assert crps_.value == pytest.approx(0)  # 20 of the error less 20 of the distance of the draws
    assert crps_.given == pytest.approx(10 / 255)
    assert [one.measure for one in agreement("grey", draws[..., :8], truth[..., :8], None, 255)] == ["PSNR", "CRPS"]
