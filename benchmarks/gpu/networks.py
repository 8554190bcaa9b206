"""The networks that are trained and timed, as settings of a run; and a tiny one of each, for the rehearsal on a CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from unfog.checks.gpu_checks import trial_settings
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.toml import update

import torch

LATENTS = {"channels": 4, "factor": 8, "mean": [0.0] * 4, "deviation": [1.0] * 4}
_OF_LATENTS = {"autoencoder_folder": "/nowhere", "latents": LATENTS}
_FULL: dict[str, dict[str, Any]] = {
    "unet-64": {"network": "base", "data": {"size": 64}, "training": {"batch": 64}},
    "cifar10": {"network": "cifar10", "data": {"size": 32}, "training": {"batch": 256}},
    "dit-latents": {  # 256 tokens, as of images of 256 pixels
        "network": "dit:width=1024,depth=12,head_channels=64",
        "data": {"size": 256},
        "training": {"batch": 64},
        **_OF_LATENTS,
    },
    "tiny": {"network": "tiny", "data": {"size": 32}, "training": {"batch": 64}},
    "small": {"network": "small", "data": {"size": 32}, "training": {"batch": 64}},
    "dit-256": {"network": "dit-small", "data": {"size": 32}, "training": {"batch": 64}},
}
_SMALLEST = "unet:channels=32/32,attention=0/0,mid_attention=0"
_TINY: dict[str, dict[str, Any]] = {
    "unet-64": {"network": "unet:channels=32/32,attention=0/1,blocks=1", "data": {"size": 16}},
    "cifar10": {"network": _SMALLEST, "data": {"size": 16}},
    "dit-latents": {"network": "dit:width=64,depth=2", "data": {"size": 64}, **_OF_LATENTS},
    "tiny": {"network": _SMALLEST, "data": {"size": 16}},
    "small": {"network": "unet:channels=32/32,attention=0/1,blocks=1", "data": {"size": 16}},
    "dit-256": {"network": "dit:width=64,depth=2", "data": {"size": 16}},
}


def settings_of(name: str, cpu: bool) -> Config:
    """Return the settings of a run of one of the networks, with everything chosen that a step needs."""
    device = torch.device("cpu" if cpu else "cuda")
    usual = {"data": {"channels": 3}, "optimizer": {"method": "adamw"}}
    usual["training"] = {"device": device.type, "capture": False}  # a part asks for what it captures
    config = update(preset("default"), usual, "")
    config = update(config, _TINY[name] | {"training": {"batch": 4}} if cpu else _FULL[name], "")
    # Dropout takes part in time and not in what is compared, and would need the same random numbers everywhere.
    if getattr(config.network, "dropout", 0):
        config = replace(config, network=replace(config.network, dropout=0.0))  # type: ignore[type-var, arg-type]
    return trial_settings(config, device, lambda: False)


def disable_compiler() -> None:
    """Let compiled code be the plain one: on a CPU a C++ compiler takes minutes; all around it is rehearsed."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True  # type: ignore[attr-defined]
