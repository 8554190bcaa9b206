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
        self._check_ranges()
        if min(self.channels, default=0) < 4 or self.blocks < 1:
            raise RequestError(
                f"channels = {list(self.channels)} and blocks = {self.blocks} make no network; "
                "give at least one level of 4 channels, and one block"
            )
        if len(self.attention) != len(self.channels):
            raise RequestError(
                f"attention has {len(self.attention)} entries for {len(self.channels)} levels of channels; "
                "give one true or false for each level"
            )
        for channels in self.channels:
            if self.norm_groups < 1 or channels % self.norm_groups:
                raise RequestError(
                    f"channels = {channels} is not a multiple of norm_groups = {self.norm_groups}; "
                    f"try norm_groups = {_common_divisor(self.channels, 32)}"
                )
        for channels in self.attending():
            if self.head_channels and channels % self.head_channels:
                raise RequestError(
                    f"channels = {channels} with attention is not a multiple of head_channels = "
                    f"{self.head_channels}; try {_common_divisor(self.attending(), 32)}, or 0 for one head"
                )

    def _check_ranges(self) -> None:
        if len(self.channels) > 12 or max(self.channels, default=0) > 16384 or self.blocks > 100:
            raise RequestError(
                f"channels = {list(self.channels)[:16]} and blocks = {self.blocks} are beyond any network; "
                "there are at most 12 levels, 16384 channels and 100 blocks"
            )
        if not 0 <= self.dropout < 1:
            raise RequestError(f"dropout = {self.dropout} is no probability below 1; try 0.1")
        if not 0 < self.norm_eps <= 1:
            raise RequestError(f"norm_eps = {self.norm_eps} must be above 0 and at most 1; 1e-5 is usual")
        if not 1e-6 <= self.time_scale <= 1e6:
            raise RequestError(
                f"time_scale = {self.time_scale} must be from 1e-6 to 1e6; 1 leaves timesteps as they are"
            )
        if self.freq_shift not in (0, 1):
            raise RequestError(f"freq_shift = {self.freq_shift} must be 0, or 1 as in the original DDPM")
        if self.head_channels < 0:
            raise RequestError(f"head_channels = {self.head_channels} must not be negative; 0 is one head, 32 is usual")

    def attending(self) -> tuple[int, ...]:
        """Channels of the places that have attention: the levels', then the middle's."""
        levels = tuple(c for c, attends in zip(self.channels, self.attention) if attends)
        return levels + self.channels[-1:] * self.mid_attention

    def check(self, size: int | tuple[int, int]) -> None:
        """Raise `RequestError` unless images of `size` pixels (side, or height and width) fit."""
        factor = 2 ** (len(self.channels) - 1)
        for side in (size, size) if isinstance(size, int) else size:
            # A single pixel at the lowest level could not be normalised when one image is sampled.
            if side < 2 * factor or side % factor:
                nearest = max(2, round(side / factor)) * factor
                raise RequestError(
                    f"size = {side} is no multiple of {factor} from {2 * factor} on, as {len(self.channels)} levels "
                    f"need; try size = {nearest}, or fewer levels"
                )


def _common_divisor(values: tuple[int, ...], limit: int) -> int:
    """Return the largest number up to `limit` that divides all `values`."""
    return next(n for n in range(limit, 0, -1) if all(value % n == 0 for value in values))


SIZES: dict[str, UNet] = {
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
}
