"""UniPC, SDE-DPM-Solver++, DPM-Solver++(3M), EDM with churn, adaptive steps: orders, moments, diffusers, textbooks."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, EulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from gaussians import gaussian_denoiser, gaussian_flow, normal
from test_sampler import CASES, MEAN, STD, compare, exact_denoiser, fake_network, trailing, twin
from unfog.config.validate import check_sampler
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import (
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
    noise_levels,
)
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.steps import Level, Visit, churn, ddim, dpmpp3
from unfog.diffusion.target import EdmF, Eps, V
from unfog.errors import RequestError

WHERE = [(VP(), Linear(steps=0)), (VE(), LogNormal()), (Flow(), FlowUniform())]


def mixture_denoiser(path: Path, x: Tensor, logsnr: Tensor) -> Tensor:
    """E[x0 | x_t] where every value of x0 is from N(0.5, 0.1^2) or N(-0.5, 0.1^2), equally often."""
    mean, std = 0.5, 0.1
    alpha, sigma = path(logsnr[:, None, None, None])
    variance = (alpha * std) ** 2 + sigma**2
    upper = torch.sigmoid(2 * alpha * mean * x / variance)
    one, other = (gaussian_denoiser(at, std, path, x, logsnr) for at in (mean, -mean))
    return upper * one + (1 - upper) * other


def before_last_step(denoise: Callable, path: Path, schedule: Schedule, sampler: Sampler) -> Tensor:
    """x at the last level above the clean one, from noise of seed 0."""
    states: list[Tensor] = []
    sampler(partial(denoise, path), path, schedule, normal(64, 1, 2, 2), lambda step: states.append(step.x_t))
    return states[-1]


def exact_map(path: Path, schedule: Schedule, steps: int) -> Tensor:
    """Where the Gaussian's ODE leads from that noise."""
    levels = noise_levels(schedule, steps, "logsnr")
    noise = path(levels[0])[1] * normal(64, 1, 2, 2)()
    return gaussian_flow(MEAN, STD, path, noise, (levels[0], levels[-2]))


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize(("path", "schedule"), WHERE)
def test_unipc_is_of_third_order(path: Path, schedule: Schedule) -> None:
    """UniPC-p is of order p + 1, as its corrector knows one guess more."""
    errors = []
    for steps in (80, 160):
        sampler = Sampler("unipc", steps, "logsnr", clip=False)
        errors.append(rms(before_last_step(exact_denoiser, path, schedule, sampler) - exact_map(path, schedule, steps)))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(3, abs=0.1)


def test_the_third_order_step_integrates_a_parabola_exactly() -> None:
    """sigma' / sigma x + alpha' times the integral of exp(l - h) x0(l), of a guess that is quadratic in lambda."""
    logsnr = torch.tensor([-3.0, -2.2, -1.0, 0.6], dtype=torch.float64)
    levels = [Level(*level) for level in torch.stack([logsnr, *VP()(logsnr)], 1).tolist()]
    now, then = levels[2:]

    def guess(away: Tensor) -> Tensor:
        return 0.3 - 0.8 * away + 0.5 * away**2

    away = (logsnr - now.logsnr) / 2
    before = [Visit(level, torch.zeros(()), guess(away[i])) for i, level in enumerate(levels[:2])]
    x, h = torch.tensor(0.4, dtype=torch.float64), float(away[3])
    ahead = torch.linspace(0, h, 20_001, dtype=torch.float64)
    integral = torch.trapezoid((ahead - h).exp() * guess(ahead), ahead)
    expected = then.sigma / now.sigma * x + then.alpha * integral
    torch.testing.assert_close(dpmpp3(x, guess(away[2]), now, then, before), expected, rtol=1e-8, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "order", "expected"), [("dpmpp", 2, 2), ("dpmpp", 3, 3), ("unipc", 2, 3)])
