"""Networks whose outputs depend on all weights: fresh ones have many zeros, which hide exchanged weights.

The check of exports in `unfog.inference.exports.diffusers` has the same function. This copy does not change with it, so
that the tests find a mistake there.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder, AutoencoderFolder
from unfog.pipeline.latents import save_autoencoder


@torch.no_grad()
def randomized(network: nn.Module) -> nn.Module:
    """Return a copy of a network with random weights of ordinary size."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # biases about 0, the scales of normalisations about 1
            parameter.copy_(parameter.round().clamp(0, 1) + 0.1 * noise)
    return copy


def random_autoencoder(folder: Path, seed: int = 0) -> AutoencoderFolder:
    """Save an autoencoder with random weights, of which none is zero: 3 latents of 4 x 4 pixels each."""
    torch.manual_seed(seed)
    network = AutoencoderModel(Autoencoder(factor=4, latent_channels=3, channels=(8, 8), norm_groups=4), 3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return save_autoencoder(folder, network)
