"""The loss of images with unknown pixels: that of the known ones alone, whatever stands in the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_networks import NETWORKS
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError
from unfog.models.network_settings import build_model, take_conditions
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions


class Pixelwise(nn.Module):
    """A network whose output at a pixel depends on that pixel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 1), nn.SiLU(), nn.Conv2d(8, 2, 1)).double()

    def forward(self, x: Tensor, c_noise: Tensor, conditions: Any) -> Tensor:
        return self.layers(x + c_noise[:, None, None, None] / 1000)  # type: ignore[no-any-return]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 3, 2, 8, 12, generator=generator, dtype=torch.float64)
    return x0, noise, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)


def test_the_loss_is_that_of_the_cropped_images(batch):
    x0, noise, u = batch
    torch.manual_seed(0)
    network, diffusion = Pixelwise(), Diffusion()
    known = x0[..., 4:]
    masked = x0.clone()
    masked[..., :4] = math.nan
    found = Objective(diffusion, has_unknown=True)(network, masked, u=u, noise=noise)
    expected = Objective(diffusion)(network, known, u=u, noise=noise[..., 4:])
    assert torch.allclose(found.per_image, expected.per_image, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(each.per_image.sum(), network.parameters()) for each in (found, expected)]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*gradients))
    held_out, cropped = (
        Objective(diffusion, has_unknown=mask).at(network, x, Conditions(), diffusion.schedule(u), eps)
        for mask, x, eps in ((True, masked, noise), (False, known, noise[..., 4:]))
    )
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(held_out, cropped))


def test_values_may_be_unknown_by_channel_and_complete_images_have_the_plain_loss(batch):
    x0, noise, u = batch
    network = Pixelwise()
    plain = Objective(Diffusion())(network, x0, u=u, noise=noise).per_image
    assert torch.allclose(Objective(Diffusion(), has_unknown=True)(network, x0, u=u, noise=noise).per_image, plain)
    some = torch.rand(x0.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    masked = x0.masked_fill(some, math.nan)
    found = Objective(Diffusion(), has_unknown=True)(network, masked, u=u, noise=noise)
    diffusion = Diffusion()
    logsnr = diffusion.schedule(u)
    filled = x0.masked_fill(some, 0.0)
    y = network(*diffusion.network_input(diffusion.add_noise(filled, noise, logsnr), logsnr), None)
    squared = (y - diffusion.network_target(filled, noise, logsnr)).square()
    mean = torch.stack([each[~hidden].mean() for each, hidden in zip(squared, some)])
    assert torch.allclose(found.per_image, diffusion.weight(logsnr) * mean, rtol=1e-12)


def randomised(kind: str, **conditions: Any) -> nn.Module:
    torch.manual_seed(0)
    network = build_model(NETWORKS[kind], 2, ConditionFormat(**conditions))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return network.eval()


@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_do_not_depend_on_what_stands_in_unknown_pixels(kind, batch):
    x, other = (each.float() for each in batch[:2])
    network, c_noise = randomised(kind, mask_channels=2), torch.tensor([10.0, 300.0, 900.0])
    known = (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.3).float()
    mixed = x.where(known > 0, 1000 * other)
    first, second = (network(each, c_noise, Conditions(known=known)) for each in (x, mixed))
    assert torch.equal(first, second)
    assert not torch.allclose(first, network(x, c_noise, Conditions()))  # the mask is an input
    ones = Conditions(known=torch.ones_like(x))
    assert torch.equal(network(x, c_noise, Conditions()), network(x, c_noise, ones))
    denoised = Denoiser(network, Diffusion())(x, torch.zeros(3), Conditions(known=known))
    assert denoised.shape == x.shape
    assert not denoised[known == 0].any()


def test_a_network_without_the_input_refuses_a_mask(batch):
    x = batch[0].float()
    network = randomised("unet")
    with pytest.raises(RequestError, match=r"data\.unknown"):
        network(x, torch.ones(3), Conditions(known=torch.ones_like(x)))
    with pytest.raises(RequestError, match="third parameter `conditions`"):
        take_conditions(nn.Identity(), ConditionFormat(mask_channels=1))


def test_further_pixels_are_hidden_at_random_and_do_not_count(batch):
    x0, noise, u = (each.float() for each in batch)
    seen: list[Tensor] = []

    def network(x: Tensor, c_noise: Tensor, conditions: Conditions) -> Tensor:
        assert conditions.known is not None
        seen.append(conditions.known)
        return torch.zeros_like(x)

    x0 = x0.repeat(100, 1, 1, 1)
    x0[:, 0, :2] = math.nan
    torch.manual_seed(0)
    Objective(Diffusion(), has_unknown=True, hides_more=True)(
        network, x0, u=u.repeat(100), noise=noise.repeat(100, 1, 1, 1)
    )
    (known,) = seen
    assert not known[:, 0, :2].any()
    assert torch.equal(known[:, 0, 2:], known[:, 1, 2:])  # all channels of a pixel
    shares = known[:, 1].mean((1, 2))
    assert 0.2 < (shares == 1).float().mean() < 0.4
    assert shares.min() < 0.5
