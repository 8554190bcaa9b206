"""From a settled configuration to live objects."""

from __future__ import annotations

import os

import torch

from unfog.config.tree import Config
from unfog.data.augment import to_model_range
from unfog.data.images import Prepared
from unfog.data.nonleaking import CONDITIONS
from unfog.errors import RequestError
from unfog.evaluation.held_out import HeldOut, midpoints
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
        told = CONDITIONS if config.data.augment else 0
        return UNetModel(config.network, config.data.channels, len(config.classes), told)


def build_state(config: Config, device: torch.device) -> TrainState:
    """Network, optimiser, EMA and scaler at the start of a run, on the device."""
    if device.type == "cuda":
        # A resumed run must repeat what the first one did; by default cuDNN picks kernels by timing them.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        # For what cuDNN does not do, such as the backward pass of attention; read when cuBLAS starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    network = build_network(config).to(device)
    network.checkpointing = config.training.checkpointing
    if config.training.compile:
        network.compile()  # in place, so that the names of the weights stay what they are
    return TrainState(network, config.optimizer, config.ema, Precision(config.training.precision, device))


def held_out_set(prepared: Prepared, config: Config, device: torch.device) -> HeldOut | None:
    """The held-out images that are measured, evenly spread over the set; None if there are none."""
    images, wanted = prepared.held_out, config.evaluate.images
    if not len(images):
        return None
    index = torch.linspace(0, len(images) - 1, min(wanted, len(images))).long()
    pixels, labels, _ = images.take(index.numpy())
    x0 = to_model_range(torch.from_numpy(pixels)).to(device)
    label = None if labels is None else torch.from_numpy(labels).to(device)
    return HeldOut(x0, label, midpoints(config.evaluate.levels).to(device))
