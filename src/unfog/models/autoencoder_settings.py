"""What a codec looks like, as plain values. Imports no torch, so that `--help` stays quick."""

from __future__ import annotations

from dataclasses import dataclass

from unfog.errors import RequestError

FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Autoencoder:
    """A convolutional autoencoder whose latents are Gaussian (Kingma & Welling 2014), and what its training weighs."""

    factor: int = 0
    """Pixels of an image across one of its latents: 2, 4, 8 or 16. 0: this run trains no codec."""
    latent_channels: int = 4
    """Numbers at each place of a latent; more keep more, and are more to learn for the network that draws them."""
    channels: tuple[int, ...] = ()
    """Channels at 1/2, 1/4, … of the size, down to 1/factor."""
    blocks: int = 1
    """Residual blocks of each of these on the way down; on the way up there is one more."""
    norm_groups: int = 8
    """Groups of the group normalisation; divides all channels."""
    kl: float = 1e-3
    """Weight of the divergence of the latents from a standard normal, per number, beside a mean error in [-1, 1]."""
    pyramid: float = 1.0
    """Weight of the mean error in each band of a Laplacian pyramid: edges and textures, which plain error blurs."""

    def __post_init__(self) -> None:
        if self.factor not in (0, *FACTORS):
            raise RequestError(f"factor = {self.factor} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
        if not 1 <= self.latent_channels <= 256:
            raise RequestError(f"latent_channels = {self.latent_channels} must be from 1 to 256; 4 is usual")
        levels = max(0, self.factor.bit_length() - 1)
        if len(self.channels) != levels or not all(4 <= c <= 4096 for c in self.channels):
            raise RequestError(
                f"channels = {list(self.channels)[:16]} make no codec of factor {self.factor}; give {levels} levels of "
                "4 to 4096 channels"
            )
        if not 1 <= self.blocks <= 100:
            raise RequestError(f"blocks = {self.blocks} must be from 1 to 100; 1 is usual")
        if not 1 <= self.norm_groups <= 4096 or any(c % self.norm_groups for c in self.channels):
            raise RequestError(f"norm_groups = {self.norm_groups} must be from 1, and divide {list(self.channels)}")
        if not (0 <= self.kl <= 10 and 0 <= self.pyramid <= 100):
            raise RequestError(f"kl = {self.kl} and pyramid = {self.pyramid} must be from 0 to 10 and from 0 to 100")

    def check(self, size: int) -> None:
        """RequestError unless images of this side can be encoded."""
        check_multiple(size, self.factor)


WIDTHS: dict[str, tuple[int, ...]] = {
    # 0.33M parameters at factor 4, 0.94M at factor 8: minutes on a laptop.
    "tiny": (32, 64, 96, 128),
    # 1.3M at factor 4, 3.0M at factor 8: an hour on two CPU cores, or minutes on a GPU.
    "small": (64, 128, 160, 192),
    # 5.1M at factor 4, 12M at factor 8.
    "base": (128, 256, 320, 384),
}
"""Channels at 1/2, 1/4, 1/8 and 1/16 of the size, by the name of a preset."""


@dataclass(frozen=True)
class Latents:
    """What a codec makes of the images of a run, as it was found when the run began."""

    sha256: str = ""
    """Digest of the codec's files; "" where the network sees pixels."""
    factor: int = 0
    """Pixels across one of them."""
    channels: int = 0
    """Numbers at each place."""
    mean: tuple[float, ...] = ()
    """Of each channel over the training images; () before it is measured."""
    deviation: tuple[float, ...] = ()
    """Standard deviation of each channel about it."""

    def __post_init__(self) -> None:
        if not 0 <= self.factor <= 64:
            raise RequestError(f"factor = {self.factor} must be from 0 to 64")
        if not 0 <= self.channels <= 1024:
            raise RequestError(f"channels = {self.channels} must be from 0 to 1024")
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (0, self.channels):
                raise RequestError(f"{name} = {list(values)[:8]} must have a value for each of {self.channels}")
        if not all(value > 0 for value in self.deviation):
            raise RequestError(f"deviation = {list(self.deviation)[:8]} must be above 0")


def check_multiple(size: int, factor: int) -> None:
    """RequestError unless a codec of this factor takes images of this side."""
    if size % factor:
        near = max(1, round(size / factor)) * factor
        raise RequestError(f"size = {size} is no multiple of {factor}, as the codec needs; try size = {near}")
