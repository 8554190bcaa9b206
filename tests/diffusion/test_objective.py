"""The objective: DDPM's loss written by hand, stratified levels, label dropout, determinism."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, VP, Cosine, Flow, LogitNormal, LogNormal
from unfog.diffusion.objective import Objective, golden_step, stratified
from unfog.diffusion.target import X0, EdmF, Eps, FlowVelocity, V
from unfog.diffusion.variance import variational_bound
from unfog.diffusion.weighting import Edm, InverseSnr, MinSnr, Plain
from unfog.errors import RequestError
from unfog.values.conditions import NO_CONDITIONS, Conditions

DDPM = Diffusion(VP(), Cosine(), Eps(), Plain())


def network(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
    """Smooth, nonlinear, and unlike at every timestep."""
    return torch.sin(2 * x) * 0.7 + torch.cos(c_noise / 300).view(-1, 1, 1, 1)


def images(n: int) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_it_is_the_textbook_ddpm_loss() -> None:
    x0 = images(32)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    u = (torch.arange(32) + 0.5) / 32
    t = (u * 1000).long()
    x_t = DDPMScheduler(beta_schedule="squaredcos_cap_v2").add_noise(x0, noise, t)
    expected = (network(x_t, t.float(), None) - noise).square().mean((1, 2, 3))
    loss = Objective(DDPM)(network, x0, u=u, noise=noise)
    torch.testing.assert_close(loss.per_image, expected, rtol=2e-4, atol=1e-5)
    assert torch.equal(loss.u, u)


def test_it_is_edms_loss() -> None:
    sigma_data = 0.5
    x0 = images(16)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    u = (torch.arange(16) + 0.5) / 16
    diffusion = Diffusion(VE(), LogNormal(), EdmF(), Edm(), sigma_data, "logsnr", scale_input=True)
    sigma = (-1.2 + 1.2 * torch.special.ndtri(u)).exp().view(-1, 1, 1, 1)
    x = x0 + sigma * noise
    f = network(x / (sigma**2 + sigma_data**2).sqrt(), sigma.flatten().log() / 4, None)
    d = sigma_data**2 / (sigma**2 + sigma_data**2) * x + sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt() * f
    expected = ((sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2 * (d - x0) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(
        Objective(diffusion)(network, x0, u=u, noise=noise).per_image, expected, rtol=1e-3, atol=1e-4
    )


def test_a_learned_variance_adds_a_thousandth_of_the_bound_in_bits() -> None:
    """L_simple + 0.001 L_vlb, the sum over all timesteps (Nichol and Dhariwal 2021, eq. 16); a mean is 1/T."""
    steps = 50
    diffusion = Diffusion(VP(), Cosine(steps=steps), Eps(), Plain(), learned_variance=True)

    def both(x: Tensor, c_noise: Tensor, label: Tensor | None) -> Tensor:
        return torch.cat([network(x, c_noise, label), torch.sin(3 * x)], 1)

    x0, u = images(steps), (torch.arange(steps) + 0.5) / steps
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    loss = Objective(diffusion)(both, x0, u=u, noise=noise)
    x_t = diffusion.add_noise(x0, noise, diffusion.schedule.table().float())
    simple = (network(x_t, torch.arange(steps).float(), None) - noise).square().mean()
    torch.testing.assert_close(loss.measured.mean(), simple, rtol=1e-3, atol=0)
    y = both(x_t, torch.arange(steps).float(), None)
    bits = variational_bound(diffusion, y, x0, x_t, diffusion.schedule.table().float()).sum() / math.log(2)
    torch.testing.assert_close(loss.per_image.mean() - loss.measured.mean(), 0.001 * bits, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "diffusion",
    [
        DDPM,
        Diffusion(VP(), Cosine(), V(), MinSnr()),
        Diffusion(VE(), LogNormal(), EdmF(), Edm(), 0.5, "logsnr", scale_input=True),
        Diffusion(Flow(), LogitNormal(), FlowVelocity(), InverseSnr()),
        Diffusion(Flow(), LogitNormal(), X0(), Plain()),
    ],
    ids=lambda d: f"{d.path.kind}-{d.target.kind}-{d.weighting.kind}",
)
def test_reference_is_what_answering_0_is_expected_to_lose(diffusion: Diffusion) -> None:
    def nothing(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        return torch.zeros_like(x)

    n = 64
    u = (torch.arange(n) + 0.5) / n
    noise = torch.randn(n, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    extreme = torch.randint(0, 2, noise.shape, generator=torch.Generator().manual_seed(2)) * 2.0 - 1
    loss = Objective(diffusion)(nothing, extreme, u=u, noise=noise)
    torch.testing.assert_close(loss.per_image, loss.null_loss, rtol=0.1, atol=0)
    flat = Objective(diffusion)(nothing, 0.3 * extreme, u=u, noise=noise)
    assert torch.equal(flat.null_loss, loss.null_loss)
    assert (flat.per_image <= 1.1 * flat.null_loss).all()


@pytest.mark.slow
def test_stratified_u_covers_the_interval() -> None:
    for count in (1, 7, 256):
        u = stratified(torch.rand(count), 1)
        assert (u * count).long().tolist() == list(range(count))
    torch.manual_seed(0)
    u = torch.stack([stratified(torch.rand(4), 1) for _ in range(20_000)]).flatten()
    assert u.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    assert u.min() > 0
    assert u.max() < 1


@pytest.mark.parametrize("count", [1, 2, 6, 10, 64, 210, 256])
def test_any_few_interleaved_u_in_a_row_are_spread_over_the_interval(count: int) -> None:
    u = stratified(torch.rand(count), golden_step(count))
    assert (u.sort().values * count).long().tolist() == list(range(count))
    for few in range(4, count, 3):
        for start in range(0, count - few, 5):
            gaps = torch.cat([torch.zeros(1), u[start : start + few].sort().values, torch.ones(1)]).diff()
            assert gaps.max() < 4 / few  # 1 / few, were they as even as can be


def test_stratified_u_never_touches_the_ends() -> None:
    for draw in (0.0, 1 - 2**-24):
        u = stratified(torch.full((4096,), draw), 1)
        assert ((u > 0) & (u < 1)).all()


@pytest.mark.slow
def test_stratification_lowers_the_variance() -> None:
    x0 = images(64)
    objective = Objective(DDPM)
    torch.manual_seed(0)
    plain = torch.stack([objective(network, x0, u=torch.rand(64)).per_image.mean() for _ in range(200)])
    even = torch.stack([objective(network, x0).per_image.mean() for _ in range(200)])
    assert even.std() < 0.5 * plain.std()
    assert even.mean().item() == pytest.approx(plain.mean().item(), rel=0.02)


def test_the_same_seed_gives_the_same_loss() -> None:
    x0, conditions = images(8), Conditions(torch.arange(8))
    objective = Objective(DDPM, dropout=0.5)
    losses = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(objective(network, x0, conditions).per_image)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
def test_label_dropout(dropout: float) -> None:
    seen = []

    def watch(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        assert conditions.label is not None
        seen.append(conditions.label)
        return x

    x0, label = torch.zeros(10_000, 1, 1, 1), torch.arange(10_000) % 5
    torch.manual_seed(0)
    objective = Objective(DDPM, dropout=dropout)
    objective(watch, x0, Conditions(label))
    hidden = seen[0] == -1
    assert hidden.float().mean().item() == pytest.approx(dropout, abs=0.01)
    assert torch.equal(seen[0][~hidden], label[~hidden])
    objective.at(watch, x0, Conditions(label), torch.zeros(len(x0)), torch.randn_like(x0))
    assert torch.equal(seen[1], label)


def test_label_dropout_disturbs_neither_levels_nor_noise() -> None:
    x0, conditions = images(8), Conditions(torch.zeros(8, dtype=torch.long))
    losses = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        losses.append(Objective(DDPM, dropout)(network, x0, conditions).per_image)  # network ignores them
    assert torch.equal(*losses)


def test_held_out_loss() -> None:
    x0 = images(8)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    logsnr = Cosine().table()[[0, 50, 100, 250, 500, 750, 900, 998]].float()
    state = torch.get_rng_state()
    for weighting in (Plain(), MinSnr(), InverseSnr()):
        loss, mse = Objective(Diffusion(VP(), Cosine(), Eps(), weighting)).at(network, x0, NO_CONDITIONS, logsnr, noise)
        # A network that predicts the noise: the error of the implied noise is its own.
        alpha, sigma = VP()(logsnr.view(-1, 1, 1, 1))
        c_noise = torch.tensor([0.0, 50, 100, 250, 500, 750, 900, 998])
        expected = (network(alpha * x0 + sigma * noise, c_noise, NO_CONDITIONS) - noise).square().mean((1, 2, 3))
        torch.testing.assert_close(mse, expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(loss, weighting(logsnr, logsnr.exp(), 0.5) / logsnr.exp() * expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_held_out_noise_error_is_that_of_the_implied_noise() -> None:
    diffusion = Diffusion(VP(), Cosine(), V(), MinSnr())
    x0, logsnr = images(5), torch.linspace(-6, 6, 5)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    _, mse = Objective(diffusion).at(network, x0, NO_CONDITIONS, logsnr, noise)
    x_t = diffusion.add_noise(x0, noise, logsnr)
    _, eps = diffusion.recover(network(*diffusion.network_input(x_t, logsnr), NO_CONDITIONS), x_t, logsnr)
    torch.testing.assert_close(mse, (eps - noise).square().mean((1, 2, 3)), rtol=1e-4, atol=1e-6)


def test_float32_and_differentiable_within_autocast() -> None:
    layer = torch.nn.Conv2d(3, 3, 3, padding=1)

    def conv(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        assert x.dtype == torch.float32
        return layer(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = Objective(Diffusion())(conv, images(4)).per_image
    assert loss.dtype == torch.float32
    loss.mean().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


def test_a_chance_beyond_one_is_refused() -> None:
    with pytest.raises(RequestError, match="label_dropout"):
        Objective(DDPM, 1.5)


def test_reference_of_latents_is_by_their_own_deviation():
    """Which no range bounds; of pixels it is the highest that there can be."""
    x0, noise = 3 * torch.randn(2, 64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    diffusion = Diffusion(Flow(), LogitNormal(), FlowVelocity(), Plain(), sigma_data=3.0)
    loss = Objective(diffusion)(lambda x, c_noise, conditions: torch.zeros_like(x), x0, noise=noise / 3)
    torch.testing.assert_close(loss.per_image, loss.null_loss, rtol=0.2, atol=0)
