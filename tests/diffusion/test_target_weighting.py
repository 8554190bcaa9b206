"""Targets, weightings and their union in `Diffusion`: closed forms, the exact denoiser, refusals."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gaussians import gaussian_denoiser
from unfog.config.presets import preset
from unfog.diffusion.denoiser import Denoiser, Guided, Within
from unfog.diffusion.diffusion import Diffusion
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
    Path,
    Schedule,
)
from unfog.diffusion.target import TARGETS, X0, EdmF, Eps, FlowVelocity, Target, V, invert
from unfog.diffusion.weighting import (
    P2,
    WEIGHTINGS,
    Edm,
    Elbo,
    InverseSnr,
    MinSnr,
    Plain,
    SigmoidElbo,
    Snr,
    SoftMinSnr,
    Weighting,
)
from unfog.errors import RequestError
from unfog.values.conditions import Conditions

LOGSNR = torch.linspace(-20, 20, 201)
ALL_SCHEDULES = [
    Linear(),
    Linear(steps=0),
    Linear(zero_terminal=True),
    Cosine(),
    Cosine(steps=0),
    Cosine(zero_terminal=True),
    LogNormal(),
    LogitNormal(),
    FlowUniform(),
    FlowUniform(shift=3.0),
]
MEAN, STD = 0.3, 0.4


def at(logsnr: Tensor) -> Tensor:
    return logsnr[:, None, None, None]


def textbook(target: Target, x0: Tensor, eps: Tensor, alpha: Tensor, sigma: Tensor, sd: float) -> Tensor:
    if isinstance(target, EdmF):  # (D - c_skip x) / c_out of EDM's Table 1, on z = x / alpha
        z, s = (alpha * x0 + sigma * eps) / alpha, sigma / alpha
        return (x0 - sd**2 / (s**2 + sd**2) * z) / (s * sd / (s**2 + sd**2).sqrt())
    by_kind = {"eps": eps, "x0": x0, "v": alpha * eps - sigma * x0, "flow": eps - x0}
    return by_kind[target.kind]


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("target", [cls() for cls in TARGETS])
def test_targets_are_the_textbooks_and_invert(path: Path, target: Target) -> None:
    logsnr = torch.linspace(-12, 12, 49, dtype=torch.float64)
    alpha, sigma = path(logsnr)
    x0, eps = torch.randn(2, 49, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = target(alpha, sigma, 0.7)
    y = a * x0 + b * eps
    torch.testing.assert_close(y, textbook(target, x0, eps, alpha, sigma, 0.7), rtol=1e-8, atol=1e-8)
    x0_back, eps_back = invert(y, alpha * x0 + sigma * eps, a, b, alpha, sigma)
    # Where the image or the noise is 1e-3 of x_t or of y, that many digits go.
    torch.testing.assert_close(x0_back, x0, rtol=0, atol=1e-9)
    torch.testing.assert_close(eps_back, eps, rtol=0, atol=1e-9)


def test_edm_target_is_minus_v_on_vp_with_unit_data() -> None:
    alpha, sigma = VP()(LOGSNR.double())
    a, b = EdmF()(alpha, sigma, 1.0)
    torch.testing.assert_close(a, sigma)
    torch.testing.assert_close(b, -alpha)


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("target", [cls() for cls in TARGETS])
def test_an_ideal_network_makes_the_exact_denoiser(path: Path, target: Target) -> None:
    """On Gaussian data the best answer is a E[x0 | x] + b E[eps | x]; from it must follow E[x0 | x]."""
    for schedule in ALL_SCHEDULES:
        try:
            diffusion = Diffusion(path, schedule, target)
        except RequestError:
            continue
        logsnr = schedule((torch.arange(64, dtype=torch.float64) + 0.5) / 64)
        alpha, sigma = path(at(logsnr))
        x_t = alpha * MEAN + (alpha**2 * STD**2 + sigma**2).sqrt() * torch.randn(
            64, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        exact = gaussian_denoiser(MEAN, STD, path, x_t, logsnr)

        def ideal(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
            return diffusion.network_target(exact, (x_t - alpha * exact) / sigma, logsnr)  # noqa: B023

        torch.testing.assert_close(Denoiser(ideal, diffusion)(x_t, logsnr), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", [VP(), Flow()])
@pytest.mark.parametrize("target", [X0(), V(), FlowVelocity(), EdmF()])
def test_pure_noise_is_inverted(path: Path, target: Target) -> None:
    diffusion = Diffusion(path, Linear(zero_terminal=True), target)
    logsnr = torch.tensor([-math.inf])
    x0, eps = torch.tensor([0.25]).view(1, 1, 1, 1), torch.tensor([1.5]).view(1, 1, 1, 1)
    x_t = diffusion.add_noise(x0, eps, logsnr)
    assert torch.equal(x_t, eps)
    back = diffusion.recover(diffusion.network_target(x0, eps, logsnr), x_t, logsnr)
    torch.testing.assert_close(back, (x0, eps))
    assert diffusion.network_input(x_t, logsnr)[1].item() == pytest.approx(999)


def weight(target: Target, weighting: Weighting, path: Path | None = None, sigma_data: float = 0.5) -> Tensor:
    diffusion = Diffusion(path or VP(), Cosine(), target, weighting, sigma_data)
    return diffusion.weight(LOGSNR)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_in_each_space(gamma: float) -> None:
    snr = LOGSNR.double().exp()
    closed = {Eps: snr.clamp(max=gamma) / snr, X0: snr.clamp(max=gamma), V: snr.clamp(max=gamma) / (snr + 1)}
    for target, expected in closed.items():
        torch.testing.assert_close(weight(target(), MinSnr(gamma)), expected.float(), rtol=1e-5, atol=0)


def test_snr_weights_in_each_space() -> None:
    snr = LOGSNR.double().exp()
    one = torch.ones_like(snr)
    for weighting, in_x0 in ((Snr(), snr), (InverseSnr(), one)):
        for target, own in ((Eps(), snr), (X0(), one), (V(), snr + 1)):
            torch.testing.assert_close(weight(target, weighting), (in_x0 / own).float(), rtol=1e-5, atol=0)
    # 1 / SNR on the noise's error, spelt in alpha_bar.
    alpha_bar = LOGSNR.double().sigmoid()
    torch.testing.assert_close(weight(Eps(), InverseSnr()), ((1 - alpha_bar) / alpha_bar).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_edm_weight_is_edms_and_one_on_f(path: Path, sigma_data: float) -> None:
    one = torch.ones_like(LOGSNR)
    torch.testing.assert_close(weight(EdmF(), Edm(), path, sigma_data), one, rtol=1e-5, atol=0)
    s = (-LOGSNR.double() / 2).exp()
    closed = (s**2 + sigma_data**2) / (s * sigma_data) ** 2
    torch.testing.assert_close(weight(X0(), Edm(), path, sigma_data), closed.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 4.0])
def test_soft_min_snr_in_each_space(gamma: float) -> None:
    snr = LOGSNR.double().exp()
    soft = snr * gamma / (snr + gamma)
    for target, own in ((Eps(), snr), (X0(), torch.ones_like(snr)), (V(), snr + 1)):
        torch.testing.assert_close(weight(target, SoftMinSnr(gamma)), (soft / own).float(), rtol=1e-5, atol=0)
    assert (soft < snr.clamp(max=gamma)).all()
    assert (soft >= snr.clamp(max=gamma) / 2).all()
    # On F with sigma_data^2 = 1 / gamma: that of Crowson et al., (s sigma_data)^2 / (s^2 + sigma_data^2)^2.
    s, sd = (-LOGSNR.double() / 2).exp(), gamma**-0.5
    closed = ((s * sd) / (s**2 + sd**2)) ** 2
    torch.testing.assert_close(weight(EdmF(), SoftMinSnr(gamma), VE(), sd), closed.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("k", "gamma"), [(1.0, 1.0), (1.0, 0.5), (3.0, 1.5)])
def test_p2_is_stated_on_the_noise(k: float, gamma: float) -> None:
    snr = LOGSNR.double().exp()
    torch.testing.assert_close(weight(Eps(), P2(k, gamma)), ((k + snr) ** -gamma).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(weight(X0(), P2(k, gamma)), (snr / (k + snr) ** gamma).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(weight(V(), P2(1.0, 0.0)), weight(V(), Snr()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("target", [Eps(), X0(), V(), EdmF(), FlowVelocity()])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(steps=300)])
def test_elbo_weights_are_those_of_ddpms_bound(schedule: Linear, target: Target) -> None:
    """T times the KL of a step (Ho et al. 2020, eq. 12): beta^2 / (2 beta_tilde alpha (1 - alpha_bar)) on the noise."""
    beta = torch.tensor(schedule.betas(), dtype=torch.float64)
    bar = (1 - beta).cumprod(0)
    tilde = beta[1:] * (1 - bar[:-1]) / (1 - bar[1:])
    on_noise = schedule.steps * beta[1:] ** 2 / (2 * tilde * (1 - beta[1:]) * (1 - bar[1:]))
    diffusion = Diffusion(VP(), schedule, target, Elbo())
    noise_space = Diffusion(VP(), schedule, target, Snr())
    logsnr = schedule.table()[1:]
    found = diffusion.weight(logsnr) / noise_space.weight(logsnr)
    torch.testing.assert_close(found, on_noise, rtol=1e-6, atol=0)
    torch.testing.assert_close(diffusion.weight(logsnr.float()).double(), diffusion.weight(logsnr), rtol=2e-3, atol=0)


def test_elbo_of_pure_noise_is_the_snr_that_its_step_gains() -> None:
    schedule = Cosine(steps=50, zero_terminal=True)
    found = Diffusion(VP(), schedule, V(), Elbo()).weight(schedule.table()[-1:])
    torch.testing.assert_close(found, 25 * schedule.table()[-2:-1].exp())


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("target", [cls() for cls in TARGETS])
def test_plain_weight_is_one_and_all_are_finite(path: Path, target: Target) -> None:
    torch.testing.assert_close(weight(target, Plain(), path), torch.ones_like(LOGSNR), rtol=0, atol=0)
    for weighting in WEIGHTINGS:
        values = weight(target, weighting(), path)
        assert values.dtype == torch.float32
        assert (values.isfinite() & (values > 0)).all()


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("weighting", [cls() for cls in WEIGHTINGS if not issubclass(cls, Plain)])
def test_a_weighting_weighs_the_image_alike_for_every_target(path: Path, weighting: Weighting) -> None:
    """Weight times squared output error, for one error in x0, does not depend on what the network predicts."""
    logsnr = torch.linspace(-8, 8, 33, dtype=torch.float64)
    x0, eps, wrong = torch.randn(3, 33, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses = []
    for target in TARGETS:
        diffusion = Diffusion(path, Cosine(), target(), weighting)
        x_t = diffusion.add_noise(x0, eps, logsnr)
        alpha, sigma = path(at(logsnr))
        y = diffusion.network_target(wrong, (x_t - alpha * wrong) / sigma, logsnr)
        error = (y - diffusion.network_target(x0, eps, logsnr)).square().mean((1, 2, 3))
        losses.append(diffusion.weight(logsnr) * error)
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-7, atol=0)


def test_edm_table_1() -> None:
    """c_skip, c_out, c_in and c_noise of EDM are the F target on VE, the scaled input and logsnr conditioning."""
    sigma_data = 0.6
    diffusion = replace(preset("edm").diffusion, sigma_data=sigma_data)
    logsnr = LogNormal()((torch.arange(32, dtype=torch.float64) + 0.5) / 32)
    x, f = torch.randn(2, 32, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shown: list[Tensor] = []

    def network(x_in: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        shown.extend([x_in, c_noise])
        return f

    d = Denoiser(network, diffusion)(x, logsnr)
    sigma = at((-logsnr / 2).exp())
    c_skip = sigma_data**2 / (sigma**2 + sigma_data**2)
    c_out = sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()
    c_in = 1 / (sigma**2 + sigma_data**2).sqrt()
    torch.testing.assert_close(d, c_skip * x + c_out * f)
    torch.testing.assert_close(shown[0], c_in * x)
    torch.testing.assert_close(shown[1], sigma.flatten().log() / 4)


def test_timestep_conditioning_is_the_integer_timestep() -> None:
    k = torch.tensor([0, 1, 499, 998, 999])
    x = torch.zeros(5, 1, 1, 1)
    for schedule in (Linear(), Cosine(), Linear(zero_terminal=True)):
        x_in, c_noise = Diffusion(VP(), schedule, V()).network_input(x, schedule.table()[k].float())
        assert x_in is x
        torch.testing.assert_close(c_noise, k.float(), rtol=1e-6, atol=0)
    _, c_noise = Diffusion(VP(), Cosine(250)).network_input(x, Cosine(250).table()[k // 4].float())
    torch.testing.assert_close(c_noise, (k // 4).float(), rtol=1e-6, atol=0)
    logsnr = Cosine(steps=0)(torch.full((5,), 0.25))
    _, c_noise = Diffusion(VP(), Cosine(steps=0)).network_input(x, logsnr)
    torch.testing.assert_close(c_noise, torch.full((5,), 250.0))


@pytest.mark.slow
def test_product_is_finite_or_refused_with_the_reason() -> None:
    u = torch.tensor([1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
    x0, eps = torch.randn(2, 5, 1, 2, 2, generator=torch.Generator().manual_seed(4))
    parts = itertools.product(PATHS, ALL_SCHEDULES, TARGETS, WEIGHTINGS, ("timestep", "logsnr"), (False, True))
    refused = accepted = 0
    for path, schedule, target, weighting, conditioning, scale_input in parts:

        def build() -> Diffusion:
            return Diffusion(path(), schedule, target(), weighting(), 0.5, conditioning, scale_input)  # noqa: B023

        if getattr(schedule, "zero_terminal", False) and (path is VE or target is Eps or conditioning == "logsnr"):
            with pytest.raises(RequestError, match=r"pure noise.*; use the|pure noise.*; use timestep"):
                build()
            refused += 1
            continue
        diffusion = build()
        logsnr = schedule(u)
        x_t = diffusion.add_noise(x0, eps, logsnr)
        y = diffusion.network_target(x0, eps, logsnr)
        made = [
            x_t,
            y,
            *diffusion.network_input(x_t, logsnr),
            *diffusion.recover(y, x_t, logsnr),
            diffusion.weight(logsnr),
        ]
        assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in made), diffusion
        accepted += 1
    assert refused == 88 * len(WEIGHTINGS)
    assert accepted + refused == 3 * 10 * 5 * len(WEIGHTINGS) * 4


def test_levels_too_noisy_for_float32_are_refused_as_pure_noise() -> None:
    with pytest.raises(RequestError, match="pure noise"):
        Diffusion(VP(), Linear(beta_end=0.5), Eps())
    Diffusion(VP(), Linear(beta_end=0.5), V())


def test_nonsense_is_refused() -> None:
    with pytest.raises(RequestError, match="sigma_data"):
        Diffusion(sigma_data=0.0)
    with pytest.raises(RequestError, match="'sigma': choose timestep or logsnr"):
        Diffusion(conditioning="sigma")  # type: ignore[arg-type]
    for cls in (MinSnr, SoftMinSnr, P2):
        with pytest.raises(RequestError, match="gamma"):
            cls(gamma=-1.0)
    with pytest.raises(RequestError, match=r"learned_variance.*lognormal.*cosine:steps=1000"):
        Diffusion(schedule=LogNormal(), learned_variance=True)


def test_guidance() -> None:
    calls = []

    def network(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        calls.append(len(x))
        return x * 0.1 + conditions.label_or(3).view(-1, 1, 1, 1)

    denoiser = Denoiser(network, Diffusion(target=X0()))
    x, logsnr, told = torch.randn(4, 1, 2, 2), torch.zeros(4), Conditions(torch.tensor([0, 1, 2, 1]))
    with_label, without = denoiser(x, logsnr, told), denoiser(x, logsnr, told.dropped())
    calls.clear()
    for scale in (0.0, 1.0, 4.5):
        guided = Guided(denoiser, scale)(x, logsnr, told)
        torch.testing.assert_close(guided, without + scale * (with_label - without))
    assert calls == [8, 8, 8]


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_guidance_takes_the_variance_of_the_conditional_network(scale: float) -> None:
    def network(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        own = conditions.label_or(3).view(-1, 1, 1, 1).to(x.dtype)
        return torch.cat([0.1 * x + own, torch.tanh(x + own)], 1)

    denoiser = Denoiser(network, Diffusion(target=X0(), learned_variance=True), variance=True)
    x, logsnr, told = torch.randn(4, 2, 2, 2), torch.zeros(4), Conditions(torch.tensor([0, 1, 2, 1]))
    with_label, without = denoiser(x, logsnr, told), denoiser(x, logsnr, told.dropped())
    guided = Guided(denoiser, scale)
    found = guided(x, logsnr, told)
    torch.testing.assert_close(found[:, :2], without[:, :2] + scale * (with_label - without)[:, :2])
    assert torch.equal(found[:, 2:], (with_label if scale else without)[:, 2:])
    assert bool((found[:, 2:] >= 0).all() & (found[:, 2:] <= 1).all())
    # At scale 1 and 0 the guided denoiser is one of the two, with its variance.
    if scale < 2:
        torch.testing.assert_close(found, with_label if scale else without)
    within = Within(guided, denoiser, (0.0, 1.0))(x, logsnr, told)
    assert torch.equal(within, found)


def test_denoiser_is_float32_within_autocast() -> None:
    layer = torch.nn.Conv2d(1, 1, 3, padding=1)

    def network(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        return layer(x)

    x, logsnr = torch.randn(2, 1, 8, 8), torch.zeros(2)
    denoiser = Denoiser(network, Diffusion())
    exact, _ = Diffusion().recover(layer(x), x, logsnr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(denoiser(x, logsnr), exact)
    assert exact.dtype == torch.float32
    half = Denoiser(lambda x, c_noise, conditions: x.bfloat16(), Diffusion())
    assert half(x, logsnr).dtype == torch.float32


def test_kinds_are_distinct_names() -> None:
    for classes in (TARGETS, WEIGHTINGS):
        assert len({cls.kind for cls in classes}) == len(classes)


@pytest.mark.parametrize("schedule", [Cosine(steps=0), LogNormal(), FlowUniform(3.0), Linear(steps=0)], ids=str)
def test_sigmoid_weighting_is_that_of_kingma_and_gao_whatever_the_schedule(schedule: Schedule) -> None:
    """Their eq. 3: the integral over logsnr of sigmoid(bias - logsnr) / 2 times the squared error of the noise."""
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    logsnr = schedule(u)
    inside = (logsnr > -6) & (logsnr < 5)  # a part that all schedules have
    weight = Diffusion(VP(), schedule, Eps(), SigmoidElbo(1.5)).weight(logsnr)
    error = 1 / (1 + logsnr.square())  # any error of the noise
    grid = torch.linspace(-6, 5, 20_001, dtype=torch.float64)
    expected = torch.trapezoid(torch.sigmoid(1.5 - grid) / 2 / (1 + grid.square()), grid)
    assert float((weight * error * inside).mean()) == pytest.approx(float(expected), rel=2e-3)
