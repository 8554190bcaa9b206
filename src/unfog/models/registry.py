"""Which class builds which settings."""

from __future__ import annotations

from unfog.models.dit import DiTModel
from unfog.models.edm2_unet import MPUNetModel
from unfog.models.settings import Architecture, DiT, MPUNet
from unfog.models.unet import UNetModel

Network = UNetModel | MPUNetModel | DiTModel
"""(x [B, C, H, W], c_noise [B], label int64 [B] or None, augmentation [B, A] or None) -> y [B, C', H, W]."""


def build_model(
    settings: Architecture,
    channels: int,
    classes: int = 0,
    augment_inputs: int = 0,
    out_channels: int | None = None,
) -> Network:
    """A fresh network, which outputs exactly zero; its random weights come from torch's global generator.

    Args:
        settings: the architecture, whose type says which network.
        channels: of the images, C.
        classes: number of classes besides "none"; 0 builds a network without labels.
        augment_inputs: numbers that say how an image was augmented; 0 builds a network that is not told.
        out_channels: C' where it is not C.
    """
    if isinstance(settings, MPUNet):
        return MPUNetModel(settings, channels, classes, augment_inputs, out_channels)
    if isinstance(settings, DiT):
        return DiTModel(settings, channels, classes, augment_inputs, out_channels)
    return UNetModel(settings, channels, classes, augment_inputs, out_channels)
