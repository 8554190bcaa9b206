"""Losses that a CPU gave, stored in reference.json, for the same weights, images and random numbers elsewhere.

run.sh --make-reference writes the file anew, on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unfog.checks.gpu_checks import trial_settings
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.toml import update
from unfog.evaluation.held_out import HeldOut, midpoints
from unfog.pipeline.build import build_loss_at
from unfog.planning.timing import TrialTraining, random_images
from unfog.values.conditions import NO_CONDITIONS

import numpy as np
import torch
import values

FILE = Path(__file__).with_name("reference.json")
STEPS, LEVELS, _IMAGES = 20, 6, 32


def read() -> dict[str, Any]:
    """Return the stored figures."""
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


def make(file: Path = FILE) -> None:
    """Compute the figures on the CPU, and store them."""
    cpu = torch.device("cpu")
    figures = {"torch": torch.__version__, "losses": training_losses(cpu), "held_out": held_out_losses(cpu)}
    file.write_text(json.dumps(figures, indent=1) + "\n")


def training_losses(device: torch.device) -> list[float]:
    """Return the mean loss of each of 20 steps of AdamW in fp32, with random numbers of the CPU."""
    config = _settings(device)
    with values.HostDraws():
        trial, losses = TrialTraining(config, random_images(config, 64), device), list[torch.Tensor]()
        usual: Callable[..., Any] = trial._task.loss_function

        def recorded(*inputs: Any) -> Any:
            loss = usual(*inputs)
            losses.append(loss.per_image.detach().mean())
            return loss

        trial._task = trial._task._replace(loss_function=recorded)
        trial.run(STEPS)
    return torch.stack(losses).double().cpu().tolist()


@torch.inference_mode()
def held_out_losses(device: torch.device) -> list[float]:
    """Return the held-out loss at each of six noise levels, of a network with fixed weights."""
    config, case = _settings(device), values.cases(True)[0]
    pixels = random_images(config, _IMAGES).take(np.arange(_IMAGES))[0]
    x0 = config.image_format.to_model(torch.from_numpy(pixels)).to(device)
    held_out = HeldOut(x0, NO_CONDITIONS, midpoints(LEVELS).to(device))
    table = held_out.losses(build_loss_at(case.network.to(device), config), batch=16)
    losses: list[float] = table[0].mean(1).tolist()
    return losses


def _settings(device: torch.device) -> Config:
    changes = {
        "network": "unet:channels=16/32,attention=0/1,norm_groups=8",
        "data": {"size": 8, "channels": 3},
        "optimizer": {"method": "adamw", "lr": 1e-3, "schedule": "constant"},
        "training": {"device": device.type, "precision": "fp32", "batch": 8},
    }
    return trial_settings(update(preset("default"), changes, ""), device, lambda: False)
