"""The variational bound: DDPM's own formulas, Gaussians whose likelihood is known, shades whose chances add up to 1."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import gaussians
from gaussians import gaussian_denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.likelihood import best_end, bits_per_dim, group_steps
from unfog.diffusion.noise import (
    PATHS,
    VE,
    VP,
    Cosine,
    Flow,
    FlowUniform,
    Linear,
    LogitNormal,
    LogNormal,
    NoiseSource,
    Path,
    Schedule,
    Sigmoid,
)
from unfog.diffusion.target import Eps, V
from unfog.diffusion.variance import (  # each term of the bound is compared with its equation
    _HALF,
    Prediction,
    _discretised_nll,
    _log_variance_bounds,
    deviation,
    step_kl,
    variational_bound,
)
from unfog.errors import RequestError

MEAN, STD = 0.1, 0.2
exact = partial(gaussian_denoiser, MEAN, STD)
normal = partial(gaussians.normal, dtype=torch.float32)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Cosine(steps=50)], ids=str)
def test_bounds_are_beta_tilde_and_beta(schedule: Linear | Cosine) -> None:
    beta = torch.tensor(schedule.betas(), dtype=torch.float64)
    alpha_bar = (1 - beta).cumprod(0)
    tilde = beta[1:] * (1 - alpha_bar[:-1]) / (1 - alpha_bar[1:])
    table = schedule.table()
    lower, upper = _log_variance_bounds(VP(), table[1:], table[:-1])
    torch.testing.assert_close(lower.exp(), tilde, rtol=1e-7, atol=0)
    torch.testing.assert_close(upper.exp(), beta[1:], rtol=1e-7, atol=0)


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
def test_bounds_on_any_path(path: Path) -> None:
    """The variances of q(x_s | x_t, x0) and q(x_t | x_s), from the joint Gaussian of x_s and x_t."""
    now, then = torch.tensor([-3.0, 0.5, 4.0]).double(), torch.tensor([-2.0, 3.0, 4.1]).double()
    (alpha, sigma), (alpha_s, sigma_s) = path(now), path(then)
    ratio = alpha / alpha_s
    upper = sigma**2 - (ratio * sigma_s) ** 2
    lower = 1 / (1 / sigma_s**2 + ratio**2 / upper)
    found = _log_variance_bounds(path, now, then)
    torch.testing.assert_close(found[0].exp(), lower)
    torch.testing.assert_close(found[1].exp(), upper)
    half = deviation(path, -3.0, -2.0, torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64))
    torch.testing.assert_close(half.flatten() ** 2, (lower * upper).sqrt()[:1])


@pytest.mark.parametrize("fraction", [None, 0.0, 0.3, 1.0])
def test_step_kl_is_that_of_ddpms_gaussians(fraction: float | None) -> None:
    schedule = Linear()
    beta = torch.tensor(schedule.betas(), dtype=torch.float64)
    bar = (1 - beta).cumprod(0)
    x0, guess, x_t = torch.randn(3, 1, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (1, 30, 500, 999):
        tilde = beta[t] * (1 - bar[t - 1]) / (1 - bar[t])

        def mean(image: Tensor, t: int = t) -> Tensor:  # DDPM, eq. 7
            of_image = bar[t - 1].sqrt() * beta[t] / (1 - bar[t])
            return of_image * image + (1 - beta[t]).sqrt() * (1 - bar[t - 1]) / (1 - bar[t]) * x_t

        share = 0.0 if fraction is None else fraction
        std = ((1 - share) / 2 * tilde.log() + share / 2 * beta[t].log()).exp()
        expected = kl_divergence(Normal(mean(x0), tilde.sqrt()), Normal(mean(guess), std))
        up = None if fraction is None else torch.full_like(x0, fraction)
        found = step_kl(VP(), x0, Prediction(guess, up), *schedule.table()[[t, t - 1]])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("std", [1e-3, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("mean", [-1.2, -0.3, 0.0013, 0.999])
def test_chances_of_all_shades_add_up_to_one(mean: float, std: float) -> None:
    shades = torch.arange(256) / 127.5 - 1
    nll = _discretised_nll(shades, torch.tensor(mean), torch.tensor(math.log(std)))
    assert nll.isfinite().all()
    assert (-nll).exp().sum().item() == pytest.approx(1, abs=2e-4)
    edges = (torch.arange(255).double() + 0.5) / 127.5 - 1
    below = torch.cat([torch.zeros(1).double(), Normal(mean, std).cdf(edges), torch.ones(1).double()])
    likely = nll < 8
    torch.testing.assert_close((-nll)[likely].double(), below.diff().log()[likely], rtol=0, atol=2e-3)


def test_shades_have_gradients_wherever_the_guess_is() -> None:
    shades = torch.tensor([-1.0, 0.0, 1.0]).repeat(3)
    mean = torch.tensor([-50.0, 0.0, 50.0]).repeat_interleave(3)
    for start in (-9.0, -4.0, 0.0, 5.0):
        log_std = torch.full((9,), start, requires_grad=True)
        _discretised_nll(shades, mean, log_std).sum().backward()
        assert log_std.grad is not None
        assert log_std.grad.isfinite().all(), start


@pytest.mark.parametrize("target", [Eps(), V()])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(steps=40), Sigmoid(steps=40)], ids=str)
def test_the_bound_of_training_is_that_of_the_steps(schedule: Linear, target: Eps) -> None:
    diffusion = Diffusion(VP(), schedule, target, learned_variance=True)
    k = torch.tensor([0, 1, 7, 20, 38, 39])
    logsnr = schedule.table()[k].float()
    x0 = (torch.rand(6, 2, 4, 4, generator=torch.Generator().manual_seed(1)) * 255).round() / 127.5 - 1
    x_t = diffusion.add_noise(x0, normal(6, 2, 4, 4)(), logsnr)
    y = normal(6, 4, 4, 4, seed=2)().requires_grad_()
    bound = variational_bound(diffusion, y, x0, x_t, logsnr)
    guess, up = diffusion.recover(y, x_t, logsnr)[0].double(), (y[:, 2:].double() + 1) / 2
    table = schedule.table()
    for i, t in enumerate(k.tolist()):
        if t:
            expected = step_kl(VP(), x0[i].double(), Prediction(guess[i], up[i]), table[t], table[t - 1])
        else:  # of improved diffusion: the lower variance is that of timestep 1
            low, high = _log_variance_bounds(VP(), table[1], table[0])[0], (1 - table[0].sigmoid()).log()
            at = Normal(guess[i], ((low + up[i] * (high - low)) / 2).exp())
            upper = torch.where(x0[i] > 1 - _HALF, torch.ones(()).double(), at.cdf(x0[i].double() + _HALF))
            lower = torch.where(x0[i] < -1 + _HALF, torch.zeros(()).double(), at.cdf(x0[i].double() - _HALF))
            expected = -(upper - lower).log()
        torch.testing.assert_close(bound[i].double(), expected.mean(), rtol=2e-3, atol=1e-5)
    bound.sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad[:, :2], torch.zeros(6, 2, 4, 4))  # the mean is taken as it is
    assert (y.grad[:, 2:].isfinite() & (y.grad[:, 2:] != 0)).all()


def test_a_wild_guess_leaves_finite_gradients() -> None:
    """Predicted noise means images of any size where there is little signal, and early networks give such."""
    for path, schedule in ((VP(), Cosine()), (VP(), Linear(steps=30)), (VE(), Linear()), (Flow(), Cosine())):
        diffusion = Diffusion(path, schedule, Eps() if schedule.steps > 50 else V(), learned_variance=True)
        logsnr = schedule.table()[[0, 1, schedule.steps - 1]].float()
        x_t = diffusion.add_noise(torch.zeros(3, 1, 2, 2), normal(3, 1, 2, 2)(), logsnr)
        y = (30 * normal(3, 2, 2, 2, seed=1)()).requires_grad_()
        variational_bound(diffusion, y, torch.zeros(3, 1, 2, 2), x_t, logsnr).sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()


@pytest.mark.slow
def test_the_bound_is_least_at_the_true_variance() -> None:
    """Of a Gaussian it is the lower one, and what the unknown image adds."""
    diffusion = Diffusion(VP(), Cosine(steps=20), V(), learned_variance=True)
    for t in (2, 10, 18):
        level, before = diffusion.schedule.table()[[t, t - 1]]
        lower, upper = _log_variance_bounds(VP(), level, before)
        left = 1 / (1 / STD**2 + level.exp())
        true = lower.exp() + (VP()(before)[0] * -torch.expm1(level - before)) ** 2 * left
        logsnr = level.float().repeat(2000)
        x0 = MEAN + STD * normal(2000, 1, 8, 8)()
        x_t = diffusion.add_noise(x0, normal(2000, 1, 8, 8, seed=1)(), logsnr)
        guess = exact(VP(), x_t, logsnr)
        alpha, sigma = VP()(logsnr[:, None, None, None])
        answer = diffusion.network_target(guess, (x_t - alpha * guess) / sigma, logsnr)
        up = (true.log() - lower) / (upper - lower)
        bounds = [
            variational_bound(
                diffusion, torch.cat([answer, torch.full_like(x0, 2 * (float(up) + d) - 1)], 1), x0, x_t, logsnr
            ).mean()
            for d in (-0.02, 0.0, 0.02)
        ]
        assert bounds[1] < bounds[0]
        assert bounds[1] < bounds[2]


def decoder(cleanest: float) -> float:
    """Expected nats of the decoder at the cleanest level, by quadrature over what the guess misses."""
    noise = math.exp(-cleanest / 2)
    miss = torch.linspace(-7, 7, 4001, dtype=torch.float64) * (STD**-2 + noise**-2) ** -0.5
    chance = torch.exp(-((torch.linspace(-7, 7, 4001, dtype=torch.float64)) ** 2) / 2)
    mass = Normal(0.0, noise).cdf(miss + _HALF) - Normal(0.0, noise).cdf(miss - _HALF)
    return float(-(mass.log() * chance).sum() / chance.sum())


EXACT = math.log2(STD * math.sqrt(2 * math.pi * math.e) / (2 * _HALF))  # mean of -log2 of the chance of a shade


@pytest.mark.parametrize(
    ("path", "schedule"),
    [
        (VP(), Linear(steps=0)),
        (VP(), Cosine(steps=0)),
        (VE(), LogNormal()),
        (Flow(), LogitNormal()),
        (Flow(), FlowUniform(2.0)),
    ],
    ids=str,
)
def test_the_integral_is_that_of_a_gaussian(path: Path, schedule: Schedule) -> None:
    diffusion = Diffusion(path, schedule, V())
    x0 = MEAN + STD * normal(256, 1, 16, 16, seed=5)()
    found = bits_per_dim(partial(exact, path), diffusion, x0, 48, normal(256, 1, 16, 16, seed=6), 0.0005)
    noisiest, cleanest = schedule.limits()
    prior = math.exp(noisiest) / 2 * (MEAN**2 + STD**2)
    integral = math.log((STD**-2 + math.exp(cleanest)) / (STD**-2 + math.exp(noisiest))) / 2
    expected = (prior + integral + decoder(cleanest)) / math.log(2)
    assert found.shape == (256,)
    assert found.mean().item() == pytest.approx(expected, abs=0.02)
    assert found.mean() > EXACT - 0.02
    # Where the cleanest level is not finer than a shade, nothing but the prior is lost.
    if schedule.kind == "linear":
        assert found.mean().item() == pytest.approx(EXACT, abs=0.06)


def shades(std: float, seed: int = 5) -> tuple[Tensor, float]:
    """Images of 256 shades from N(0.1, std^2), and the bits that their shades have."""
    x0 = ((0.1 + std * normal(64, 1, 16, 16, seed=seed)() + 1) * 127.5).round().clamp(0, 255) / 127.5 - 1
    edges = torch.linspace(-1 - _HALF, 1 + _HALF, 257, dtype=torch.float64)
    chance = Normal(0.1, std).cdf(edges).diff().clamp(min=1e-300)
    return x0, float(-(chance * chance.log2()).sum() / chance.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("path", "schedule"), [(Flow(), LogitNormal()), (VE(), LogNormal()), (Flow(), FlowUniform())])
def test_the_bound_of_a_known_gaussian_is_its_bits(path: Path, schedule: Schedule) -> None:
    """Half a shade is a share of noise of 0.004: an end below it adds a bit, as the exact denoiser knows no shades."""
    diffusion, denoise = Diffusion(path, schedule, V()), partial(exact, path)
    x0, truth = shades(STD)
    assert truth == pytest.approx(EXACT, abs=0.01)
    found = {
        end: float(bits_per_dim(denoise, diffusion, x0, 96, normal(64, 1, 16, 16, seed=6), end).mean())
        for end in (0.002, 0.005, 0.01)
    }
    assert found[0.01] == pytest.approx(truth, abs=0.02)
    assert found[0.005] == pytest.approx(truth, abs=0.03)
    assert truth + 0.15 < found[0.002]
    end = best_end(denoise, diffusion, shades(STD, 9)[0], normal(64, 1, 16, 16, seed=7))
    assert end >= 0.0099
    chosen = bits_per_dim(denoise, diffusion, x0, 96, normal(64, 1, 16, 16, seed=6), end).mean()
    assert float(chosen) == pytest.approx(truth, abs=0.03)


def test_the_end_follows_what_the_network_knows() -> None:
    """One that knows the shades exactly gains by a low end, and one with errors loses."""
    diffusion, x0 = Diffusion(Flow(), LogitNormal(), V()), shades(STD)[0]
    noise = normal(64, 1, 16, 16, seed=7)
    assert best_end(lambda x, logsnr: x0, diffusion, x0, noise) == pytest.approx(0.002)
    wrong = [best_end(lambda x, logsnr, by=by: x0 + by, diffusion, x0, noise) for by in (0.008, 0.1)]
    assert 0.004 < wrong[0] < wrong[1] == pytest.approx(0.05)
    for end in (0.0, 1.0, math.nan):
        with pytest.raises(RequestError, match="share of noise"):
            bits_per_dim(lambda x, logsnr: x0, diffusion, x0, 8, noise, end)


def test_a_chain_has_one_end() -> None:
    diffusion, x0 = Diffusion(VP(), Cosine(), V()), shades(STD)[0]
    end = best_end(partial(exact, VP()), diffusion, x0, normal(64, 1, 16, 16))
    assert end == pytest.approx(0.00638, rel=1e-2)


@pytest.mark.parametrize(
    ("path", "schedule"), [*((cls(), Linear(steps=60)) for cls in PATHS), (VP(), Sigmoid(steps=60))], ids=str
)
def test_the_chain_is_that_of_a_gaussian(path: Path, schedule: Linear | Sigmoid) -> None:
    diffusion = Diffusion(path, schedule, V())
    x0 = MEAN + STD * normal(64, 1, 16, 16)()
    found = bits_per_dim(partial(exact, path), diffusion, x0, 60, normal(64, 1, 16, 16, seed=1))
    snr = schedule.table().exp()
    kls = ((snr[:-1] - snr[1:]) / 2 / (STD**-2 + snr[1:])).sum()
    expected = snr[-1] / 2 * (MEAN**2 + STD**2) + kls + decoder(schedule.limits()[1])
    assert found.mean().item() == pytest.approx(expected.item() / math.log(2), abs=0.02)
    assert found.mean() > EXACT


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Cosine(steps=100, zero_terminal=True)], ids=str)
@pytest.mark.slow
def test_few_levels_stand_for_all_timesteps_without_bias(schedule: Linear | Cosine) -> None:
    diffusion = Diffusion(VP(), schedule, V())
    x0 = MEAN + STD * normal(512, 1, 8, 8)()
    every, few = (
        bits_per_dim(partial(exact, VP()), diffusion, x0, levels, normal(512, 1, 8, 8, seed=1))
        for levels in (schedule.steps, 16)
    )
    assert few.dtype == x0.dtype
    assert abs(few.mean() - every.mean()) < 3 * few.std() / 512**0.5 + 0.02


def test_groups_of_steps_hold_each_once() -> None:
    for schedule in (Linear(), Cosine(), Cosine(steps=30, zero_terminal=True)):
        for count in (2, 3, 16, 64, 999, 1000, 2000):
            groups = group_steps(schedule.table(), count)
            assert sorted(link for group in groups for link in group) == list(range(schedule.steps - 1))
            assert len(groups) <= max(count, 2)
    assert group_steps(Cosine(steps=30, zero_terminal=True).table(), 5)[-1] == [28]  # pure noise is alone


def test_a_learned_variance_tightens_the_bound_of_few_steps() -> None:
    schedule = Linear(steps=25)
    diffusion = Diffusion(VP(), schedule, V(), learned_variance=True)
    table = schedule.table()

    def with_best(x: Tensor, logsnr: Tensor) -> Tensor:
        k = int((table - logsnr[0]).abs().argmin())
        now, then = table[[max(k, 1), max(k, 1) - 1]]
        lower, upper = _log_variance_bounds(VP(), now, then)
        true = lower.exp() + (VP()(then)[0] * -torch.expm1(now - then)) ** 2 / (STD**-2 + now.exp())
        return torch.cat([exact(VP(), x, logsnr), torch.full_like(x, float((true.log() - lower) / (upper - lower)))], 1)

    x0 = MEAN + STD * normal(32, 1, 16, 16)()
    fixed = bits_per_dim(partial(exact, VP()), diffusion, x0, 25, normal(32, 1, 16, 16, seed=1))
    learned = bits_per_dim(with_best, diffusion, x0, 25, normal(32, 1, 16, 16, seed=1))
    assert EXACT < learned.mean() < fixed.mean() - 0.5


def test_worse_guesses_cost_bits_and_pure_noise_is_no_trouble() -> None:
    diffusion = Diffusion(VP(), Cosine(steps=30, zero_terminal=True), V())
    x0 = MEAN + STD * normal(16, 1, 8, 8)()
    good = bits_per_dim(partial(exact, VP()), diffusion, x0, 1000, normal(16, 1, 8, 8, seed=1))
    bad = bits_per_dim(lambda x, logsnr: exact(VP(), x, logsnr) + 0.1, diffusion, x0, 1000, normal(16, 1, 8, 8, seed=1))
    assert (good.isfinite() & (bad > good)).all()
    with pytest.raises(RequestError, match="at least 2"):
        bits_per_dim(partial(exact, VP()), diffusion, x0, 1, normal(16, 1, 8, 8))


def test_what_is_left_of_the_image_at_the_noisiest_level_costs_bits() -> None:
    """With perfect guesses nothing else depends on the image: SNR / 2 times its mean square."""
    schedule = Linear(steps=60, beta_end=0.003)
    diffusion = Diffusion(VP(), schedule, V())
    bright, dark = torch.full((1, 1, 4, 4), 0.5), torch.zeros(1, 1, 4, 4)
    bits = [
        bits_per_dim(lambda x, logsnr, image=image: image, diffusion, image, 60, normal(1, 1, 4, 4))
        for image in (bright, dark)
    ]
    expected = math.exp(schedule.limits()[0]) / 2 * 0.25 / math.log(2)
    assert expected > 0.02
    assert float(bits[0] - bits[1]) == pytest.approx(expected, rel=1e-4)


def test_an_images_bits_do_not_depend_on_the_batch() -> None:
    x0 = MEAN + STD * normal(4, 1, 8, 8)()
    for diffusion in (Diffusion(Flow(), LogitNormal(), V()), Diffusion(VP(), Linear(steps=24), V())):

        def bits(which: list[int], diffusion: Diffusion = diffusion) -> Tensor:
            noise = NoiseSource(3, which, (1, 8, 8)).draw
            return bits_per_dim(partial(exact, diffusion.path), diffusion, x0[which], 6, noise)

        torch.testing.assert_close(bits([0, 1, 2, 3])[2:], bits([2, 3]), rtol=1e-6, atol=0)
