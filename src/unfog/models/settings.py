"""Settings of the networks, as plain values. Imports no torch, so that `--help` stays quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unfog.errors import RequestError
from unfog.models.network_settings import CustomNetwork, NetworkSettings, SizeBound
from unfog.models.unet_levels import (
    check_condition,
    check_halving,
    check_heads,
    check_levels,
    common_divisor,
    describe_levels,
    level_bounds,
)
from unfog.settings import setting


@dataclass(frozen=True)
class UNet(NetworkSettings):
    """A U-Net of residual blocks (DDPM, appendix B), equal key by key to what diffusers calls UNet2DModel.

    Level i works at 1/2^i of the image's height and width. Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "unet"
    model: ClassVar[str] = "unfog.models.unet:UNetModel"
    prefers_channels_last: ClassVar[bool] = True
    muon_lr_factor: ClassVar[float] = 2.0
    channels: tuple[int, ...] = (64, 96, 128)
    """Channels of each level, full resolution first; one level more halves the resolution once more."""
    blocks: int = 1
    """Residual blocks of a level on the way down; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True)
    """Whether self-attention follows every residual block of a level; it costs (height x width)^2."""
    mid_attention: bool = True
    """Self-attention at the lowest resolution, between the two middle blocks."""
    head_channels: int = 32
    """Channels of one attention head; 0 is a single head over all channels, as in DDPM."""
    dropout: float = setting(0.0, resume="free")
    """Probability of dropping an activation inside a residual block; 0.1 for small sets of images."""
    norm_groups: int = 32
    """Groups of every group normalisation; must divide all `channels`."""
    norm_eps: float = 1e-5
    """Added to the variance in group normalisation."""
    scale_shift: bool = True
    """The condition scales and shifts after the second normalisation (ADM), or only shifts before (DDPM)."""
    time_scale: float = 1.0
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""
    freq_shift: int = 0
    """Sinusoid i of n has frequency 10000^(-i / (n - freq_shift)): 1 in the original DDPM, 0 in most."""
    flip_sin_to_cos: bool = True
    """Cosines before sines in the sinusoidal embedding; False in the original DDPM."""
    downsample_padding: Literal[0, 1] = 1
    """1 pads a downsampling convolution on all sides; 0 only right and below, as the original DDPM does."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, or that no network has."""
        check_levels(self.channels, self.blocks, self.attention)
        check_condition(self.dropout, self.time_scale)
        self._check_ranges()
        for channels in self.channels:
            if self.norm_groups < 1 or channels % self.norm_groups:
                raise RequestError(
                    f"channels = {channels} is not a multiple of norm_groups = {self.norm_groups}; "
                    f"try norm_groups = {common_divisor(self.channels, 32)}"
                )
        check_heads(self.attending(), self.head_channels)

    def _check_ranges(self) -> None:
        if not 0 < self.norm_eps <= 1:
            raise RequestError(f"norm_eps = {self.norm_eps} must be above 0 and at most 1; 1e-5 is usual")
        if self.freq_shift not in (0, 1):
            raise RequestError(f"freq_shift = {self.freq_shift} must be 0, or 1 as in the original DDPM")

    def attending(self) -> tuple[int, ...]:
        """Channels of the places that have attention: the levels', then the middle's."""
        levels = tuple(c for c, attends in zip(self.channels, self.attention) if attends)
        return levels + self.channels[-1:] * self.mid_attention

    def check(self, size: int | tuple[int, int]) -> None:
        check_halving(len(self.channels), size)

    def layout(self, height: int, width: int) -> str:
        return describe_levels(len(self.channels), height, width)

    def size_bound(self, channels: int, side: int, conditions: int) -> SizeBound:
        first = self.channels[0]
        weights, activations = 4.0 * first * (conditions + 5 * first + 1), 0.0  # 5: the embedding of the noise level
        for level in level_bounds(self.channels, self.blocks, self.head_channels, side):
            wide, own, lowest = level.widest, level.channels, level.number == len(self.channels) - 1
            attends = self.attention[level.number] or (self.mid_attention and lowest)
            weights += level.blocks * (9 * wide * own + 9 * own**2 + 8 * first * own + 5 * own**2 * attends)
            activations += level.blocks * level.pixels * (6 * wide + 12 * own + 16 * own * attends)
            activations += level.attention_maps * attends
        return SizeBound(weights, activations)


