"""What memory training takes at the most, by a glance at the settings."""

from __future__ import annotations

from unfog.config.schema import Config
from unfog.data.augmentation.nonleaking import CONDITIONS
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.pipeline.build import input_shape
from unfog.planning.peak_memory import CUDNN_WORKSPACE, ONEDNN_HALF


def memory_upper_bound(config: Config) -> float:
    """Bytes that training surely does not exceed, in host memory or on a device; infinite where nothing is known.

    A glance at the settings of the network, for the usual case in which memory is no question at all: every layer of a
    block keeps what it gets in fp32, twice.
    """
    network = config.network
    if isinstance(network, UNet):
        weights, activations = _of_unet(network, config)
    elif isinstance(network, MPUNet):
        weights, activations = _of_mpunet(network, config)
    elif isinstance(network, DiT):
        weights, activations = _of_dit(network, config)
    else:
        return float("inf")
    batch = config.training.microbatch or config.training.batch
    # Weights, gradients, two averages, two moments and what the optimiser takes for a moment, with holes between; and a
    # checkpoint's snapshot, which is as large once more. With several processes, what gradients travel from.
    return 4 * (17 * weights + 2 * batch * activations) + max(CUDNN_WORKSPACE, ONEDNN_HALF)


def _rows(config: Config) -> int:
    """Of the embeddings of class and augmentation."""
    return len(config.classes) + 1 + CONDITIONS


def _of_unet(network: UNet, config: Config) -> tuple[float, float]:
    """Numbers that its weights are at most, and that an image leaves for the backward pass."""
    first = last = network.channels[0]
    rows = _rows(config) + 5 * first + 1  # the rest is of the noise level
    weights, activations = 4.0 * first * rows, 0.0
    for level, channels in enumerate(network.channels):
        pixels = (input_shape(config)[1] / 2**level) ** 2
        attends = network.attention[level] or (network.mid_attention and level == len(network.channels) - 1)
        blocks = 2 * network.blocks + 4  # down, up, and the middle ones and resampling
        wide = last + channels + (network.channels[level + 1] if level + 1 < len(network.channels) else channels)
        weights += blocks * (9 * wide * channels + 9 * channels**2 + 8 * first * channels + 5 * channels**2 * attends)
        activations += blocks * pixels * (6 * wide + 12 * channels + 16 * channels * attends)
        heads = channels / (network.head_channels or channels)
        activations += blocks * attends * 4 * heads * pixels**2
        last = channels
    return weights, activations


def _of_mpunet(network: MPUNet, config: Config) -> tuple[float, float]:
    """The same; every block is taken to be as wide as all that it might join."""
    width = max(network.channels)
    weights, activations, last = float(width * (_rows(config) + network.channels[0])), 0.0, network.channels[0]
    for level, channels in enumerate(network.channels):
        pixels = (input_shape(config)[1] / 2**level) ** 2
        attends = network.attention[level]
        blocks = 2 * network.blocks + 4  # down, up, and the middle ones and resampling
        wide = last + channels + (network.channels[level + 1] if level + 1 < len(network.channels) else channels)
        weights += blocks * wide * (9 * wide + width + 5 * channels * attends)
        activations += blocks * pixels * (14 * wide + 30 * channels * attends)
        heads = channels / (network.head_channels or channels)
        activations += blocks * attends * 4 * heads * pixels**2
        last = channels
    return weights, activations


def _of_dit(network: DiT, config: Config) -> tuple[float, float]:
    """The same."""
    width, tokens = network.width, (input_shape(config)[1] / network.patch) ** 2
    values = network.patch**2 * 2 * max(1, input_shape(config)[0])  # of a patch, in and out
    weights = width * (network.depth * 19.0 * (width + 8) + 12 * width + _rows(config) + 2 * values)
    heads = width / network.head_channels
    return weights, network.depth * tokens * (60 * width + 4 * heads * tokens) + tokens * (8 * width + values)
