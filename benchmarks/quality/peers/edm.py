"""EDM's recipe (Karras et al. 2022) on diffusers' network of our `tiny`'s size; see tuned.py.

    PEERS/bin/python edm.py train IMAGES FOLDER COUNT SEED
    PEERS/bin/python edm.py draw IMAGES FOLDER N SEED OUT STEPS

Preconditioning, noise levels, weighting, levels of sampling and Heun's method are written from the paper's table 1.
STEPS are calls of the network, so that there are (STEPS + 1) / 2 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import tuned
from diffusers import UNet2DModel
from torch import Tensor

DATA, MEAN, STD = 0.5, -1.2, 1.2
LOWEST, HIGHEST, RHO = 0.002, 80.0, 7.0


def denoise(model: UNet2DModel, x: Tensor, sigma: Tensor) -> Tensor:
    """The guess of the image: c_skip x + c_out F(c_in x, c_noise), float32 [B, 3, 32, 32]; `sigma` [B]."""
    s = sigma[:, None, None, None]
    total = (s**2 + DATA**2).sqrt()
    # ln(sigma) / 4 lies in -1.6 to 1.1, and this network's sinusoids are made for timesteps up to 1,000.
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(x / total, 250 * sigma.log() / 4).sample
    return DATA**2 / total**2 * x + s * DATA / total * answer.float()


def loss_of(model: UNet2DModel, clean: Tensor) -> Tensor:
    """Weighted squared error, at log-normal noise levels."""
    sigma = (torch.randn(len(clean)) * STD + MEAN).exp()
    weight = (sigma**2 + DATA**2) / (sigma * DATA) ** 2
    noisy = clean + sigma[:, None, None, None] * torch.randn_like(clean)
    return (weight[:, None, None, None] * (denoise(model, noisy, sigma) - clean) ** 2).mean()


def heun(model: UNet2DModel, n: int, steps: int) -> Tensor:
    """Draw n images in [-1, 1] by Heun's method, deterministic, Euler's in the last step."""
    shares = torch.linspace(0, 1, steps)
    levels = (HIGHEST ** (1 / RHO) + shares * (LOWEST ** (1 / RHO) - HIGHEST ** (1 / RHO))) ** RHO
    levels = torch.cat([levels, torch.zeros(1)])
    x = levels[0] * torch.randn(n, 3, 32, 32)
    for now, after in pairwise(levels):
        slope = (x - denoise(model, x, now.expand(n))) / now
        ahead = x + (after - now) * slope
        if after > 0:
            slope = (slope + (ahead - denoise(model, ahead, after.expand(n))) / after) / 2
        x = x + (after - now) * slope
    return x


def drawer(model: UNet2DModel, calls: int) -> tuple[Callable[[int], Tensor], str]:
    """Heun's method, which calls the network twice in each step but the last."""
    steps = (calls + 1) // 2
    return lambda n: (heun(model, n, steps) + 1) / 2, f"Heun, {steps} steps"


main = partial(tuned.main, loss_of, drawer)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