def test_orders_on_a_mixture(kind: str, order: int, expected: int) -> None:
    """No closed form here, and none of a Gaussian's symmetries: against many steps of another sampler."""
    path, schedule = Flow(), FlowUniform()
    truth = before_last_step(mixture_denoiser, path, schedule, Sampler("unipc", 3000, "logsnr", clip=False, order=3))
    errors = [
        rms(
            before_last_step(mixture_denoiser, path, schedule, Sampler(kind, n, "logsnr", clip=False, order=order))
            - truth
        )
        for n in (320, 640)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(expected, abs=0.12)


@pytest.mark.slow
def test_unipc_of_order_three_is_better_still() -> None:
    """Its first steps, of lower order, keep it from being of order 4 in the limit; before that it shows."""
    path, schedule = Flow(), FlowUniform()
    truth = before_last_step(mixture_denoiser, path, schedule, Sampler("unipc", 3000, "logsnr", clip=False, order=3))
    coarse, fine = (
        rms(
            before_last_step(mixture_denoiser, path, schedule, Sampler("unipc", n, "logsnr", clip=False, order=3))
            - truth
        )
        for n in (80, 160)
    )
    assert math.log2(coarse / fine) > 3.7


class PreciseUniPC(UniPCMultistepScheduler):
    """Its sigmas in double precision: in float32 the small differences that order 3 is made of have few digits left."""

    def set_timesteps(self, *args: object, **kwargs: object) -> None:
        super().set_timesteps(*args, **kwargs)
        alpha_bar = self.alphas_cumprod[self.timesteps]
        self.sigmas = torch.cat([((1 - alpha_bar) / alpha_bar).sqrt(), alpha_bar.new_zeros(1)])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("steps", [50, 20, 10, 3, 2, 1])
@pytest.mark.parametrize(("schedule", "target"), CASES[:4], ids=str)
def test_unipc_is_that_of_diffusers(
    schedule: Linear | Cosine, target: Eps | V, steps: int, order: int, clip: bool
) -> None:
    scheduler = twin(PreciseUniPC, schedule, target, thresholding=clip, sample_max_value=1.0, solver_order=order)
    sampler = Sampler("unipc", steps, clip=clip, order=order)  # type: ignore[arg-type]
    compare(scheduler, sampler, Diffusion(VP(), schedule, target), trailing(steps))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [50, 20, 10, 2, 1])
@pytest.mark.parametrize(("schedule", "target"), CASES[:4], ids=str)
def test_the_sde_solver_is_that_of_diffusers(
    schedule: Linear | Cosine, target: Eps | V, steps: int, clip: bool
) -> None:
    scheduler = twin(
        DPMSolverMultistepScheduler,
        schedule,
        target,
        thresholding=clip,
        sample_max_value=1.0,
        algorithm_type="sde-dpmsolver++",
    )
    # It draws in float32: from noise of its own it would see other numbers.
    draws = normal(3, 2, 4, 4, seed=7)
    draws()

    def step(y: Tensor, t: int, x: Tensor) -> object:
        return original(y, t, x, variance_noise=draws())

    original, scheduler.step = scheduler.step, step
    compare(scheduler, Sampler("dpmpp-sde", steps, clip=clip), Diffusion(VP(), schedule, target), trailing(steps))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "schedule"), WHERE)
@pytest.mark.parametrize(
    "sampler",
    [
        Sampler("dpmpp-sde", 100, "logsnr", clip=False),
        Sampler("edm", 60, "karras", clip=False, churn=20.0, churn_noise=1.0),
    ],
    ids=lambda sampler: sampler.kind,
)
def test_random_samplers_draw_from_the_gaussian(sampler: Sampler, path: Path, schedule: Schedule) -> None:
    x = sampler(partial(exact_denoiser, path), path, schedule, normal(100, 1, 16, 16))
    n = x.numel()
    assert x.mean().item() == pytest.approx(MEAN, abs=4 * STD / math.sqrt(n))
    assert x.std().item() == pytest.approx(STD, abs=4 * STD / math.sqrt(2 * n) + 0.003)
    standard = (x - x.mean()) / x.std()
    assert standard.pow(3).mean().item() == pytest.approx(0, abs=4 * math.sqrt(6 / n))
    assert standard.pow(4).mean().item() == pytest.approx(3, abs=4 * math.sqrt(24 / n))


