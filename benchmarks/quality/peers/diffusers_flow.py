"""diffusers, tuned: rectified flow with logit-normal levels by diffusers' own parts; see tuned.py.

    PEERS/bin/python diffusers_flow.py train IMAGES FOLDER COUNT SEED
    PEERS/bin/python diffusers_flow.py draw IMAGES FOLDER N SEED OUT STEPS

It is drawn by diffusers' DPM-Solver++ for flows. STEPS are calls of the network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import tuned
from diffusers import DPMSolverMultistepScheduler, UNet2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor
from torch.nn import functional as F


def loss_of(model: UNet2DModel, clean: Tensor) -> Tensor:
    """The loss of diffusers' scripts for Stable Diffusion 3: the network's answer is noise - image."""
    t = compute_density_for_timestep_sampling("logit_normal", len(clean), logit_mean=0.0, logit_std=1.0)
    noise, share = torch.randn_like(clean), t[:, None, None, None]
    with torch.autocast("cpu", torch.bfloat16):
        answer = model((1 - share) * clean + share * noise, t * 1000).sample
    return F.mse_loss(answer.float(), noise - clean)


def drawer(model: UNet2DModel, steps: int) -> tuple[Callable[[int], Tensor], str]:
    """DPM-Solver++, which calls the network once a step."""

    def draw(n: int) -> Tensor:
        scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
        scheduler.set_timesteps(steps)
        x = torch.randn(n, 3, 32, 32)
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, t).sample, t, x).prev_sample
        return (x + 1) / 2

    return draw, f"DPM-Solver++, {steps} steps"


main = partial(tuned.main, loss_of, drawer)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
