"""Samplers: exact Gaussian solutions, orders of convergence, EDM's algorithm, diffusers' schedulers step by step."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

from gaussians import gaussian_denoiser, gaussian_flow, normal
from unfog.diffusion.denoiser import Denoiser
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
    NoiseSource,
    Path,
    Schedule,
    noise_levels,
)
from unfog.diffusion.sampler import Level, Sampler, ddpm
from unfog.diffusion.steps import SamplingStep
from unfog.diffusion.target import Eps, V
from unfog.errors import RequestError
from unfog.values.conditions import NO_CONDITIONS, Conditions

MEAN, STD = 0.2, 0.5
exact_denoiser = partial(gaussian_denoiser, MEAN, STD)
KINDS = ("ddpm", "ddim", "heun", "dpmpp")


def error_before_last_step(kind: str, path: Path, schedule: Schedule, steps: int) -> float:
    """Distance from the exact solution of the ODE, at the last level above the clean one."""
    seen: list[tuple[float, Tensor]] = []
    sampler = Sampler(kind, steps, "logsnr", clip=False)  # type: ignore[arg-type]
    sampler(
        partial(exact_denoiser, path),
        path,
        schedule,
        normal(16, 1, 2, 2),
        lambda step: seen.append((step.logsnr, step.x_t)),
    )
    start, end = (torch.tensor(seen[i][0], dtype=torch.float64) for i in (0, -1))
    exact = gaussian_flow(MEAN, STD, path, seen[0][1], (start, end))
    return (seen[-1][1] - exact).square().mean().sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "order"), [("ddim", 1), ("heun", 2), ("dpmpp", 2)])
@pytest.mark.parametrize(("path", "schedule"), [(VP(), Linear(steps=0)), (VE(), LogNormal()), (Flow(), FlowUniform())])
def test_order_of_convergence(kind: str, order: int, path: Path, schedule: Schedule) -> None:
    coarse, fine = (error_before_last_step(kind, path, schedule, n) for n in (320, 640))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("kind", ["ddim", "heun", "dpmpp"])
def test_few_steps_come_close_from_every_schedule(kind: str) -> None:
    """Twenty steps: the exact map from noise to image is MEAN + STD noise."""
    schedules = [
        Linear(),
        Cosine(),
        Cosine(zero_terminal=True),
        Cosine(steps=0),
        LogNormal(),
        LogitNormal(),
        FlowUniform(),
    ]
    for path, schedule in itertools.product((VP(), Flow()), schedules):
        sampler = Sampler(kind, 20, clip=False)  # type: ignore[arg-type]
        x = sampler(partial(exact_denoiser, path), path, schedule, normal(64, 1, 4, 4))
        error = (x - (MEAN + STD * normal(64, 1, 4, 4)())).square().mean().sqrt()
        assert error < (0.08 if kind == "ddim" else 0.03), (path, schedule)


@pytest.mark.parametrize(("path", "schedule"), [(VP(), Linear()), (VE(), LogNormal()), (Flow(), FlowUniform())])
@pytest.mark.slow
def test_ddpm_draws_from_the_gaussian(path: Path, schedule: Schedule) -> None:
    sampler = Sampler("ddpm", 1000, clip=False)
    x = sampler(partial(exact_denoiser, path), path, schedule, normal(100, 1, 16, 16))
    n = x.numel()
    assert x.mean().item() == pytest.approx(MEAN, abs=4 * STD / math.sqrt(n))
    # The fixed-small variance lacks the data's own at each step: O(1 / steps).
    assert x.std().item() == pytest.approx(STD, abs=4 * STD / math.sqrt(2 * n) + 0.005)
    standard = (x - x.mean()) / x.std()
    assert standard.pow(3).mean().item() == pytest.approx(0, abs=4 * math.sqrt(6 / n))
    assert standard.pow(4).mean().item() == pytest.approx(3, abs=4 * math.sqrt(24 / n))


def test_heun_is_edms_algorithm_1() -> None:
    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.tanh(x / (1 + sigma)) * 0.8

    n = 18
    t = [(80 ** (1 / 7) + i / (n - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(n)] + [0.0]
    x = normal(2, 3, 4, 4)() * t[0]
    for i in range(n):
        d = (x - denoise(x, t[i])) / t[i]
        x_next = x + (t[i + 1] - t[i]) * d
        if t[i + 1] != 0:
            d_prime = (x_next - denoise(x_next, t[i + 1])) / t[i + 1]
            x_next = x + (t[i + 1] - t[i]) * (d + d_prime) / 2
        x = x_next

    def ours(x: Tensor, logsnr: Tensor) -> Tensor:
        return denoise(x, math.exp(-logsnr[0].item() / 2))

    sampled = Sampler("heun", n, clip=False)(ours, VE(), LogNormal(), normal(2, 3, 4, 4))
    torch.testing.assert_close(sampled, x, rtol=0, atol=1e-10)


def fake_network(x: Tensor, c_noise: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
    """Fixed, nonlinear, unlike at every timestep."""
    return 0.8 * torch.sin(1.5 * x) + 0.2 * torch.cos(c_noise / 200).view(-1, 1, 1, 1)


def trajectory(sampler: Sampler, diffusion: Diffusion, draw: Callable[[], Tensor]) -> list[Tensor]:
    """The state before each step, and the result."""
    states: list[Tensor] = []
    result = sampler(
        Denoiser(fake_network, diffusion),
        diffusion.path,
        diffusion.schedule,
        draw,
        lambda step: states.append(step.x_t),
    )
    return [*states, result]


def compare(scheduler, sampler: Sampler, diffusion: Diffusion, timesteps: list[int], **step: object) -> None:
    """Step the diffusers scheduler from the same start with the same noise; every state must agree."""
    states = trajectory(sampler, diffusion, normal(3, 2, 4, 4, seed=7))
    scheduler.set_timesteps(sampler.steps)
    assert [int(t) for t in scheduler.timesteps] == timesteps
    x = states[0]
    if "generator" in step:
        torch.randn(x.shape, generator=step["generator"], dtype=x.dtype)  # the first draw made the start
    for i, t in enumerate(scheduler.timesteps):
        y = fake_network(x, torch.full((len(x),), float(t), dtype=x.dtype))
        x = scheduler.step(y, int(t), x, **step).prev_sample
        scale = max(1.0, x.abs().max().item())  # unclipped guesses from nearly pure noise are huge
        assert (x - states[i + 1]).abs().max().item() / scale < 2e-4, (i, int(t))


def twin(cls, schedule: Linear | Cosine, target: Eps | V, **settings: object):
    scheduler = cls(
        num_train_timesteps=1000,
        beta_schedule="linear" if isinstance(schedule, Linear) else "squaredcos_cap_v2",
        prediction_type="epsilon" if isinstance(target, Eps) else "v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=schedule.zero_terminal,
        **settings,
    )
    # Its own betas, accumulated in double precision: near t = 0 float32's 1 - alpha_bar has four digits left.
    scheduler.alphas_cumprod = (1 - scheduler.betas.double()).cumprod(0)
    return scheduler


def trailing(steps: int) -> list[int]:
    return [round(1000 - 1000 * i / steps) - 1 for i in range(steps)]


CASES = [
    (Linear(), Eps()),
    (Linear(), V()),
    (Cosine(), Eps()),
    (Cosine(), V()),
    (Linear(zero_terminal=True), V()),
    (Cosine(zero_terminal=True), V()),
]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [pytest.param(1000, marks=pytest.mark.exhaustive), 50, 10, 1])
@pytest.mark.parametrize(("schedule", "target"), CASES, ids=str)
def test_ddim_is_that_of_diffusers(schedule: Linear | Cosine, target: Eps | V, steps: int, clip: bool) -> None:
    scheduler = twin(DDIMScheduler, schedule, target, clip_sample=clip)
    sampler = Sampler("ddim", steps, clip=clip)
    # The noise that goes with a clipped image is the one that explains x_t together with it.
    compare(
        scheduler,
        sampler,
        Diffusion(VP(), schedule, target),
        trailing(steps),
        eta=0.0,
        use_clipped_model_output=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "clip"), [(1000, True), *((steps, clip) for steps in (50, 15, 1) for clip in (False, True))]
)
@pytest.mark.parametrize(("schedule", "target"), CASES, ids=str)
def test_ddpm_is_that_of_diffusers(schedule: Linear | Cosine, target: Eps | V, steps: int, clip: bool) -> None:
    scheduler = twin(DDPMScheduler, schedule, target, clip_sample=clip, variance_type="fixed_small")
    sampler = Sampler("ddpm", steps, clip=clip)
    compare(
        scheduler,
        sampler,
        Diffusion(VP(), schedule, target),
        trailing(steps),
        generator=torch.Generator().manual_seed(7),
    )


@pytest.mark.parametrize("steps", [1000, 300, 20])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Cosine(zero_terminal=True)], ids=str)
def test_ddpm_variances_are_the_fixed_small_ones(schedule: Linear | Cosine, steps: int) -> None:
    scheduler = twin(DDPMScheduler, schedule, V(), variance_type="fixed_small")
    scheduler.set_timesteps(steps)
    logsnr = noise_levels(schedule, steps, "schedule")
    levels = [Level(*level) for level in torch.stack([logsnr, *VP()(logsnr)], 1).tolist()]
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for t, now, then in zip(scheduler.timesteps[:-1], levels, levels[1:]):
        deviation = ddpm(zero, zero, now, then, lambda: one)
        # diffusers rescales to zero terminal SNR in float32, whose alpha_bar near 1 is good to 1e-7.
        atol = 3e-7 if schedule.zero_terminal else 0
        torch.testing.assert_close(deviation**2, scheduler._get_variance(t), rtol=2e-4, atol=atol)


@pytest.mark.parametrize("steps", [pytest.param(1000, marks=pytest.mark.exhaustive), 50, 7])
@pytest.mark.parametrize(("schedule", "target"), CASES[:4], ids=str)
def test_ddpm_with_a_learned_variance_is_that_of_diffusers(
    schedule: Linear | Cosine, target: Eps | V, steps: int
) -> None:
    def network(x: Tensor, c_noise: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        return torch.cat([fake_network(x, c_noise), torch.sin(3 * x + c_noise.view(-1, 1, 1, 1) / 100)], 1)

    scheduler = twin(DDPMScheduler, schedule, target, clip_sample=True, variance_type="learned_range")
    diffusion = Diffusion(VP(), schedule, target, learned_variance=True)
    states: list[Tensor] = []
    result = Sampler("ddpm", steps)(
        Denoiser(network, diffusion, variance=True),
        VP(),
        schedule,
        normal(3, 2, 4, 4, seed=7),
        lambda step: states.append(step.x_t),
    )
    states.append(result)
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    x = states[0]
    # Where its last timestep is not 0, diffusers adds noise to the finished image, of a variance cut off at 1e-20.
    for i, t in enumerate(scheduler.timesteps[: -1 if steps < 1000 else None]):
        y = network(x, torch.full((3,), float(t), dtype=x.dtype))
        x = scheduler.step(y, int(t), x, generator=generator).prev_sample
        assert (x - states[i + 1]).abs().max().item() < 2e-4, (i, int(t))
    # Other samplers leave the variance aside.
    for kind in ("ddim", "heun", "dpmpp"):
        plain, learned = (
            Sampler(kind, 5)(  # type: ignore[arg-type]
                Denoiser(net, diffusion), VP(), schedule, normal(3, 2, 4, 4, seed=7)
            )
            for net in (fake_network, network)
        )
        assert torch.equal(plain, learned)


@pytest.mark.parametrize("path", [VP(), Flow()])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_terminal_snr_starts_from_pure_noise_and_finds_the_brightness(kind: str, path: Path) -> None:
    """A Gaussian about 0.8 is drawn with its mean; started with a trace of signal, it would be drawn too grey.

    The first of the trailing steps is the last timestep, where x is noise alone whatever the images are.
    """
    schedule = Cosine(zero_terminal=True)
    seen: list[tuple[float, Tensor]] = []

    denoise, draw = partial(gaussian_denoiser, 0.8, 0.1, path), normal(64, 1, 8, 8)
    sampler = Sampler(kind, 10, clip=False)  # type: ignore[arg-type]
    x = sampler(denoise, path, schedule, draw, lambda step: seen.append((step.logsnr, step.x_t)))
    assert seen[0][0] == -math.inf
    assert torch.equal(seen[0][1], normal(64, 1, 8, 8)())
    assert x.mean().item() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [50, 20, 10, 2, 1])
@pytest.mark.parametrize(("schedule", "target"), CASES[:4], ids=str)
def test_dpmpp_is_that_of_diffusers(schedule: Linear | Cosine, target: Eps | V, steps: int, clip: bool) -> None:
    # Thresholding at 1 is clipping to [-1, 1].
    scheduler = twin(DPMSolverMultistepScheduler, schedule, target, thresholding=clip, sample_max_value=1.0)
    compare(scheduler, Sampler("dpmpp", steps, clip=clip), Diffusion(VP(), schedule, target), trailing(steps))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [cls() for cls in PATHS])
@pytest.mark.parametrize("grid", ["schedule", "karras", "logsnr"])
def test_one_step_is_one_guess_and_all_is_float32(kind: str, path: Path, grid: str) -> None:
    for schedule in (LogNormal(), FlowUniform(2.0), Cosine(steps=0), Linear(), Cosine(zero_terminal=True)):
        if isinstance(path, VE) and schedule.limits()[0] == -math.inf and grid == "schedule":
            continue
        for steps in (1, 7):
            guesses: list[Tensor] = []
            sampler = Sampler(kind, steps, grid)  # type: ignore[arg-type]
            draw = normal(2, 1, 4, 4, dtype=torch.float32)
            x = sampler(
                partial(exact_denoiser, path),
                path,
                schedule,
                draw,
                lambda step, guesses=guesses: guesses.append(step.x0),
            )
            assert x.dtype == torch.float32
            assert x.isfinite().all()
            assert len(guesses) == steps
            assert torch.equal(x, guesses[-1])


def test_observation_and_clipping() -> None:
    seen: list[SamplingStep] = []
    out = Sampler("ddim", 4)(
        lambda x, logsnr: 5 * x,
        VP(),
        Linear(),
        normal(2, 1, 4, 4),
        seen.append,
    )
    assert [i for i, *_ in seen] == [0, 1, 2, 3]
    assert [logsnr for _, logsnr, *_ in seen] == Linear().table()[[999, 749, 499, 249]].tolist()
    _, sigma = VP()(Linear().table()[-1])
    torch.testing.assert_close(seen[0].x_t, sigma * normal(2, 1, 4, 4)())
    torch.testing.assert_close(seen[0].x0, (5 * seen[0].x_t).clamp(-1, 1))
    assert out.abs().max() <= 1


def test_no_gradient_is_kept() -> None:
    scale = torch.ones((), requires_grad=True)
    x = Sampler("heun", 3)(lambda x, logsnr: scale * x, VP(), Linear(), normal(1, 1, 2, 2))
    assert not x.requires_grad


@pytest.mark.parametrize("grid", ["schedule", "karras", "logsnr"])
def test_noise_levels(grid: str) -> None:
    for schedule in (Linear(), Cosine(zero_terminal=True), LogNormal(), FlowUniform()):
        levels = noise_levels(schedule, 12, grid)  # type: ignore[arg-type]
        assert levels.shape == (13,)
        assert levels[-1] == math.inf
        assert (levels.diff() > 0).all()
        if grid != "schedule":
            noisiest, cleanest = schedule.limits()
            assert levels[0].item() == pytest.approx(max(noisiest, -2 * math.log(80)))
            assert levels[-2].item() == pytest.approx(min(cleanest, -2 * math.log(0.002)))


def test_nonsense_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one"):
        Sampler(steps=0)
    with pytest.raises(RequestError, match=r"'euler' is unknown .*ddpm, ddim"):
        Sampler("euler")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="'linear' is unknown"):
        Sampler(grid="linear")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"1001 sampling steps .*1000 levels"):
        noise_levels(Linear(), 1001, "schedule")
    assert len(noise_levels(Linear(), 1001, "karras")) == 1002


def test_noise_of_an_image_is_its_own() -> None:
    together = NoiseSource(3, range(6), (3, 8, 8))
    alone = NoiseSource(3, [4], (3, 8, 8))
    pair = NoiseSource(3, [5, 2], (3, 8, 8))
    for _ in range(3):
        noise = together.draw()
        assert noise.dtype == torch.float32
        assert torch.equal(noise[[4]], alone.draw())
        assert torch.equal(noise[[5, 2]], pair.draw())


def test_noise_is_fresh_standard_and_unlike_for_every_seed_and_image() -> None:
    draws = []
    for seed in (0, 1, 2, 2**31, -1, 10**12):
        source = NoiseSource(seed, range(4), (1, 32, 32))
        draws.extend([*source.draw(), *source.draw()])
    noise = torch.stack(draws).flatten(1)
    assert noise.mean().abs() < 4 / math.sqrt(noise.numel())
    assert noise.var().item() == pytest.approx(1, abs=4 * math.sqrt(2 / noise.numel()))
    correlation = noise @ noise.T / 1024 - torch.diag(noise.square().mean(1))
    assert correlation.abs().max() < 5 / math.sqrt(1024)
    state = torch.get_rng_state()
    NoiseSource(0, range(2), (1, 2, 2)).draw()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_picture_does_not_depend_on_the_batch() -> None:
    diffusion = Diffusion()
    denoiser = Denoiser(fake_network, diffusion)
    for kind in KINDS:
        sampler = Sampler(kind, 8)  # type: ignore[arg-type]
        many = sampler(denoiser, VP(), Cosine(), NoiseSource(1, range(5), (1, 4, 4)).draw)
        one = sampler(denoiser, VP(), Cosine(), NoiseSource(1, [3], (1, 4, 4)).draw)
        torch.testing.assert_close(many[3:4], one)