def test_the_sde_solver_is_of_a_higher_order_than_ddpm() -> None:
    """In the spread of what it draws, with one fiftieth of the steps that ddpm is given in its own test."""
    spread = []
    for kind in ("ddpm", "dpmpp-sde"):
        sampler = Sampler(kind, 20, "logsnr", clip=False)  # type: ignore[arg-type]
        x = sampler(partial(exact_denoiser, Flow()), Flow(), FlowUniform(), normal(200, 1, 16, 16))
        spread.append(abs(x.std().item() - STD))
    assert spread[1] < spread[0] / 5


def test_edm_is_edms_algorithm_2() -> None:
    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.tanh(x / (1 + sigma)) * 0.8

    n, s_churn, s_min, s_max, s_noise = 18, 5.0, 0.05, 50.0, 1.003
    t = [(80 ** (1 / 7) + i / (n - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(n)] + [0.0]
    draw = normal(2, 3, 4, 4)
    x, churned = draw() * t[0], 0
    for i in range(n):
        gamma = min(s_churn / n, math.sqrt(2) - 1) if s_min <= t[i] <= s_max else 0.0
        t_hat = t[i] * (1 + gamma)
        if gamma > 0:
            x, churned = x + math.sqrt(t_hat**2 - t[i] ** 2) * s_noise * draw(), churned + 1
        d = (x - denoise(x, t_hat)) / t_hat
        x_next = x + (t[i + 1] - t_hat) * d
        if t[i + 1] != 0:
            d_prime = (x_next - denoise(x_next, t[i + 1])) / t[i + 1]
            x_next = x + (t[i + 1] - t_hat) * (d + d_prime) / 2
        x = x_next

    def ours(x: Tensor, logsnr: Tensor) -> Tensor:
        return denoise(x, math.exp(-logsnr[0].item() / 2))

    sampler = Sampler("edm", n, clip=False, churn=s_churn, churn_from=s_min, churn_to=s_max, churn_noise=s_noise)
    sampled = sampler(ours, VE(), LogNormal(), normal(2, 3, 4, 4))
    assert 5 < churned < n
    torch.testing.assert_close(sampled, x, rtol=0, atol=1e-10)


def test_churn_is_that_of_diffusers() -> None:
    scheduler = EulerDiscreteScheduler(prediction_type="sample")
    scheduler.set_timesteps(12)
    x = normal(2, 1, 4, 4, dtype=torch.float32)() * scheduler.sigmas[0]
    for i, t in enumerate(scheduler.timesteps):
        sigma, after = (float(s) for s in scheduler.sigmas[i : i + 2])
        scheduler.scale_model_input(x, t)
        gamma = min(3.0 / 12, math.sqrt(2) - 1)
        now, back, then = (
            Level(-2 * math.log(s) if s else math.inf, 1.0, s) for s in (sigma, sigma * (1 + gamma), after)
        )
        noisier = churn(x, now, back, 1.007, normal(2, 1, 4, 4, seed=i, dtype=torch.float32))
        x0 = 0.8 * torch.sin(x)
        ours = ddim(noisier, x0, back, then)
        seeded = torch.Generator().manual_seed(i)
        x = scheduler.step(x0, t, x, s_churn=3.0, s_noise=1.007, generator=seeded).prev_sample
        torch.testing.assert_close(ours, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [VP(), VE(), Flow()])
def test_without_churn_edm_is_heun(path: Path) -> None:
    denoise = partial(exact_denoiser, path)
    plain, churned = (
        Sampler(kind, 9, clip=False, churn=0.0)(denoise, path, LogNormal(), normal(3, 1, 4, 4))  # type: ignore[arg-type]
        for kind in ("heun", "edm")
    )
    assert torch.equal(plain, churned)


def test_churn_leads_no_further_than_where_sampling_starts() -> None:
    seen: list[float] = []
    sampler = Sampler("edm", 5, "logsnr", churn=1e6, churn_from=0.0, churn_to=1e6)
    sampler(
        partial(exact_denoiser, VE()),
        VE(),
        LogNormal(),
        normal(1, 1, 2, 2),
        lambda step: seen.append(step.logsnr),
    )
    levels = noise_levels(LogNormal(), 5, "logsnr").tolist()
    assert seen[0] == levels[0]
    assert [before - after for before, after in zip(levels[1:], seen[1:])] == pytest.approx([math.log(2)] * 4)


def asked(sampler: Sampler, denoise: Callable, path: Path, schedule: Schedule) -> tuple[int, Tensor]:
    """How often the network is asked, and the pictures from noise of seed 0."""
    calls = 0

    def counting(x: Tensor, logsnr: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return denoise(path, x, logsnr)

    x = sampler(counting, path, schedule, normal(64, 1, 4, 4))
    return calls, x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "schedule"), [(VP(), Cosine(zero_terminal=True)), (VE(), LogNormal()), (Flow(), FlowUniform())]
)
def test_the_error_of_adaptive_follows_its_tolerance(path: Path, schedule: Schedule) -> None:
    """The exact map from noise to image is MEAN + STD noise. Second order: calls go with its root."""
    errors, calls = [], []
    for tolerance in (0.02, 0.005, 0.00125):
        count, x = asked(Sampler("adaptive", clip=False, tolerance=tolerance), exact_denoiser, path, schedule)
        errors.append(rms(x - (MEAN + STD * normal(64, 1, 4, 4)())))
        calls.append(count)
    assert errors[0] < 0.02
    assert errors[2] < 0.003
    assert calls[0] < calls[1] < calls[2] < 60


def test_adaptive_takes_small_steps_where_it_matters() -> None:
    """The mixture's modes part at s = sigma / alpha near 0.5; far from it x0 hardly changes."""
    seen: list[float] = []
    Sampler("adaptive", clip=False, tolerance=0.01)(
        partial(mixture_denoiser, VE()),
        VE(),
        LogNormal(),
        normal(8, 1, 4, 4),
        lambda step: seen.append(step.logsnr),
    )
    steps = {(a + b) / 2: b - a for a, b in pairwise(seen)}
    at_noise, parting = (max(v for k, v in steps.items() if abs(k - at) < 1.5) for at in (-6.0, 1.4))
    assert parting < at_noise / 2


@pytest.mark.slow
def test_adaptive_beats_even_steps_at_the_same_cost() -> None:
    """On a distribution whose x0 changes all at once."""
    truth = Sampler("unipc", 2000, "logsnr", clip=False)(
        partial(mixture_denoiser, Flow()), Flow(), FlowUniform(), normal(64, 1, 4, 4)
    )
    calls, x = asked(Sampler("adaptive", clip=False), mixture_denoiser, Flow(), FlowUniform())
    even, karras = (
        asked(Sampler("dpmpp", calls, grid, clip=False), mixture_denoiser, Flow(), FlowUniform())[1]  # type: ignore[arg-type]
        for grid in ("schedule", "karras")
    )
    assert calls <= 20
    assert rms(x - truth) < min(rms(even - truth), rms(karras - truth))


@pytest.mark.slow
def test_an_adaptive_picture_does_not_depend_on_its_batch() -> None:
    diffusion = Diffusion()
    denoiser = Denoiser(fake_network, diffusion)
    sampler = Sampler("adaptive", 8)
    ends: list[int] = []
    many = sampler(denoiser, VP(), Cosine(), NoiseSource(1, range(5), (1, 4, 4)).draw)
    for i in range(5):
        calls = 0

        def counted(x: Tensor, logsnr: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return denoiser(x, logsnr)

        one = sampler(counted, VP(), Cosine(), NoiseSource(1, [i], (1, 4, 4)).draw)
        ends.append(calls)
        torch.testing.assert_close(many[i : i + 1], one)
    assert len(set(ends)) > 1  # otherwise it would not have been tried


@pytest.mark.slow
def test_adaptive_ends_with_a_network_that_answers_no_numbers() -> None:
    x = Sampler("adaptive", clip=False)(
        lambda x, logsnr: torch.full_like(x, math.nan), Flow(), FlowUniform(), normal(2, 1, 2, 2)
    )
    assert x.isnan().all()


def test_tuned_levels_are_visited() -> None:
    sampler = Sampler("dpmpp", 4, "tuned", tuned=(1.0, 0.8, 0.5, 0.1))
    expected = [-math.inf, 2 * math.log(0.25), 0.0, 2 * math.log(9), math.inf]
    assert sampler.visits(Cosine()).tolist() == pytest.approx(expected)
    # They are for four steps.
    other = Sampler("dpmpp", 5, "tuned", tuned=(1.0, 0.8, 0.5, 0.1))
    assert torch.equal(other.visits(Cosine()), noise_levels(Cosine(), 5, "schedule"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": 4}, "order = 4 of the sampler must be 2 or 3"),
        ({"tuned": (0.5, 0.6)}, "tuned levels 0.5 0.6 of the sampler must fall"),
        ({"tuned": (1.5, 0.6)}, "must fall, from 1 at most"),
        ({"tuned": (0.5, 0.0)}, "to above 0"),
        ({"grid": "tuned"}, "`unfog tune RUN` does it for a run"),
        ({"tolerance": 0.0}, "tolerance = 0.0"),
        ({"churn": -1.0}, "need churn >= 0"),
        ({"churn_from": 2.0, "churn_to": 1.0}, "from <= to"),
        ({"churn_noise": math.nan}, "noise nan"),
    ],
)
def test_nonsense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampler(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddim", "heun", "dpmpp", "unipc", "adaptive"])
def test_a_walk_in_stretches_ends_where_the_whole_one_does(kind: str) -> None:
    sampler = Sampler(kind, 400, clip=False, tolerance=1e-4)  # type: ignore[arg-type]
    parts = (partial(exact_denoiser, Flow()), Flow(), FlowUniform(), normal(8, 1, 4, 4))
    whole = sampler(*parts)
    x = None
    for stretch in (slice(0, 101), slice(100, 301), slice(300, None)):
        x = sampler(*parts[:3], normal(8, 1, 4, 4), start=x, stretch=stretch)
    assert (whole - (MEAN + STD * normal(8, 1, 4, 4)())).abs().max() < 0.02
    torch.testing.assert_close(x, whole, rtol=0, atol=1e-3 if kind != "ddim" else 1e-12)


def test_the_adaptive_sampler_needs_no_grid_of_the_schedule():
    schedule = Cosine(steps=4)
    check_sampler(Sampler("adaptive", steps=20), Diffusion(schedule=schedule))
    assert len(Sampler("adaptive", steps=20).levels(VP(), schedule)) == 21
    with pytest.raises(RequestError, match="at most 4"):
        check_sampler(Sampler("dpmpp", steps=20), Diffusion(schedule=schedule))


def kept_variance(sampler: Sampler, std: float) -> float:
    """Share of the variance of Gaussian detail of this deviation that sampling keeps with the exact denoiser."""

    def exact(x: Tensor, logsnr: Tensor) -> Tensor:
        return gaussian_denoiser(0.0, std, Flow(), x, logsnr.double())

    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    return float((sampler(exact, Flow(), LogitNormal(), lambda: one) / std).square())


def test_a_low_last_level_keeps_fine_detail():
    """Detail that is weaker than the last level is lost; the figures of docs/decisions/0019-sampling-grid.md."""
    usual = Sampler(steps=20, clip=False)
    for std, share in ((0.25, 1.02), (0.08, 0.68), (0.02, 0.12)):
        assert kept_variance(usual, std) == pytest.approx(share, abs=0.02)
        assert kept_variance(replace(usual, grid="logsnr"), std) == pytest.approx(1.03, abs=0.02)
    assert kept_variance(replace(usual, last=0.005), 0.02) > 0.5
    assert kept_variance(replace(usual, grid="logsnr", last=0.1), 0.02) < 0.1
    adaptive = [kept_variance(replace(usual, kind="adaptive", last=last), 0.02) for last in (0.005, 0.02, 0.2)]
    assert min(adaptive[:2]) > 0.1 > 0.02 > adaptive[2]


def test_heun_needs_steps_on_the_grid_of_edm():
    """The figures of docs/sampling.md, which say why few steps are refused: of the truth 0.5."""
    found = {n: 0.5 * kept_variance(Sampler("heun", n, "karras", clip=False), 0.5) ** 0.5 for n in (2, 3, 4, 6, 18)}
    assert found == pytest.approx({2: 40.0, 3: 2.05, 4: 2.18, 6: 0.853, 18: 0.528}, rel=0.005)


@pytest.mark.parametrize("grid", ["schedule", "karras", "logsnr"])
@pytest.mark.parametrize("schedule", [LogitNormal(), Cosine(steps=1000), LogNormal()])
def test_the_last_level_of_each_grid_can_be_chosen(grid, schedule):
    sampler = Sampler(steps=12, grid=grid)
    levels, chosen = (replace(sampler, last=last).visits(schedule) for last in (0.0, 0.01))
    assert chosen[0] == pytest.approx(float(levels[0]), rel=1e-9)
    assert float((-chosen[-2] / 2).sigmoid()) == pytest.approx(0.01)
    assert (chosen.diff() > 0).all()
    if grid == "schedule":  # in proportion: evenly spaced shares of noise stay so
        share, moved = ((-x[:-1] / 2).sigmoid() for x in (levels, chosen))
        torch.testing.assert_close(
            (moved - moved[0]) / (moved[-1] - moved[0]), (share - share[0]) / (share[-1] - share[0])
        )
    assert replace(sampler, steps=1, last=0.01).visits(schedule)[0] == pytest.approx(float(levels[0]))


@pytest.mark.parametrize("grid", ["schedule", "karras", "logsnr"])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Sigmoid(), LogitNormal(), FlowUniform(shift=3), LogNormal()])
def test_the_last_level_is_not_below_the_training_schedule(grid, schedule):
    chosen = Sampler(steps=12, grid=grid, last=0.0001).visits(schedule)
    assert float(chosen[-2]) == pytest.approx(schedule.limits()[1], rel=1e-9)
    assert (chosen.diff() > 0).all()


@pytest.mark.parametrize(("last", "wanted"), [(0.05, 0.05), (0.001, 0.0063844), (0.0, 0.0063844)])
def test_adaptive_ends_at_the_last_level(last, wanted):
    seen = []
    Sampler("adaptive", last=last)(
        lambda x, logsnr: 0.5 * x, VP(), Cosine(), lambda: torch.ones(1, 1, 2, 2), lambda step: seen.append(step.logsnr)
    )
    assert 1 / (1 + math.exp(seen[-1] / 2)) == pytest.approx(wanted, rel=1e-4)


def test_a_last_level_that_is_mostly_noise_is_refused():
    for last in (-0.1, 0.6, math.nan):
        with pytest.raises(RequestError, match=r"from 0 to 0\.5"):
            Sampler(last=last)


def test_levels_that_begin_in_pure_noise_are_refused_where_nothing_is_defined_there():
    levels = Sampler(steps=2, grid="tuned", tuned=(1.0, 0.5))
    edm = Diffusion(VE(), LogNormal(), EdmF(), conditioning="logsnr", scale_input=True)
    for diffusion, first in ((edm, "0.988"), (Diffusion(target=Eps()), "0.999")):
        with pytest.raises(RequestError, match=f"levels = 1 … begin in pure noise, where .*; begin at {first}"):
            check_sampler(levels, diffusion)
        check_sampler(replace(levels, tuned=(float(first), 0.5)), diffusion)
    check_sampler(levels, Diffusion())


@pytest.mark.parametrize("kind", ["heun", "edm"])
def test_heun_in_so_few_steps_that_it_explodes_is_refused(kind):
    for steps, grid, diffusion in (
        (2, "karras", Diffusion(schedule=LogitNormal())),
        (3, "logsnr", Diffusion(schedule=LogitNormal())),
        (3, "schedule", Diffusion(schedule=LogNormal())),
    ):
        with pytest.raises(RequestError, match=r"explodes.*8 steps or more"):
            check_sampler(Sampler(kind, steps, grid), diffusion)
        check_sampler(Sampler(kind, 4, grid), diffusion)
        check_sampler(Sampler("dpmpp", steps, grid), diffusion)
    # Of evenly spaced t, where it keeps to a Gaussian's deviation.
    check_sampler(Sampler(kind, 2), Diffusion(schedule=LogitNormal()))
    assert kept_variance(Sampler("heun", 2, "karras", clip=False), 0.5) > 6000
    assert 0.1 < kept_variance(Sampler("heun", 2, clip=False), 0.5) < 1
