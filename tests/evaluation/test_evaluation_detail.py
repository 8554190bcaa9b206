"""Detail by frequency, against identities: Parseval, white noise, a known filter, and a bootstrap for the errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.evaluation import pixel_metrics as detail  # parts of a sum that have closed forms
from unfog.evaluation.pixel_metrics import band_powers, compare_detail, compare_pixels, radial_spectrum


def as_pixels(x: Tensor) -> Tensor:
    """Floats in [-1, 1] as uint8."""
    return ((x + 1) * 127.5).round().clamp(0, 255).byte()


def noise(count: int, seed: int, side: int = 32, channels: int = 1, std: float = 0.25) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(count, channels, side, side, generator=generator)


def natural(count: int, seed: int, side: int = 32) -> Tensor:
    """Images with a spectrum that falls with frequency, and of contrasts that vary as photographs' do."""
    x, generator = torch.zeros(count, 1, side, side), torch.Generator().manual_seed(seed)
    for scale in (1, 2, 4, 8):
        coarse = torch.randn(count, 1, side // scale, side // scale, generator=generator)
        x += 0.05 * scale**0.8 * F.interpolate(coarse, size=side, mode="nearest")
    contrast = torch.rand(count, 1, 1, 1, generator=generator) * 1.5
    return as_pixels(contrast * x)


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 28, 28), (3, 17, 40), (1, 8, 8), (4, 12, 12)])
def test_bands_sum_to_the_variance_of_luma(shape: tuple[int, int, int]):
    images = torch.randint(0, 256, (20, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    x = images.double() / 127.5 - 1
    weights = [0.299, 0.587, 0.114] if shape[0] == 3 else [1 / shape[0]] * shape[0]
    luma = sum(w * x[:, c] for c, w in enumerate(weights))
    torch.testing.assert_close(band_powers(images).sum(1), luma.flatten(1).var(1, correction=0))


def test_memory_is_bounded_without_changing_a_figure(monkeypatch: pytest.MonkeyPatch):
    images = natural(50, 0)
    whole, ring = band_powers(images), radial_spectrum(images)[1]
    monkeypatch.setattr(detail, "_VALUES", 32 * 32 * 7)
    torch.testing.assert_close(band_powers(images), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(radial_spectrum(images)[1], ring, rtol=1e-12, atol=0)


def test_the_transform_is_orthonormal_and_that_of_its_definition():
    matrix = detail.dct(9)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(9, dtype=torch.float64), rtol=0, atol=1e-12)
    expected = math.sqrt(2 / 9) * math.cos(math.pi / 9 * (4 + 0.5) * 3)
    assert float(matrix[3, 4]) == pytest.approx(expected)


def test_the_spectrum_of_white_noise_is_flat():
    images = as_pixels(noise(400, 0))
    frequency, power = radial_spectrum(images)
    # A ring of k coefficients has a relative error of sqrt(2 / (400 k)); the first has two.
    assert power / 0.25**2 == pytest.approx(1, abs=4 * math.sqrt(2 / 800))
    assert float(frequency[0]) == pytest.approx(1 / 32)
    assert float(frequency[-1]) == pytest.approx(math.sqrt(2), abs=0.06)
    shares = torch.tensor([float(mask.double().mean()) for mask in detail._masks(32, 32)])
    assert band_powers(images).mean(0) / 0.25**2 / shares == pytest.approx(torch.ones(6), rel=0.15)


def test_a_blur_scales_each_frequency_by_its_known_response():
    """[a, 1 - 2 a, a] along rows and columns of a mirrored image has the response 1 - 2 a + 2 a cos(pi f)."""
    a, x = 0.15, noise(300, 1)
    row = torch.tensor([a, 1 - 2 * a, a])
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")  # the mirror of a DCT-II repeats the last pixel
    blurred = F.conv2d(padded, torch.outer(row, row)[None, None])
    (one, *_), (other, *_) = (detail._powers(as_pixels(v)) for v in (x, blurred))
    f = torch.arange(32, dtype=torch.float64) / 32
    response = 1 - 2 * a + 2 * a * (math.pi * f).cos()
    expected = torch.outer(response, response).square()
    found = other.mean(0)[1:, 1:] / one.mean(0)[1:, 1:]
    # What is left is the rounding to 256 levels.
    torch.testing.assert_close(found, expected[1:, 1:], rtol=0.02, atol=3e-3)
    by_name = {m.metric: m.value for m in compare_detail(as_pixels(x), as_pixels(blurred))}
    for i, mask in enumerate(detail._masks(32, 32)):
        assert by_name[f"detail_{i + 1}"] == pytest.approx(float(expected[mask].mean()), rel=0.03)


@pytest.mark.slow
def test_errors_are_those_of_a_bootstrap():
    real, fake = natural(300, 2), natural(200, 3)
    generator = torch.Generator().manual_seed(0)
    one, other = band_powers(real), band_powers(fake)

    def resampled(x: Tensor) -> Tensor:
        return x[torch.randint(len(x), (len(x),), generator=generator)].mean(0)

    ratios = torch.stack([resampled(other) / resampled(one) for _ in range(2000)])
    found = compare_detail(real, fake)[1:]
    assert [m.value for m in found] == pytest.approx((other.mean(0) / one.mean(0)).tolist())
    assert [m.error for m in found] == pytest.approx(ratios.std(0).tolist(), rel=0.1)
    lows, highs = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    assert [m.low for m in found] == pytest.approx(lows.tolist(), rel=0.03)
    assert [m.high for m in found] == pytest.approx(highs.tolist(), rel=0.03)


@pytest.mark.slow
def test_intervals_of_sets_that_are_alike_hold_one():
    inside = []
    for seed in range(40):
        found = compare_detail(natural(80, 2 * seed + 10), natural(80, 2 * seed + 11))
        inside += [m.low <= 1 <= m.high for m in found if m.metric == "detail"]
    assert sum(inside) >= 34  # of 40 at 95%; fewer than one in a thousand times


def test_smooth_and_grainy_images_are_told_apart():
    real, other = natural(300, 4), natural(300, 5)
    smooth = as_pixels(F.avg_pool2d(other / 127.5 - 1, 3, 1, 1, count_include_pad=False))
    grainy = as_pixels(other / 127.5 - 1 + noise(300, 6, std=0.1))
    for images, low, high in ((smooth, 0.0, 0.5), (other, 0.7, 1.4), (grainy, 2.0, 99.0)):
        found = compare_pixels(["detail"], real, images)[0]
        assert found.metric == "detail"
        assert low < found.value < high


def test_bands_without_detail_are_refused():
    flat = torch.full((20, 1, 16, 16), 128, dtype=torch.uint8)
    found = compare_detail(flat, natural(20, 7, 16))
    assert all(m.value is None and "no detail" in m.note for m in found)
    assert all(m.value == 0 and m.low is None for m in compare_detail(natural(20, 7, 16), flat))


def test_small_images_have_fewer_bands_and_wrong_shapes_are_refused():
    small = as_pixels(noise(20, 8, side=8))
    found = compare_detail(small, small)
    assert [m.metric for m in found] == ["detail", *(f"detail_{i}" for i in range(2, 7))]
    assert [m.features for m in found][:2] == ["luma above 1/2", "luma 1/16 to 1/8"]
    assert found[-1].features == "luma above 1"
    with pytest.raises(RequestError, match="of one shape"):
        compare_detail(small, natural(20, 9))
    with pytest.raises(RequestError, match="two of each"):
        compare_detail(small, small[:1])


def test_colour_is_measured_beside_luma():
    """Noise of luma leaves colour as it is, and the other way round; the bands of luma keep their names."""
    grey = natural(200, 11).repeat(1, 3, 1, 1)
    tint = noise(200, 12, channels=3, std=0.03)
    tint = tint - tint.mean(1, keepdim=True)
    real = as_pixels(grey / 127.5 - 1 + tint)
    more_colour = as_pixels(grey / 127.5 - 1 + 2 * tint)
    more_luma = as_pixels(real / 127.5 - 1 + noise(200, 13, std=0.1))
    colour, luma = ({m.metric: m.value for m in compare_detail(real, x)} for x in (more_colour, more_luma))
    assert colour["detail_colour"] == pytest.approx(4, rel=0.1)
    assert colour["detail"] == pytest.approx(1, abs=0.25)
    assert luma["detail_colour"] == pytest.approx(1, abs=0.1)
    assert luma["detail"] > 1.7
    assert "detail_colour" not in {m.metric for m in compare_detail(natural(20, 1), natural(20, 2))}
