"""The measured loss by level: the optimum of EDM2's loss, importance that cancels, nothing lost in a file."""

import json
import math

import pytest
import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.loss_by_level import LEAST_IMAGES, LossByLevel
from unfog.diffusion.noise import VE, VP, Cosine, Flow, LogitNormal, LogNormal
from unfog.diffusion.objective import Objective, stratified
from unfog.diffusion.target import EdmF, Eps, V
from unfog.diffusion.weighting import Elbo, Plain, Uncertainty
from unfog.errors import RequestError
from unfog.values.conditions import NO_CONDITIONS, Conditions

CPU = torch.device("cpu")
EDM = Diffusion(VE(), LogNormal(), EdmF(), Uncertainty(), 0.5, "logsnr", scale_input=True)
STD = 2.0


def nothing(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
    return torch.zeros_like(x)


def gaussian(count: int) -> Tensor:
    return STD * torch.randn(count, 1, 4, 4)


def expected_error(diffusion: Diffusion, u: Tensor) -> Tensor:
    """Of answering 0 to pixels of N(0, STD^2): weight (a^2 STD^2 + b^2)."""
    logsnr = diffusion.schedule(u)
    a, b = diffusion.target(*diffusion.path(logsnr), diffusion.sigma_data)
    return diffusion.weight(logsnr) * (a.square() * STD**2 + b.square())


def trained(diffusion: Diffusion, steps: int, batch: int = 64) -> LossByLevel:
    torch.manual_seed(0)
    levels = LossByLevel(CPU)
    objective = Objective(diffusion, levels=levels)
    for _ in range(steps):
        loss = objective(nothing, gaussian(batch))
        levels.add(loss.u, loss.measured)
    return levels


@pytest.mark.slow
@pytest.mark.parametrize(
    "diffusion",
    [
        EDM,
        Diffusion(Flow(), LogitNormal(), V(), Uncertainty()),
        Diffusion(VP(), Cosine(), V(), Uncertainty()),
    ],
    ids=lambda d: d.path.kind,
)
def test_it_finds_the_optimum_of_edm2s_loss(diffusion: Diffusion) -> None:
    """E[error] / e^u + u is least, 1 + log E[error], at u = log E[error]; it is found in 200 steps of 64 images."""
    levels = trained(diffusion, 200)
    u = (torch.arange(512) + 0.5) / 512
    error, learned = expected_error(diffusion, u), levels.log_mean(u)
    assert error.max() / error.min() > 2  # there is something to learn
    torch.testing.assert_close(learned.exp(), error, rtol=0.2, atol=0)
    loss, least = (error / learned.exp() + learned).mean(), (1 + error.log()).mean()
    assert 0 < loss - least < 2e-3
    assert loss < (error / error.mean() + error.mean().log()).mean() - 0.02  # one u for all levels
    # And then every level weighs alike.
    objective = Objective(diffusion, levels=levels)
    weighed = objective(nothing, gaussian(8192), u=stratified(torch.rand(8192), 1)).per_image.view(16, -1).mean(1)
    torch.testing.assert_close(weighed, torch.ones(16), rtol=0.12, atol=0)


@pytest.mark.slow
def test_a_head_trained_by_gradient_goes_to_the_same_place() -> None:
    """EDM2's own way: u as parameters, moved down the gradient of error / e^u + u."""
    levels = trained(EDM, 200)
    nodes = torch.linspace(0, 1, 33).clamp(1e-4, 1 - 1e-4)
    head = torch.zeros(33, requires_grad=True)
    optimizer = torch.optim.Adam([head], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (expected_error(EDM, nodes) / head.exp() + head).sum().backward()
        optimizer.step()
    torch.testing.assert_close(levels.log_mean(nodes), head.detach(), rtol=0, atol=0.2)


def test_before_anything_is_known_it_changes_nothing() -> None:
    x0 = gaussian(8)
    losses = []
    for levels in (None, LossByLevel(CPU)):
        torch.manual_seed(1)
        losses.append(Objective(EDM, levels=levels)(nothing, x0))
    assert torch.equal(losses[0].per_image, losses[1].per_image)
    assert torch.equal(losses[0].measured, losses[1].measured)


def test_what_is_reported_does_not_depend_on_what_was_learned() -> None:
    levels, x0, noise, u = trained(EDM, 20), gaussian(8), torch.randn(8, 1, 4, 4), (torch.arange(8) + 0.5) / 8
    fresh = Objective(EDM)(nothing, x0, u=u, noise=noise)
    later = Objective(EDM, levels=levels)(nothing, x0, u=u, noise=noise)
    assert torch.equal(later.measured, fresh.per_image)
    assert torch.equal(later.null_loss, fresh.null_loss)
    assert not torch.allclose(later.per_image, fresh.per_image)
    logsnr = EDM.schedule(u)
    held_out = [Objective(EDM, levels=each).at(nothing, x0, NO_CONDITIONS, logsnr, noise)[0] for each in (None, levels)]
    assert torch.equal(*held_out)


def test_it_follows_a_loss_that_falls() -> None:
    levels, u = LossByLevel(CPU), stratified(torch.rand(64), 1)
    for value, images in ((1.0, 10 * LEAST_IMAGES), (0.01, 20 * LEAST_IMAGES)):
        for _ in range(images // 64):
            levels.add(u, torch.full((64,), value))
        torch.testing.assert_close(levels.log_mean(u).exp(), torch.full((64,), value), rtol=0.02, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_importance_cancels_the_density(share: float) -> None:
    levels = trained(Diffusion(VP(), Cosine(), Eps(), Elbo(), adaptive=0.5), 50)
    v = (torch.arange(200_000) + 0.5) / 200_000
    u, importance = levels.draw(v, share)
    assert (u.diff() > -1e-6).all()
    for function in (torch.ones_like, torch.cos, lambda u: u**3, lambda u: (u < 0.1).float()):
        even = function(v).double().mean()
        torch.testing.assert_close((importance * function(u)).double().mean(), even, rtol=3e-3, atol=0)
    assert importance.max() <= 1 / (1 - share) * (1 + 1e-5)
    if share == 0:
        torch.testing.assert_close(u, v, rtol=0, atol=2e-6)


def test_the_density_is_the_root_of_the_mean_square_loss() -> None:
    levels, u = LossByLevel(CPU), torch.linspace(0, 1, 6401)
    levels.add(u, 0.2 + 3 * u)
    v = (torch.arange(100_000) + 0.5) / 100_000
    drawn = levels.draw(v, 0.999)[0]
    counts = torch.histc(drawn, 16, 0, 1) / len(v) * 16
    torch.testing.assert_close(counts, (0.2 + 3 * (torch.arange(16) + 0.5) / 16) / 1.7, rtol=0.03, atol=0.01)


def test_the_density_follows_the_square_and_under_uncertainty_what_is_trained() -> None:
    """A mean of 1 and 4 by half; in the noisy half the loss is 0 or twice its mean, so its root mean square is more."""
    levels, u = LossByLevel(CPU), torch.linspace(0, 1, 6401)
    noisy = u > 0.5
    levels.add(u, torch.where(noisy, 8 * (torch.arange(6401) % 2), torch.ones(6401)))
    v = (torch.arange(100_000) + 0.5) / 100_000
    for divided, ratio in ((False, 4 * 2**0.5), (True, 2**0.5)):
        drawn, importance = levels.draw(v, 0.999, divided)
        clean, far = ((drawn < 0.45).float().mean() / 0.45, (drawn > 0.55).float().mean() / 0.45)
        assert (far / clean).item() == pytest.approx(ratio, rel=0.02)
        assert importance[drawn < 0.45].max() / importance[drawn > 0.55].min() == pytest.approx(ratio, rel=0.02)


def test_means_remember_the_least_number_of_images_and_then_a_share_of_all() -> None:
    levels, u = LossByLevel(CPU), stratified(torch.rand(512), 1)
    for count in range(1, 401):
        levels.add(u, torch.ones(512))
        if count == 30:
            remembered = 512 / (1 - math.exp(-512 / LEAST_IMAGES))
            assert levels.sums[0].sum().item() == pytest.approx(remembered, rel=0.01)
    # With a horizon of a tenth an image at n of N counts (n / N)^10.
    assert levels.sums[0].sum().item() == pytest.approx(400 * 512 / 11, rel=0.03)


@pytest.mark.slow
def test_adaptive_levels_stay_even_where_uncertainty_evens_the_loss() -> None:
    diffusion = Diffusion(VP(), Cosine(), V(), Uncertainty(), adaptive=0.9)
    objective = Objective(diffusion, levels=trained(diffusion, 200))
    u = (torch.arange(512) + 0.5) / 512
    assert expected_error(diffusion, u).max() > 3 * expected_error(diffusion, u).min()
    importance = objective(nothing, gaussian(4096)).importance
    assert importance is not None
    assert importance.max() < 1.2 * importance.min()


@pytest.mark.slow
def test_adaptive_levels_lower_the_variance_and_keep_the_mean() -> None:
    """Of the bound, whose weights are most uneven; the mean by level is that of even levels too."""
    even = Diffusion(VP(), Cosine(), Eps(), Elbo())
    adaptive = Diffusion(VP(), Cosine(), Eps(), Elbo(), adaptive=0.9)
    levels = trained(adaptive, 200)
    spread, mean = [], []
    for objective in (Objective(even), Objective(adaptive, levels=levels)):
        torch.manual_seed(2)
        losses = torch.stack([objective(nothing, gaussian(64)).per_image.mean() for _ in range(400)])
        spread.append(losses.std().item())
        mean.append(losses.mean().item())
    assert spread[1] < 0.6 * spread[0]
    assert mean[1] == pytest.approx(mean[0], rel=3 * spread[0] / mean[0] / 20)


def test_given_levels_are_not_moved() -> None:
    diffusion = Diffusion(VP(), Cosine(), Eps(), Plain(), adaptive=0.5)
    u = (torch.arange(8) + 0.5) / 8
    loss = Objective(diffusion, levels=trained(diffusion, 10))(nothing, gaussian(8), u=u)
    assert torch.equal(loss.u, u)
    assert loss.importance is None


def test_an_autocast_rounds_none_of_it() -> None:
    diffusion = Diffusion(VE(), LogNormal(), EdmF(), Uncertainty(), 0.5, "logsnr", True, adaptive=0.5)
    objective, x0 = Objective(diffusion, levels=trained(diffusion, 20)), gaussian(8)
    losses = []
    for enabled in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses.append(objective(nothing, x0))
    for plain, cast in zip(*losses):
        assert torch.equal(plain, cast)


def test_extreme_losses_leave_finite_numbers() -> None:
    levels, u = LossByLevel(CPU), stratified(torch.rand(64), 1)
    for value in (1e30, 0.0, 3e38):
        levels.add(u, torch.full((64,), value))
        assert levels.sums.isfinite().all()
        assert levels.log_mean(u).isfinite().all()
        assert all(part.isfinite().all() for part in levels.draw(u, 0.5))
    assert json.dumps(levels.state_dict(), allow_nan=False)
    empty = LossByLevel(CPU)
    empty.add(u, torch.zeros(64))
    assert empty.log_mean(u).min().item() == pytest.approx(math.log(1e-6))
    assert all(part.isfinite().all() for part in empty.draw(u, 0.5))


def test_it_survives_a_file_to_the_bit_and_an_older_one_lacks_it() -> None:
    levels = trained(EDM, 7)
    again = LossByLevel(CPU)
    again.load_state_dict(json.loads(json.dumps(levels.state_dict())))
    assert torch.equal(again.sums, levels.sums)
    assert again.seen == levels.seen
    again.load_state_dict(None)
    assert again.state_dict() == LossByLevel(CPU).state_dict()


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(RequestError, match=r"adaptive = 1\.0"):
        Diffusion(adaptive=1.0)
