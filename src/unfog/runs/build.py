"""From a settled configuration to live objects."""

from __future__ import annotations

import torch

from unfog.config.tree import Config
from unfog.errors import RequestError
from unfog.models.unet import UNetModel
from unfog.training.precision import Precision
from unfog.training.state import TrainState


def build_network(config: Config) -> UNetModel:
    """The network with fresh weights, on the CPU; a function of the configuration and its seed alone.

    Raises:
        RequestError: the network does not fit the image size, or is not chosen yet.
    """
    if config.network is None:
        raise RequestError("network = auto has to be settled before a network can be built")
    config.network.check(config.data.size)
    with torch.random.fork_rng(devices=[]):  # the caller's generator is none of our business
        torch.manual_seed(config.training.seed)
        return UNetModel(config.network, config.data.channels, len(config.classes))


def build_state(config: Config, device: torch.device) -> TrainState:
    """Network, optimiser, EMA and scaler at the start of a run, on the device."""
    if device.type == "cuda":
        # A resumed run must repeat what the first one did; by default cuDNN picks kernels by timing them.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    network = build_network(config).to(device)
    return TrainState(network, config.optimizer, config.ema, Precision(config.training.precision, device))