@dataclass(frozen=True)
class MPUNet(NetworkSettings):
    """A U-Net that keeps every activation and weight at unit magnitude (Karras et al. 2024, EDM2, config G).

    Level i works at 1/2^i of the image's height and width. Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "mpunet"
    model: ClassVar[str] = "unfog.models.edm2_unet:MPUNetModel"
    fixed_norm_weights: ClassVar[bool] = True
    prefers_channels_last: ClassVar[bool] = True
    reference_lr: ClassVar[float] = 3e-2  # docs/decisions/0013-networks.md
    # Weights have the same length in every size; the fourth root goes through Karras et al. (2024, table 6).
    lr_exponent: ClassVar[float] = 0.25
    channels: tuple[int, ...] = (48, 80, 144)
    """Channels of each level, full resolution first; one level more halves the resolution once more."""
    blocks: int = 1
    """Residual blocks of a level on the way down, besides the one that halves; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True)
    """Whether self-attention follows every residual block of a level; it costs (height x width)^2."""
    head_channels: int = 16
    """Channels of one attention head; 0 is a single head over all channels."""
    dropout: float = setting(0.0, resume="free")
    """Probability of dropping an activation inside a residual block; 0.1 for small sets of images."""
    time_scale: float = 1.0
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, or that no network has."""
        check_levels(self.channels, self.blocks, self.attention)
        check_condition(self.dropout, self.time_scale)
        check_heads(tuple(c for c, attends in zip(self.channels, self.attention) if attends), self.head_channels)

    def check(self, size: int | tuple[int, int]) -> None:
        check_halving(len(self.channels), size)

    def layout(self, height: int, width: int) -> str:
        return describe_levels(len(self.channels), height, width)

    def size_bound(self, channels: int, side: int, conditions: int) -> SizeBound:
        width = max(self.channels)
        weights, activations = float(width * (conditions + self.channels[0])), 0.0
        for level in level_bounds(self.channels, self.blocks, self.head_channels, side):
            # Every block is taken to be as wide as all that it might be joined with.
            wide, own, attends = level.widest, level.channels, self.attention[level.number]
            weights += level.blocks * wide * (9 * wide + width + 5 * own * attends)
            activations += level.blocks * level.pixels * (14 * wide + 30 * own * attends)
            activations += level.attention_maps * attends
        return SizeBound(weights, activations)


@dataclass(frozen=True)
class DiT(NetworkSettings):
    """A transformer over patches of the image (Peebles & Xie 2023), with today's blocks: RMSNorm, SwiGLU, rotary
    positions in two dimensions, normalised queries and keys.

    Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "dit"
    model: ClassVar[str] = "unfog.models.dit:DiTModel"
    reference_lr: ClassVar[float] = 5e-3  # docs/decisions/0013-networks.md
    width: int = 256
    """Channels of a token."""
    depth: int = 6
    """Blocks of attention and SwiGLU."""
    head_channels: int = 32
    """Channels of one attention head, a multiple of 4 that divides the width."""
    patch: int = 2
    """Side of the square of pixels that makes a token; twice the side is about 4 times as fast, and coarser."""
    modulation: Literal["shared", "block"] = "shared"
    """How the condition reaches blocks: by a layer that they share (adaLN-single), or one in each (adaLN-zero)."""
    dropout: float = setting(0.0, resume="free")
    """Probability of dropping an activation where a branch ends; 0.1 for small sets of images."""
    time_scale: float = 1.0
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, or that no network has."""
        check_condition(self.dropout, self.time_scale)
        if not (8 <= self.width <= 16384 and 1 <= self.depth <= 200):
            raise RequestError(
                f"width = {self.width} and depth = {self.depth} make no network; width is from 8 to 16384, depth from "
                "1 to 200"
            )
        if not 1 <= self.patch <= 64:
            raise RequestError(f"patch = {self.patch} must be from 1 to 64 pixels; 2 or 4 is usual")
        if self.head_channels < 4 or self.head_channels % 4 or self.width % self.head_channels:
            raise RequestError(
                f"head_channels = {self.head_channels} must be a multiple of 4 that divides width = {self.width}, as "
                "two dimensions take pairs of channels each; 32 or 64 is usual"
            )

    def check(self, size: int | tuple[int, int]) -> None:
        for side in (size, size) if isinstance(size, int) else size:
            if side < self.patch or side % self.patch:
                nearest = max(1, round(side / self.patch)) * self.patch
                raise RequestError(
                    f"size = {side} is no multiple of patch = {self.patch}; try size = {nearest}, or another patch"
                )

    def layout(self, height: int, width: int) -> str:
        tokens = f"{width // self.patch}x{height // self.patch} patches of {self.patch}x{self.patch}"
        return f"in {self.depth} blocks over {tokens} pixels"

    def size_bound(self, channels: int, side: int, conditions: int) -> SizeBound:
        width, tokens, heads = self.width, (side / self.patch) ** 2, self.width / self.head_channels
        values = self.patch**2 * 2 * max(1, channels)  # of a patch, in and out
        weights = width * (self.depth * 19.0 * (width + 8) + 12 * width + conditions + 2 * values)
        activations = self.depth * tokens * (60 * width + 4 * heads * tokens) + tokens * (8 * width + values)
        return SizeBound(weights, activations)


Architecture = UNet | MPUNet | DiT | CustomNetwork
ARCHITECTURES = (UNet, MPUNet, DiT)
"""The built-in networks."""


SIZES: dict[str, Architecture] = {
    # 0.99M parameters: a three-minute demonstration at 28x28 or 32x32 on two CPU cores. Most of them work at 7x7,
    # where they cost least; full resolution is narrow.
    "tiny": UNet(channels=(16, 32, 80), mid_attention=False, head_channels=16, norm_groups=8),
    # 4.1M: an evening on a laptop, or minutes on a GPU, at 28x28 to 64x64.
    "small": UNet(),
    # 35.7M: DDPM's CIFAR-10 network (Ho et al. 2020, appendix B), in the words of google/ddpm-cifar10-32.
    "cifar10": UNet(
        channels=(128, 256, 256, 256),
        blocks=2,
        attention=(False, True, False, False),
        head_channels=0,
        dropout=0.1,
        norm_eps=1e-6,
        scale_shift=False,
        freq_shift=1,
        flip_sin_to_cos=False,
        downsample_padding=0,
    ),
    # 35.4M: 64x64 on one GPU.
    "base": UNet(
        channels=(128, 192, 256, 256),
        blocks=2,
        attention=(False, False, True, True),
        head_channels=64,
        dropout=0.1,
    ),
    # Of the same sizes, for the same images.
    "mp-tiny": MPUNet(channels=(16, 32, 80)),
    "mp-small": MPUNet(),
    "mp-base": MPUNet(channels=(128, 192, 256, 256), blocks=2, attention=(False, False, True, True), head_channels=64),
    # A side that the patch divides; at 64x64, dit-small:patch=4 or dit-base:patch=4 has as many tokens as 32x32.
    "dit-tiny": DiT(width=128, depth=4),
    "dit-small": DiT(),
    "dit-base": DiT(width=512, depth=10, head_channels=64),
}
