"""Metrics of any values against identities and NumPy: Parseval, white noise, known spectra, distances, correlations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfog.evaluation import value_sources
from unfog.evaluation.value_metrics import VALUE_METRICS, RealImages, channel_spectra, power_of_coefficients

RNG = np.random.default_rng(0)
SIDE, MEAN = 12, np.array([0.0, 5.0, -3000.0])[:, None, None]
DEVIATION = np.array([1.0, 100.0, 1000.0])[:, None, None]
CORRELATION = np.array([[1.0, 0.8, -0.5], [0.8, 1.0, -0.2], [-0.5, -0.2, 1.0]])
K = np.fft.fftfreq(SIDE, 1 / SIDE)
RADIUS = np.hypot(K[:, None], K[None])
POWER = (1 + (RADIUS / 2) ** 2) ** -1.5  # as in examples/random_fields.py
POWER /= POWER.mean()


def fields(count: int, seed: int) -> np.ndarray:
    """Gaussian random fields float32 [N, C, H, W] with the spectrum POWER, by channel times DEVIATION squared."""
    white = np.random.default_rng(seed).standard_normal((count, 3, SIDE, SIDE))
    smooth = np.fft.ifft2(np.fft.fft2(white) * np.sqrt(POWER)).real
    return (MEAN + DEVIATION * np.einsum("cd,ndhw->nchw", np.linalg.cholesky(CORRELATION), smooth)).astype(np.float32)


def cosine(x: np.ndarray, axis: int) -> np.ndarray:
    """DCT-II along an axis, from its definition."""
    n = x.shape[axis]
    matrix = np.sqrt(2 / n) * np.cos(np.pi / n * np.arange(n)[:, None] * (np.arange(n) + 0.5))
    matrix[0] /= np.sqrt(2)
    return np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T, -1, axis)


def measured(real: np.ndarray, samples: np.ndarray, wrap: str = "xy") -> dict[str, tuple[float, float, float]]:
    found = RealImages(real, wrap=wrap).compare(VALUE_METRICS, samples)
    return {one.metric: (one.value, one.real_low, one.real_high) for parts in found.values() for one in parts}


@pytest.mark.parametrize("wrap", ["", "x", "y", "xy"])
@pytest.mark.parametrize("shape", [(2, 8, 12), (1, 7, 5)])
def test_powers_hold_parseval_and_are_those_of_numpy(shape: tuple[int, int, int], wrap: str) -> None:
    images = RNG.normal(size=(3, *shape)) + 2
    expected = images
    for axis, dim in (("y", 2), ("x", 3)):
        if axis not in wrap:
            expected = cosine(expected, dim)
    for axis, dim in (("y", 2), ("x", 3)):
        if axis in wrap:
            expected = np.fft.fft(expected, axis=dim, norm="ortho")
    found = power_of_coefficients(torch.from_numpy(images), wrap).numpy()
    np.testing.assert_allclose(found, np.abs(expected) ** 2, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.mean((2, 3)), (images**2).mean((2, 3)))


@pytest.mark.parametrize("wrap", ["", "y", "xy"])
def test_the_spectrum_of_white_noise_is_flat_within_its_error(wrap: str) -> None:
    noise = np.random.default_rng(1).normal(7, 3, (400, 2, 16, 24)).astype(np.float32)
    frequency, power = channel_spectra(noise, wrap)
    axes = [2 * abs(np.fft.fftfreq(n)) if axis in wrap else np.arange(n) / n for n, axis in ((16, "y"), (24, "x"))]
    step = (2 if wrap else 1) / 16
    ring = np.round(np.hypot(axes[0][:, None], axes[1]) / step)
    np.testing.assert_allclose(frequency.numpy(), np.unique(ring)[1:] * step)
    # A coefficient and its conjugate are equal, so that at least half of a ring are independent.
    independent = np.unique(ring, return_counts=True)[1][1:] / (2 if wrap else 1)
    assert np.all(np.abs(power.numpy() / 9 - 1) < 4.5 * np.sqrt(2 / 400 / np.maximum(1, independent)))


def test_a_known_spectrum_is_found() -> None:
    images = fields(600, 2)
    frequency, power = channel_spectra(images, "xy")
    ring = np.round(RADIUS).astype(int)
    for i, k in enumerate(np.round(frequency.numpy() * SIDE / 2).astype(int)):
        error = 5 * np.sqrt(2 / (600 * max(1, (ring == k).sum() / 2)))
        assert power[:, i].numpy() / DEVIATION[:, 0, 0] ** 2 == pytest.approx(POWER[ring == k].mean(), rel=error)


def test_the_cosine_spectrum_of_periodic_fields_is_that_of_their_covariance() -> None:
    """Without `wrap`: the diagonal of D S D^T, for the matrix D of the transform and the covariance S of pixels."""
    correlation = np.fft.ifft2(POWER).real
    steps = np.arange(SIDE)[:, None] - np.arange(SIDE)[None]
    covariance = correlation[steps[:, None, :, None], steps[None, :, None, :]]  # [H, W, H, W]
    for axis in range(4):
        covariance = cosine(covariance, axis)
    expected = np.einsum("hwhw->hw", covariance)
    power = power_of_coefficients(torch.from_numpy(fields(1500, 3)[:, :1].astype(np.float64))).mean((0, 1)).numpy()
    np.testing.assert_allclose(power, expected, rtol=6 * np.sqrt(2 / 1500))


def test_distances_are_those_of_numpy() -> None:
    real, samples = fields(40, 4), 1.5 * fields(20, 5)
    found = measured(real, samples)
    half = real[::2].astype(np.float64)
    frequency, given = channel_spectra(half, "xy")
    power = channel_spectra(samples, "xy")[1]
    weights = 1 / frequency / (1 / frequency).sum()
    for c in range(3):
        expected = float(((power[c] / given[c]).log().abs() * weights).sum())
        assert found[f"spectrum_{c}"][0] == pytest.approx(expected, rel=1e-4)
        # Of as many values in both: in one dimension the optimal transport pairs them in their order.
        expected = np.abs(np.sort(samples[:, c], axis=None) - np.sort(half[:, c], axis=None)).mean()
        assert found[f"histogram_{c}"][0] == pytest.approx(expected, rel=1e-6)
    assert found["spectrum"][0] == max(found[f"spectrum_{c}"][0] for c in range(3))
    farthest = max(found[f"histogram_{c}"][0] / real[:, c].std(dtype=np.float64) for c in range(3))
    assert found["histogram"][0] == pytest.approx(farthest, rel=1e-6)
    own, other = (np.corrcoef(x.transpose(1, 0, 2, 3).reshape(3, -1).astype(np.float64)) for x in (samples, half))
    assert found["correlation"][0] == pytest.approx(np.abs(own - other).max(), abs=1e-9)


def test_other_real_images_are_within_the_halves_and_worse_ones_are_not() -> None:
    real, like = fields(400, 6), fields(200, 7)
    found = measured(real, like)
    assert all(value <= 1.6 * high and 0 < low <= high for value, low, high in found.values())
    shuffled = measured(real, like[:, [1, 0, 2]] / DEVIATION[[1, 0, 2]] * DEVIATION)
    value, _, high = shuffled["correlation"]
    assert value == pytest.approx(0.3, abs=0.06)  # -0.5 and -0.2 change places
    assert value > 3 * high
    value, _, high = measured(real, like + RNG.normal(0, 0.5, like.shape) * DEVIATION)["spectrum"]
    assert value > 3 * high
    value, _, high = measured(real, like + DEVIATION)["histogram"]
    assert value == pytest.approx(1.0, abs=0.1)
    assert value > 3 * high


@pytest.mark.slow
def test_other_real_images_exceed_all_halves_about_once_in_21_times() -> None:
    exceeded = 0
    for seed in range(40):
        found = measured(fields(100, 1000 + 2 * seed), fields(50, 1001 + 2 * seed))
        exceeded += sum(found[name][0] > found[name][2] for name in VALUE_METRICS)
    assert exceeded <= 18, "of 120, where 6 are expected"


def test_a_constant_or_an_only_channel_and_values_that_are_not_finite_have_results() -> None:
    flat = fields(40, 8)
    flat[:, 1] = 4.0
    found = measured(flat, flat[:20])
    assert found["correlation"][0] < 0.5
    assert found["histogram_1"][0] == 0
    grey = RealImages(np.full((40, 1, 8, 8), 3, np.uint8)).compare(VALUE_METRICS, np.full((20, 1, 8, 8), 3, np.uint8))
    assert [one.value for one in grey["spectrum"] + grey["histogram"]] == [0, 0, 0]
    assert "one channel" in grey["correlation"][0].note
    broken = fields(20, 9)
    broken[3, 0, 2, 2] = np.nan
    for one in RealImages(fields(40, 8)).compare(VALUE_METRICS, broken).values():
        assert one[0].value is None
        assert "1 of the samples" in one[0].note


def test_results_do_not_depend_on_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, samples = fields(40, 10), fields(20, 11)
    whole = measured(real, samples)
    monkeypatch.setattr(value_sources, "_VALUES", 3 * SIDE**2 * 7)
    for name, values in measured(real, samples).items():
        assert values == pytest.approx(whole[name], rel=1e-9, abs=1e-12)


class Counted:
    """Images that count how many were read."""

    def __init__(self, images: np.ndarray) -> None:
        self.images, self.read = images, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> np.ndarray:
        found = self.images[rows]
        self.read += len(found)
        return found


def test_samples_that_were_measured_are_not_read_again() -> None:
    real, samples = RealImages(fields(40, 16)), Counted(fields(20, 17))
    known = real.measure(samples)
    read = samples.read
    found, curves = real.compare(VALUE_METRICS, known), real.curves(VALUE_METRICS, known)
    assert samples.read == read
    assert found == real.compare(VALUE_METRICS, samples.images)
    assert curves == real.curves(VALUE_METRICS, samples.images)


def test_curves_hold_the_units_and_the_range_of_halves() -> None:
    real, samples = fields(80, 12), fields(40, 13)
    curves = RealImages(real, wrap="xy").curves(VALUE_METRICS, samples)
    assert [(one.metric, one.channel) for one in curves] == [(m, c) for m in VALUE_METRICS[:2] for c in range(3)]
    for one in curves:
        assert all(low <= x <= high for low, x, high in zip(one.low, one.real, one.high, strict=True))
    np.testing.assert_allclose(curves[1].real, channel_spectra(real.astype(np.float64), "xy")[1][1], rtol=1e-6)
    density = curves[5]
    assert np.mean(density.x) == pytest.approx(-3000, abs=500)
    assert sum(density.real) * (density.x[1] - density.x[0]) == pytest.approx(1, abs=0.01)
    whole = RealImages((real[:, :1] * 20 + 100).clip(0, 255).astype(np.uint8)).curves(["histogram"], real[:40, :1])
    assert all(float(x).is_integer() or float(2 * x).is_integer() for x in whole[0].x)
