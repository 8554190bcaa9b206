"""What a network looks like, as plain values. Imports no torch, so that `--help` stays quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unfog.errors import RequestError


@dataclass(frozen=True)
class UNet:
    """A U-Net of residual blocks (DDPM, appendix B), equal key by key to what diffusers calls UNet2DModel.

    Level i works at 1/2^i of the image's height and width. Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "unet"
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
    dropout: float = 0.0
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
        _check_levels(self.channels, self.blocks, self.attention)
        _check_condition(self.dropout, self.time_scale)
        self._check_ranges()
        for channels in self.channels:
            if self.norm_groups < 1 or channels % self.norm_groups:
                raise RequestError(
                    f"channels = {channels} is not a multiple of norm_groups = {self.norm_groups}; "
                    f"try norm_groups = {_common_divisor(self.channels, 32)}"
                )
        _check_heads(self.attending(), self.head_channels)

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
        """Raise `RequestError` unless images of `size` pixels (side, or height and width) fit."""
        _check_halving(len(self.channels), size)

    def layout(self, height: int, width: int) -> str:
        """How it works on images of this size, for people."""
        return _levels_of(len(self.channels), height, width)


@dataclass(frozen=True)
class MPUNet:
    """A U-Net that keeps every activation and weight at unit magnitude (Karras et al. 2024, EDM2, config G).

    Level i works at 1/2^i of the image's height and width. Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "mpunet"
    channels: tuple[int, ...] = (48, 80, 144)
    """Channels of each level, full resolution first; one level more halves the resolution once more."""
    blocks: int = 1
    """Residual blocks of a level on the way down, besides the one that halves; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True)
    """Whether self-attention follows every residual block of a level; it costs (height x width)^2."""
    head_channels: int = 16
    """Channels of one attention head; 0 is a single head over all channels."""
    dropout: float = 0.0
    """Probability of dropping an activation inside a residual block; 0.1 for small sets of images."""
    time_scale: float = 1.0
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, or that no network has."""
        _check_levels(self.channels, self.blocks, self.attention)
        _check_condition(self.dropout, self.time_scale)
        _check_heads(tuple(c for c, attends in zip(self.channels, self.attention) if attends), self.head_channels)

    def check(self, size: int | tuple[int, int]) -> None:
        """Raise `RequestError` unless images of `size` pixels (side, or height and width) fit."""
        _check_halving(len(self.channels), size)

    def layout(self, height: int, width: int) -> str:
        """How it works on images of this size, for people."""
        return _levels_of(len(self.channels), height, width)


@dataclass(frozen=True)
class DiT:
    """A transformer over patches of the image (Peebles & Xie 2023), with today's blocks: RMSNorm, SwiGLU, rotary
    positions in two dimensions, normalised queries and keys.

    Raises `RequestError` for contradictions.
    """

    kind: ClassVar[str] = "dit"
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
    dropout: float = 0.0
    """Probability of dropping an activation where a branch ends; 0.1 for small sets of images."""
    time_scale: float = 1.0
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, or that no network has."""
        _check_condition(self.dropout, self.time_scale)
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
        """Raise `RequestError` unless images of `size` pixels (side, or height and width) fit."""
        for side in (size, size) if isinstance(size, int) else size:
            if side < self.patch or side % self.patch:
                nearest = max(1, round(side / self.patch)) * self.patch
                raise RequestError(
                    f"size = {side} is no multiple of patch = {self.patch}; try size = {nearest}, or another patch"
                )

    def layout(self, height: int, width: int) -> str:
        """How it works on images of this size, for people."""
        tokens = f"{width // self.patch}x{height // self.patch} patches of {self.patch}x{self.patch}"
        return f"in {self.depth} blocks over {tokens} pixels"


Architecture = UNet | MPUNet | DiT
ARCHITECTURES = (UNet, MPUNet, DiT)


def _check_levels(channels: tuple[int, ...], blocks: int, attention: tuple[bool, ...]) -> None:
    """Raise `RequestError` unless these make the levels of a U-Net."""
    if len(channels) > 12 or max(channels, default=0) > 16384 or blocks > 100:
        raise RequestError(
            f"channels = {list(channels)[:16]} and blocks = {blocks} are beyond any network; "
            "there are at most 12 levels, 16384 channels and 100 blocks"
        )
    if min(channels, default=0) < 4 or blocks < 1:
        raise RequestError(
            f"channels = {list(channels)} and blocks = {blocks} make no network; "
            "give at least one level of 4 channels, and one block"
        )
    if len(attention) != len(channels):
        raise RequestError(
            f"attention has {len(attention)} entries for {len(channels)} levels of channels; "
            "give one true or false for each level"
        )


def _check_condition(dropout: float, time_scale: float) -> None:
    """Raise `RequestError` unless these are in range."""
    if not 0 <= dropout < 1:
        raise RequestError(f"dropout = {dropout} is no probability below 1; try 0.1")
    if not 1e-6 <= time_scale <= 1e6:
        raise RequestError(f"time_scale = {time_scale} must be from 1e-6 to 1e6; 1 leaves timesteps as they are")


def _check_heads(attending: tuple[int, ...], head_channels: int) -> None:
    """Raise `RequestError` unless the channels of all places with attention are whole heads."""
    if head_channels < 0:
        raise RequestError(f"head_channels = {head_channels} must not be negative; 0 is one head, 32 is usual")
    for channels in attending:
        if head_channels and channels % head_channels:
            raise RequestError(
                f"channels = {channels} with attention is not a multiple of head_channels = "
                f"{head_channels}; try {_common_divisor(attending, 32)}, or 0 for one head"
            )


def _check_halving(levels: int, size: int | tuple[int, int]) -> None:
    """Raise `RequestError` unless both sides can be halved between that many levels."""
    factor = 2 ** (levels - 1)
    for side in (size, size) if isinstance(size, int) else size:
        # A single pixel at the lowest level could not be normalised when one image is sampled.
        if side < 2 * factor or side % factor:
            nearest = max(2, round(side / factor)) * factor
            raise RequestError(
                f"size = {side} is no multiple of {factor} from {2 * factor} on, as {levels} levels "
                f"need; try size = {nearest}, or fewer levels"
            )


def _levels_of(levels: int, height: int, width: int) -> str:
    return f"in {levels} levels for {width}x{height} pixels, the lowest at {height // 2 ** (levels - 1)}"


def _common_divisor(values: tuple[int, ...], limit: int) -> int:
    """Return the largest number up to `limit` that divides all `values`."""
    return next(n for n in range(limit, 0, -1) if all(value % n == 0 for value in values))


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
