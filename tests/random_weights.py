"""Networks whose outputs depend on all weights: fresh ones have many zeros, which hide exchanged weights.

The check of exports in `unfog.inference.exports.diffusers` has the same function. This copy does not change with it, so
that the tests find a mistake there.
"""

from copy import deepcopy

import torch
from torch import nn


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
