"""Posterior sampling: for a Gaussian prior and a linear measurement, draws have the known mean and covariance."""

import math

import pytest
import torch

from gaussians import normal
from unfog.diffusion.noise import VE, VP, Cosine, Flow, FlowUniform
from unfog.diffusion.posterior import Observation, conjugate_gradients
from unfog.diffusion.sampler import Sampler

DOUBLE = torch.float64
FACTOR = torch.tensor([[0.5, 0, 0, 0], [0.3, 0.4, 0, 0], [0, 0.2, 0.3, 0], [-0.2, 0, 0.1, 0.5]], dtype=DOUBLE)
COVARIANCE, MEAN = FACTOR @ FACTOR.T, torch.tensor([0.3, -0.2, 0.0, 0.5], dtype=DOUBLE)
MATRIX = torch.tensor([[1.0, 0, 0.5, 0], [0, 1, 0, -1]], dtype=DOUBLE)
OBSERVED, NOISE, COUNT = torch.tensor([0.7, -0.4], dtype=DOUBLE), 0.1, 3000


def denoiser(path):
    """E[x0 | x_t] of x0 ~ N(MEAN, COVARIANCE), images [B, 4, 1, 1] at one level."""

    def denoise(x, logsnr):
        alpha, sigma = (float(part) for part in path(logsnr[:1]))
        gain = alpha * COVARIANCE @ torch.linalg.inv(alpha**2 * COVARIANCE + sigma**2 * torch.eye(4, dtype=DOUBLE))
        return (MEAN + (x[:, :, 0, 0] - alpha * MEAN) @ gain.T)[:, :, None, None]

    return denoise


def linear(x):
    return x[:, :, 0, 0] @ MATRIX.T + 3


def closed_form(noise):
    inverse = torch.linalg.inv(MATRIX @ COVARIANCE @ MATRIX.T + noise**2 * torch.eye(2, dtype=DOUBLE))
    gain = COVARIANCE @ MATRIX.T @ inverse
    return MEAN + gain @ (OBSERVED - MATRIX @ MEAN), COVARIANCE - gain @ MATRIX @ COVARIANCE


def observation(noise, affine=True):
    return Observation(linear, OBSERVED + 3, torch.full((2,), noise**2, dtype=DOUBLE), affine)


CASES = {
    "vp": (VP(), Cosine(steps=0), "dpmpp", NOISE, True),
    "flow, gradients of gradients": (Flow(), FlowUniform(), "dpmpp", NOISE, False),
    "ve, heun": (VE(), FlowUniform(), "heun", NOISE, True),
    "from pure noise": (VP(), Cosine(zero_terminal=True), "dpmpp", NOISE, True),
    "without noise": (Flow(), FlowUniform(), "dpmpp", 0.0, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_draws_have_the_mean_and_covariance_of_the_known_posterior(case):
    path, schedule, kind, noise, affine = case
    denoise = observation(noise, affine).posterior(denoiser(path), path)
    draw = normal(COUNT, 4, 1, 1)
    x = Sampler(kind, 60, clip=False)(denoise, path, schedule, draw)[:, :, 0, 0]
    mean, covariance = closed_form(noise)
    # Four standard errors of as many exact draws, and 2% for 60 steps.
    tolerance = 4 / math.sqrt(COUNT)
    assert ((x.mean(0) - mean).abs() < tolerance * covariance.diagonal().sqrt() + 1e-3).all()
    assert ((torch.cov(x.T) - covariance).abs() < (math.sqrt(2) * tolerance + 0.02) * covariance.diagonal().max()).all()
    # What was observed narrows the prior, so this is no sample of it.
    assert (covariance.diagonal()[:2] < 0.8 * COVARIANCE.diagonal()[:2]).all()
    if noise == 0:
        assert (linear(x[:, :, None, None]) - OBSERVED - 3).abs().max() < 1e-3


def test_a_measurement_that_is_not_linear_is_linearised_at_the_guess():
    x = torch.tensor([[[[0.3]], [[-0.2]], [[0.1]], [[0.4]]]], dtype=DOUBLE)
    given = Observation(lambda x: linear(x).exp(), (OBSERVED + 3).exp(), torch.full((2,), 0.01, dtype=DOUBLE))
    path, level = VP(), torch.tensor([1.0], dtype=DOUBLE)
    found = given.posterior(denoiser(path), path)(x, level)[0, :, 0, 0]
    alpha, sigma = path(level)
    guess = denoiser(path)(x, level)
    inside = torch.linalg.inv(torch.linalg.inv(COVARIANCE) + (alpha / sigma) ** 2 * torch.eye(4, dtype=DOUBLE))
    slope = linear(guess).exp()[0, :, None] * MATRIX
    gain = inside @ slope.T @ torch.linalg.inv(slope @ inside @ slope.T + 0.01 * torch.eye(2, dtype=DOUBLE))
    expected = guess[0, :, 0, 0] + gain @ ((OBSERVED + 3).exp() - linear(guess).exp()[0])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_conjugate_gradients_solve_each_row_and_stop_where_the_operator_is_not_positive():
    matrix = FACTOR @ FACTOR.T + 0.1 * torch.eye(4, dtype=DOUBLE)
    b = normal(3, 4)()
    torch.testing.assert_close(conjugate_gradients(lambda v: v @ matrix, b, 8) @ matrix, b, atol=1e-2, rtol=1e-2)
    assert conjugate_gradients(lambda v: -v, b, 8).eq(0).all()
    b[1] = 0
    assert conjugate_gradients(lambda v: v @ matrix, b, 8)[1].eq(0).all()
