"""Build the network that settings describe."""

from __future__ import annotations

from unfog.models.layers import ConditionalNetwork
from unfog.models.settings import Architecture

Network = ConditionalNetwork
"""(x [B, C, H, W], c_noise [B], label int64 [B] or None, augmentation [B, A] or None) -> y [B, C', H, W]."""


def build_model(
    settings: Architecture,
    channels: int,
    classes: int = 0,
    augment_inputs: int = 0,
    out_channels: int | None = None,
) -> Network:
    """Return a network with fresh weights from torch's global generator; the built-in ones begin with an output of 0.

    Args:
        settings: of a built-in, registered or custom network.
        channels: C of the images.
        classes: number of classes besides the null class; 0 builds a network without labels.
        augment_inputs: length of the augmentation condition; 0 builds a network without that input.
        out_channels: C' if it differs from C.
    """
    network: Network = settings.build(channels, classes, augment_inputs, out_channels)
    return network
