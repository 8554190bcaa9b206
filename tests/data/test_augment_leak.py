"""EDM's augmentation does not show in samples, and would if the network were not told of it: small networks trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unfog.data.augmentation import Augment
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import NoiseSource
from unfog.diffusion.objective import Objective
from unfog.diffusion.sampler import Sampler
from unfog.models.settings import UNet
from unfog.models.unet import UNetModel
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

pytestmark = pytest.mark.slow

NETWORK = UNet(channels=(16, 32), attention=(False, False), mid_attention=True, head_channels=16, norm_groups=4)
SIDE = 8
DIFFUSION = Diffusion()


def one_sided(n: int) -> Tensor:
    """Bright on the left, dark on the right, with an edge and shades of their own: uint8 [n, 1, 8, 8]."""
    edge = torch.randint(3, 6, (n, 1, 1, 1))
    left, right = torch.randint(200, 256, (n, 1, 1, 1)), torch.randint(0, 56, (n, 1, 1, 1))
    return torch.where(torch.arange(SIDE) < edge, left, right).expand(n, 1, SIDE, SIDE).to(torch.uint8)


def solid(n: int) -> Tensor:
    """One grey of three all over: uint8 [n, 1, 8, 8]."""
    return (torch.tensor([30, 128, 225])[torch.randint(0, 3, (n,))].view(-1, 1, 1, 1).expand(n, 1, SIDE, SIDE)).to(
        torch.uint8
    )


def samples(images: Tensor, p: float, told: bool, steps: int) -> Tensor:
    """What a network draws that was trained on augmented images: 200 of them, [-1, 1]."""
    torch.manual_seed(0)
    model = UNetModel(NETWORK, 1, ConditionFormat.numbered(augment_inputs=9 if told else 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    augment, objective = Augment(augment=p), Objective(DIFFUSION)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        x0, condition = augment(images[torch.randint(0, len(images), (64,))])
        objective(model, x0, Conditions(augment=condition if told else None)).per_image.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    noise = NoiseSource(0, range(200), (1, SIDE, SIDE))
    return Sampler()(Denoiser(model.eval(), DIFFUSION), DIFFUSION.path, DIFFUSION.schedule, noise.draw)


def off(drawn: Tensor) -> float:
    """Share of pictures that are not bright on the left and dark on the right, all the way from top to bottom."""
    left, right = drawn[..., :2].amin((1, 2, 3)), drawn[..., 6:].amax((1, 2, 3))
    return 1 - ((left > 0.3) & (right < -0.3)).float().mean().item()


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_one_sided_images_keep_their_side_if_the_network_is_told_and_only_then(told: bool) -> None:
    torch.manual_seed(0)
    images = one_sided(256)
    augmented, _ = Augment(augment=0.25)(images.repeat(8, 1, 1, 1))
    assert off(augmented) > 0.25  # what there is to leak
    drawn = off(samples(images, 0.25, told, 700))
    assert drawn < 0.05 if told else drawn > 0.2  # measured 0.01 and 0.31


@pytest.mark.exhaustive
def test_solid_images_stay_solid_and_of_their_colours() -> None:
    torch.manual_seed(0)
    drawn = samples(solid(256), 0.5, True, 500)
    spread = drawn.std((1, 2, 3))
    assert spread.median() < 0.05
    assert (spread < 0.2).all()
    colours = torch.tensor([30, 128, 225]) / 127.5 - 1
    nearest = (drawn.mean((1, 2, 3))[:, None] - colours).abs().min(dim=1)
    assert nearest.values.median() < 0.1
    assert nearest.indices.bincount(minlength=3).min() > 30
