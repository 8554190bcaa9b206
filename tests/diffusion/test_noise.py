"""Paths and schedules: diffusers' tables, the papers' formulas, round trips, and their ends."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from unfog.diffusion.noise import (
    PATHS,
    SCHEDULES,
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
    Sigmoid,
    karras,
)
from unfog.errors import RequestError

QUANTISED = [
    Linear(),
    Linear(steps=250),
    Linear(zero_terminal=True),
    Cosine(),
    Cosine(steps=4000),
    Cosine(zero_terminal=True),
]
CONTINUOUS = [Linear(steps=0), Cosine(steps=0), LogNormal(), LogitNormal(0.3, 0.8), FlowUniform(), FlowUniform(3.0)]
SIGMOIDS = [(-3.0, 3.0, 1.0), (-3.0, 3.0, 0.9), (0.0, 3.0, 0.3), (0.0, 3.0, 1.1)]  # those of Chen 2023
CONTINUOUS += [Sigmoid(0, *ends) for ends in SIGMOIDS]


def diffusers_twin(schedule: Linear | Cosine) -> DDPMScheduler:
    return DDPMScheduler(
        num_train_timesteps=schedule.steps,
        beta_start=1e-4 * 1000 / schedule.steps,
        beta_end=0.02 * 1000 / schedule.steps,
        beta_schedule="linear" if isinstance(schedule, Linear) else "squaredcos_cap_v2",
        rescale_betas_zero_snr=schedule.zero_terminal,
    )


def quantiles(n: int = 999) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 1) / (n + 1)


@pytest.mark.parametrize("path", [cls() for cls in PATHS])
def test_paths_have_the_logsnr_they_are_given(path: Path) -> None:
    logsnr = torch.linspace(-20, 20, 401, dtype=torch.float64)
    alpha, sigma = path(logsnr)
    torch.testing.assert_close(2 * (alpha.log() - sigma.log()), logsnr)
    constraint = {"vp": alpha.square() + sigma.square(), "ve": alpha, "flow": alpha + sigma}[path.kind]
    torch.testing.assert_close(constraint, torch.ones_like(logsnr))


@pytest.mark.parametrize("path", [VP(), Flow()])
def test_paths_hold_at_both_ends(path: Path) -> None:
    alpha, sigma = path(torch.tensor([-math.inf, math.inf]))
    assert alpha.tolist() == [0, 1]
    assert sigma.tolist() == [1, 0]


@pytest.mark.parametrize("schedule", QUANTISED, ids=str)
def test_tables_are_those_of_diffusers(schedule: Linear | Cosine) -> None:
    alpha_bar = schedule.table().sigmoid()
    twin = diffusers_twin(schedule)
    assert len(alpha_bar) == schedule.steps
    # diffusers accumulates in float32, and its betas near the end of a rescaled table are differences of it.
    torch.testing.assert_close(alpha_bar.float(), twin.alphas_cumprod, rtol=1e-4, atol=1e-6)
    if not schedule.zero_terminal:
        torch.testing.assert_close(alpha_bar, (1 - twin.betas.double()).cumprod(0), rtol=2e-5, atol=0)


@pytest.mark.parametrize("ends", SIGMOIDS)
def test_sigmoid_levels_are_those_of_the_paper(ends: tuple[float, float, float]) -> None:
    """Chen 2023, algorithm 1: gamma(t) is the share of signal; as a table, one minus its ratios, at most 0.999."""
    start, end, tau = ends

    def gamma(t: Tensor) -> Tensor:
        first, last, here = (
            torch.sigmoid(x / tau) for x in (t.new_tensor(start), t.new_tensor(end), start + t * (end - start))
        )
        return (last - here) / (last - first)

    u = quantiles()
    torch.testing.assert_close(Sigmoid(0, *ends)(u).sigmoid(), gamma(u), rtol=1e-9, atol=1e-12)
    shares = gamma(torch.arange(1001, dtype=torch.float64) / 1000)
    betas = (1 - shares[1:] / shares[:-1]).clamp(max=0.999)
    schedule = Sigmoid(1000, *ends)
    torch.testing.assert_close(schedule.table().sigmoid(), (1 - betas).cumprod(0), rtol=1e-9, atol=1e-14)
    k = torch.arange(1000, dtype=torch.float64)
    torch.testing.assert_close(1000 * schedule.quantile(schedule.table()), k, rtol=1e-6, atol=1e-9)
    assert Sigmoid(1000, *ends, zero_terminal=True).table()[-1] == -math.inf
    assert Sigmoid(0, *ends).quantile(torch.tensor([-torch.inf, torch.inf])).tolist() == [1, 0]


@pytest.mark.parametrize("ends", [(3.0, -3.0, 1.0), (-3.0, 3.0, 0.0), (-20.0, 20.0, 0.1), (0.0, 0.001, 1.0)])
def test_sigmoids_that_are_none_are_refused(ends: tuple[float, float, float]) -> None:
    with pytest.raises(RequestError, match="usual"):
        Sigmoid(0, *ends)


def test_zero_terminal_ends_in_pure_noise_and_starts_as_before() -> None:
    for schedule in (Linear(zero_terminal=True), Cosine(zero_terminal=True)):
        table = schedule.table()
        assert table[-1] == -math.inf
        assert table[:-1].isfinite().all()
        assert table[0].item() == pytest.approx(replace(schedule, zero_terminal=False).table()[0].item())


@pytest.mark.parametrize("schedule", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantised_quantile_is_the_timestep(schedule: Linear | Cosine, dtype: torch.dtype) -> None:
    k = torch.arange(schedule.steps, dtype=dtype)
    table = schedule.table().to(dtype)
    torch.testing.assert_close(schedule.steps * schedule.quantile(table), k, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(schedule((k + 0.5) / schedule.steps), table, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", [Linear(), Linear(steps=0), Cosine(), Cosine(steps=0)], ids=str)
def test_pure_noise_is_at_the_end_of_any_schedule(schedule: Linear | Cosine) -> None:
    noisiest = schedule.quantile(torch.tensor([-1000.0, -90.0, -torch.inf]))
    torch.testing.assert_close(
        noisiest, schedule.quantile(torch.tensor([schedule.limits()[0]])).expand(3), rtol=0, atol=2e-3
    )


def test_quantile_between_timesteps_is_linear_and_beyond_them_clamped() -> None:
    schedule = Cosine()
    table = schedule.table()
    between = 0.25 * table[100] + 0.75 * table[101]
    timestep = schedule.steps * schedule.quantile(torch.stack([between, table[0] + 5, table[-1] - 5]))
    torch.testing.assert_close(timestep, torch.tensor([100.75, 0, 999], dtype=torch.float64))


def test_every_timestep_is_drawn_equally_often() -> None:
    u = (torch.arange(10_000) + 0.5) / 10_000
    counts = Linear().quantile(Linear()(u)).mul(1000).round().long().bincount()
    assert counts.tolist() == [10] * 1000


@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_continuous_round_trip(schedule: Schedule) -> None:
    u = quantiles()
    logsnr = schedule(u)
    torch.testing.assert_close(schedule.quantile(logsnr), u, rtol=0, atol=1e-10)
    torch.testing.assert_close(schedule.quantile(schedule(u.float())), u.float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(schedule(u.float()), logsnr.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_snr_slope_is_the_derivative(schedule: Schedule) -> None:
    u = quantiles().requires_grad_()
    snr = schedule(u).exp()
    (slope,) = torch.autograd.grad(snr.sum(), u)
    logsnr = schedule(u).detach()
    torch.testing.assert_close(schedule.snr_slope(logsnr), -slope, rtol=1e-6, atol=0)
    torch.testing.assert_close(schedule.snr_slope(logsnr.float()).double(), -slope, rtol=2e-3, atol=0)


@pytest.mark.parametrize("schedule", QUANTISED, ids=str)
def test_snr_slope_of_timesteps_adds_up_to_the_snr(schedule: Linear | Cosine) -> None:
    table = schedule.table()
    slope = schedule.snr_slope(table)
    snr = table.exp()
    torch.testing.assert_close(slope[1:], schedule.steps * (snr[:-1] - snr[1:]))
    torch.testing.assert_close(slope.mean(), 2 * snr[0] - snr[-1])
    assert schedule.before(table[:3]).tolist() == [math.inf, *table[:2].tolist()]
    assert torch.equal(schedule.before(table.float())[1:], table.float()[:-1])


@pytest.mark.parametrize("schedule", QUANTISED + CONTINUOUS, ids=str)
def test_schedules_go_from_clean_to_noisy(schedule: Schedule) -> None:
    n = schedule.steps or 999
    logsnr = schedule((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    assert (logsnr.diff() < 0).all()
    noisiest, cleanest = schedule.limits()
    assert noisiest < cleanest


@pytest.mark.parametrize("steps", [250, 1000, 4000])
def test_any_number_of_timesteps_ends_in_noise(steps: int) -> None:
    assert Linear(steps).limits()[0] == pytest.approx(Linear(steps=0)(torch.tensor(1.0)).item(), abs=0.3)
    assert Cosine(steps).limits()[0] < -15


@pytest.mark.parametrize("schedule", [Linear(), Cosine(max_beta=0.9999)])
def test_quantised_schedules_tend_to_their_continuous_limit(schedule: Linear | Cosine) -> None:
    # alpha_bar[k] is what is left after k + 1 of T steps.
    table = schedule.table()
    u = (torch.arange(1000, dtype=torch.float64) + 1) / 1000
    gap = (table - replace(schedule, steps=0)(u))[1:-1].abs()
    assert gap.max() < 0.12  # beta against its integral: O(1 / T), most at the ends


def test_formulas_of_the_papers() -> None:
    u = quantiles()
    # VP-SDE (Song et al. 2021): beta from 0.1 to 20.
    alpha_bar = (-(0.1 * u + (20 - 0.1) * u**2 / 2)).exp()
    torch.testing.assert_close(Linear(steps=0)(u), (alpha_bar / (1 - alpha_bar)).log())
    # Nichol & Dhariwal 2021, eq. 17.
    f = ((u + 0.008) / 1.008 * math.pi / 2).cos() ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    torch.testing.assert_close(Cosine(steps=0)(u), (f / (1 - f)).log())
    # Rectified flow: x_t = (1 - t) x0 + t eps with t uniform, then shifted (Esser et al. 2024, eq. 23).
    torch.testing.assert_close(FlowUniform()(u), 2 * ((1 - u) / u).log())
    torch.testing.assert_close(Flow()(FlowUniform(3.0)(u))[1], 3 * u / (1 + 2 * u))
    # EDM and Esser et al.: ln sigma and logit t are normal.
    normal = torch.special.ndtri(u)
    torch.testing.assert_close(VE()(LogNormal()(u))[1].log(), -1.2 + 1.2 * normal)
    t = (0.5 + 0.9 * normal).sigmoid()
    torch.testing.assert_close(Flow()(LogitNormal(0.5, 0.9)(u))[1], t)
    # Eq. 23 for 64x64 against 32x32 pixels, sqrt(m / n) = 2, of logit-normal t: a mean that is larger by ln 2.
    torch.testing.assert_close(Flow()(LogitNormal(0.5 + math.log(2), 0.9)(u))[1], 2 * t / (1 + t))


def test_quantised_levels_are_the_trailing_timesteps_of_diffusers() -> None:
    for steps in (1, 3, 7, 10, 15, 16, 20, 50, 250, 999, 1000):
        twin = DDPMScheduler(timestep_spacing="trailing")
        twin.set_timesteps(steps)
        assert torch.equal(Linear().levels(steps), Linear().table()[twin.timesteps])


@pytest.mark.parametrize("schedule", [Linear(steps=0), Cosine(steps=0), FlowUniform(), FlowUniform(3.0)], ids=str)
def test_continuous_levels_are_evenly_spaced_quantiles(schedule: Schedule) -> None:
    expected = torch.tensor([0.999 * (10 - i) / 10 for i in range(10)], dtype=torch.float64)
    torch.testing.assert_close(schedule.quantile(schedule.levels(10)), expected)


def test_karras_levels_are_those_of_edm() -> None:
    n, rho = 18, 7
    t = [(80 ** (1 / rho) + i / (n - 1) * (0.002 ** (1 / rho) - 80 ** (1 / rho))) ** rho for i in range(n)]
    _, sigma = VE()(LogNormal().levels(n))
    torch.testing.assert_close(sigma, torch.tensor(t, dtype=torch.float64))
    assert karras(1, -4.0, 4.0).tolist() == pytest.approx([-4.0])


@pytest.mark.parametrize("schedule", [*QUANTISED, *CONTINUOUS], ids=str)
@pytest.mark.parametrize("steps", [1, 20, 3000])
def test_levels_go_from_noisy_to_clean(schedule: Schedule, steps: int) -> None:
    steps = min(steps, schedule.steps or steps)
    levels = schedule.levels(steps)
    assert levels.shape == (steps,)
    assert levels.dtype == torch.float64
    assert (levels.diff() > 0).all()
    assert levels[0] < -4.5


def test_tables_made_while_sampling_serve_training() -> None:
    schedule = Linear(steps=123)  # not used elsewhere, so that its table is made here
    with torch.inference_mode():
        schedule(torch.tensor([0.5]))
    x = torch.ones(1, requires_grad=True)
    (x.square() * schedule(torch.tensor([0.5]))).sum().backward()
    assert x.grad is not None


def test_nonsense_is_refused() -> None:
    nonsense = [
        lambda: Linear(steps=1),
        lambda: Cosine(steps=-5),
        lambda: Linear(beta_start=0.02, beta_end=0.01),
        lambda: Linear(beta_end=1.5),
        lambda: Linear(steps=20),
        lambda: Cosine(offset=-0.1),
        lambda: Cosine(max_beta=1.0),
        lambda: Linear(steps=0, zero_terminal=True),
        lambda: LogNormal(std=0.0),
        lambda: LogitNormal(std=-1.0),
        lambda: FlowUniform(shift=0.0),
        lambda: Linear(steps=100).levels(101),
    ]
    for build in nonsense:
        with pytest.raises(RequestError):
            build()


def test_kinds_are_distinct_names() -> None:
    for classes in (PATHS, SCHEDULES):
        assert len({cls.kind for cls in classes}) == len(classes)
