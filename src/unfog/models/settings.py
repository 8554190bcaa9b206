"""Settings of the networks of Unfog and of other programs. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from unfog.errors import RequestError
from unfog.models.given_network import GivenNetwork
from unfog.models.network_settings import CustomNetwork, LevelSettings, PatchSettings
from unfog.settings import check_bounds, setting
from unfog.values.condition_format import TEXT_HEAD, PretrainedText

_MOST_HEAD_CHANNELS = 64  # largest value that an error message proposes
USUAL_TEXT_LAYERS = 2
"""Layers of the encoder of texts, if none are given."""


@dataclass(frozen=True)
class TextEncoderSettings:
    """The transformer that reads the texts of images, with --condition text. Its weights are part of the network."""

    layers: int = setting(0, auto=0, at_least=0, at_most=24, usual="2")
    """Layers of attention and MLP; more for long captions whose words depend on each other."""
    width: int = setting(0, auto=0, at_least=0, at_most=4096, usual="64 to 512")
    """Channels of a token, a multiple of 32."""
    pretrained: str = setting("", metavar="FOLDER", added_later=True, see="docs/text.md")
    """Local folder of Hugging Face (CLIP, SigLIP, T5, BERT) whose encoder, frozen, reads texts before these layers."""
    sha256: str = setting("", added_later=True, hidden=True)
    """Digest of the files of that folder, as found."""
    pretrained_width: int = setting(0, at_least=0, at_most=16384, added_later=True, hidden=True)
    """Width of its tokens, as found."""
    pretrained_length: int = setting(0, at_least=0, at_most=512, added_later=True, hidden=True)
    """Tokens of a text that it reads at most, as found."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.width % TEXT_HEAD:
            raise RequestError(
                f"text_encoder.width = {self.width} must be a multiple of {TEXT_HEAD}, the channels of a head; try "
                f"{max(1, round(self.width / TEXT_HEAD)) * TEXT_HEAD}"
            )

    @property
    def model(self) -> PretrainedText | None:
        """The frozen encoder; None without one, or before its folder was read."""
        if not self.pretrained or not self.pretrained_width:
            return None
        return PretrainedText(self.pretrained, self.sha256, self.pretrained_width, self.pretrained_length)

    @staticmethod
    def width_for(widest: int) -> int:
        """Return the usual width for a network whose widest layer has so many channels."""
        return min(512, max(64, -(-widest // TEXT_HEAD) * TEXT_HEAD))


class _LevelBound(NamedTuple):
    """Bounds on one level of a U-Net."""

    number: int
    channels: int
    pixels: float
    blocks: int
    widest: int
    """Channels that a block may see: those of the levels around it, concatenated."""
    attention_maps: float
    """Numbers of all attention maps of the level, if it has attention."""


class _OwnLevels(LevelSettings):
    """Base of the settings of both of our U-Nets."""

    wraps: ClassVar[bool] = True
    takes_mask: ClassVar[bool] = True
    takes_text: ClassVar[bool] = True
    lowest_side: ClassVar[int] = 2  # a single pixel could not be normalised when one image is sampled
    remedy: ClassVar[str] = ", or fewer levels"
    channels: tuple[int, ...]
    blocks: int
    head_channels: int

    @property
    def widest(self) -> int:
        return max(self.channels)

    def attending(self) -> tuple[int, ...]:
        """Return the channels of each place that has attention."""
        return self._channels_that_attend(self.attention)

    def _channels_that_attend(self, attention: tuple[bool, ...]) -> tuple[int, ...]:
        return tuple(c for c, attends in zip(self.channels, attention) if attends)

    def __post_init__(self) -> None:
        """Raise `RequestError` unless levels and attention heads fit together."""
        channels, blocks = list(self.channels)[:16], self.blocks
        valid = 1 <= len(self.channels) <= 12 and 1 <= blocks <= 100
        if not valid or min(self.channels) < 4 or max(self.channels) > 16384:
            raise RequestError(
                f"channels = {channels} or blocks = {blocks} is out of range; give 1 to 12 levels of 4 to "
                "16384 channels each, and 1 to 100 blocks"
            )
        check_bounds(self)
        if refused := self._refusals():
            remedy = ",".join(f"{name}={value}" for _, name, value in refused)
            raise RequestError(f"{', and '.join(said for said, _, _ in refused)}; try {remedy}")

    def _refusals(self) -> list[tuple[str, str, object]]:
        """Return all settings that do not fit the channels, as (what is wrong, name, a value that fits)."""
        refused: list[tuple[str, str, object]] = []
        attention, levels = self.attention, len(self.channels)
        if len(attention) != levels:
            said = f"attention has {len(attention)} entries, but channels has {levels} levels"
            attention = (False,) * (levels - 1) + (True,)
            refused.append((said, "attention", "/".join(f"{attends:d}" for attends in attention)))
        refused += self._groups_refused()
        heads, attending = self.head_channels, self._channels_that_attend(attention)
        if heads and (wrong := [c for c in attending if c % heads]):
            said = f"channels = {wrong[0]} must be a multiple of head_channels = {heads} in a level with attention"
            refused.append((said, "head_channels", _common_divisor(attending)))
        return refused

    def _groups_refused(self) -> list[tuple[str, str, object]]:
        """Return the same for the groups of a normalisation; the default has none."""
        return []

    def _level_bounds(self, side: float) -> Iterator[_LevelBound]:
        count = 2 * self.blocks + 4  # down, up, the middle ones and resampling
        for number, own in enumerate(self.channels):
            pixels, heads = (side / 2**number) ** 2, own / (self.head_channels or own)
            around = self.channels[max(0, number - 1)] + self.channels[min(number + 1, len(self.channels) - 1)]
            yield _LevelBound(number, own, pixels, count, own + around, count * 4 * heads * pixels**2)

    def text_bound(self, side: float, text_width: int, tokens: int) -> tuple[float, float]:
        weights = activations = 0.0
        for level in self._level_bounds(side):
            if self.attention[level.number] or level.number == len(self.channels) - 1:
                more = _text_attention_bound(level.channels, level.pixels, self.head_channels, text_width, tokens)
                weights, activations = weights + level.blocks * more[0], activations + level.blocks * more[1]
        return weights, activations


def _text_attention_bound(
    channels: int, pixels: float, head_channels: int, text_width: int, tokens: int
) -> tuple[float, float]:
    """Return the bounds of one layer of attention to a text: (weights, numbers kept of each image)."""
    heads = channels / min(channels, head_channels or channels)
    weights = 2.0 * channels * (channels + text_width + 4)  # queries and output, keys and values, norms
    return weights, pixels * (24 * channels + 6 * heads * tokens) + 12 * tokens * channels


def _common_divisor(values: tuple[int, ...], limit: int = 32) -> int:
    """Return the largest number up to `limit` that divides all `values`."""
    return next(n for n in range(limit, 0, -1) if all(value % n == 0 for value in values))


@dataclass(frozen=True)
class UNet(_OwnLevels):
    """A U-Net of residual blocks (DDPM, appendix B), equal key by key to what diffusers calls UNet2DModel."""

    kind: ClassVar[str] = "unet"
    model: ClassVar[str] = "unfog.models.unet:UNetModel"
    muon_lr_factor: ClassVar[float] = 2.0
    channels: tuple[int, ...] = (64, 96, 128)
    """Channels of each level, full resolution first; one level more halves the resolution once more."""
    blocks: int = 1
    """Residual blocks of a level on the way down; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True)
    """Self-attention after every residual block of a level; it costs (height x width)^2."""
    mid_attention: bool = True
    """Self-attention at the lowest resolution, between the two middle blocks."""
    head_channels: int = setting(32, at_least=0, usual="32")
    """Channels of one attention head; 0 is a single head over all channels, as in DDPM."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation inside a residual block; 0.1 for small sets of images."""
    norm_groups: int = setting(32, at_least=1)
    """Groups of every group normalisation; must divide all `channels`."""
    norm_eps: float = setting(1e-5, above=0, at_most=1, usual="1e-5")
    """Added to the variance in group normalisation."""
    scale_shift: bool = True
    """The condition scales and shifts after the second normalisation (ADM), or only shifts before (DDPM)."""
    time_scale: float = setting(1.0, at_least=1e-6, at_most=1e6, usual="1")
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""
    freq_shift: int = setting(0, at_least=0, at_most=1)
    """Sinusoid i of n has frequency 10000^(-i / (n - freq_shift)): 1 in the original DDPM, 0 in most."""
    flip_sin_to_cos: bool = True
    """Cosines before sines in the sinusoidal embedding; False in the original DDPM."""
    downsample_padding: Literal[0, 1] = 1
    """1 pads a downsampling convolution on all sides; 0 only right and below, as the original DDPM does."""

    def _groups_refused(self) -> list[tuple[str, str, object]]:
        wrong = [channels for channels in self.channels if channels % self.norm_groups]
        said = f"channels = {wrong[0]} must be a multiple of norm_groups = {self.norm_groups}" if wrong else ""
        return [(said, "norm_groups", _common_divisor(self.channels))] if wrong else []

    def _channels_that_attend(self, attention: tuple[bool, ...]) -> tuple[int, ...]:
        return super()._channels_that_attend(attention) + self.channels[-1:] * self.mid_attention

    def size_bound(self, channels: int, side: float, conditions: int) -> tuple[float, float]:
        first = self.channels[0]
        weights, activations = 4.0 * first * (conditions + 5 * first + 1), 0.0  # 5: the embedding of the noise level
        for level in self._level_bounds(side):
            wide, own, lowest = level.widest, level.channels, level.number == len(self.channels) - 1
            attends = self.attention[level.number] or (self.mid_attention and lowest)
            weights += level.blocks * (9 * wide * own + 9 * own**2 + 8 * first * own + 5 * own**2 * attends)
            activations += level.blocks * level.pixels * (6 * wide + 12 * own + 16 * own * attends)
            activations += level.attention_maps * attends
        return weights, activations


@dataclass(frozen=True)
class MPUNet(_OwnLevels):
    """A U-Net that keeps every activation and weight at unit magnitude (Karras et al. 2024, EDM2, config G)."""

    kind: ClassVar[str] = "mpunet"
    model: ClassVar[str] = "unfog.models.edm2_unet:MPUNetModel"
    fixed_norm_weights: ClassVar[bool] = True
    reference_lr: ClassVar[float] = 3e-2  # docs/decisions/0013-networks.md
    # Weights have the same length in every size; the fourth root goes through Karras et al. (2024, table 6).
    lr_exponent: ClassVar[float] = 0.25
    channels: tuple[int, ...] = (48, 80, 144)
    """Channels of each level, full resolution first; one level more halves the resolution once more."""
    blocks: int = 1
    """Residual blocks of a level on the way down, besides the one that halves; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True)
    """Self-attention after every residual block of a level; it costs (height x width)^2."""
    head_channels: int = setting(16, at_least=0, usual="32")
    """Channels of one attention head; 0 is a single head over all channels."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation inside a residual block; 0.1 for small sets of images."""
    time_scale: float = setting(1.0, at_least=1e-6, at_most=1e6, usual="1")
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    def size_bound(self, channels: int, side: float, conditions: int) -> tuple[float, float]:
        width = max(self.channels)
        weights, activations = float(width * (conditions + self.channels[0])), 0.0
        for level in self._level_bounds(side):
            # Every block is taken to be as wide as all that it might be joined with.
            wide, own, attends = level.widest, level.channels, self.attention[level.number]
            weights += level.blocks * wide * (9 * wide + width + 5 * own * attends)
            activations += level.blocks * level.pixels * (14 * wide + 30 * own * attends)
            activations += level.attention_maps * attends
        return weights, activations


@dataclass(frozen=True)
class DiT(PatchSettings):
    """A transformer over patches (Peebles & Xie 2023): RMSNorm, SwiGLU, 2-D rotary positions, normalised queries."""

    remedy: ClassVar[str] = ", or another patch"
    kind: ClassVar[str] = "dit"
    model: ClassVar[str] = "unfog.models.dit:DiTModel"
    wraps: ClassVar[bool] = True
    takes_mask: ClassVar[bool] = True
    takes_text: ClassVar[bool] = True
    reference_lr: ClassVar[float] = 5e-3  # docs/decisions/0013-networks.md
    width: int = setting(256, at_least=8, at_most=16384)
    """Channels of a token."""
    depth: int = setting(6, at_least=1, at_most=200)
    """Blocks of attention and SwiGLU."""
    head_channels: int = 32
    """Channels of one attention head, a multiple of 4 that divides the width."""
    patch: int = setting(2, at_least=1, at_most=64, usual="2 or 4")
    """Side of the square of pixels that makes a token; twice the side is about 4 times as fast, and coarser."""
    modulation: Literal["shared", "block"] = "shared"
    """Layer that maps the condition for the blocks: one that all share (adaLN-single), or one in each (adaLN-zero)."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation where a branch ends; 0.1 for small sets of images."""
    time_scale: float = setting(1.0, at_least=1e-6, at_most=1e6, usual="1")
    """Multiplies the noise condition before its sinusoids: 1 for timesteps, more for a log-SNR condition."""

    @property
    def widest(self) -> int:
        return self.width

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.head_channels < 4 or self.head_channels % 4 or self.width % self.head_channels:
            fitting = [n for n in range(4, min(self.width, _MOST_HEAD_CHANNELS) + 1, 4) if self.width % n == 0]
            remedy = f"give {' or '.join(map(str, fitting[-2:]))}" if fitting else "give a width that 32 divides"
            raise RequestError(
                f"head_channels = {self.head_channels} must be a multiple of 4 that divides width = "
                f"{self.width}, because rows and columns each use pairs of channels; {remedy}"
            )

    def size_bound(self, channels: int, side: float, conditions: int) -> tuple[float, float]:
        width, tokens, heads = self.width, (side / self.patch) ** 2, self.width / self.head_channels
        values = self.patch**2 * 2 * max(1, channels)  # of a patch, in and out
        weights = width * (self.depth * 19.0 * (width + 8) + 12 * width + conditions + 2 * values)
        activations = self.depth * tokens * (60 * width + 4 * heads * tokens) + tokens * (8 * width + values)
        return weights, activations

    def text_bound(self, side: float, text_width: int, tokens: int) -> tuple[float, float]:
        patches = (side / self.patch) ** 2
        weights, activations = _text_attention_bound(self.width, patches, self.head_channels, text_width, tokens)
        return self.depth * weights, self.depth * activations


class _ForeignLevels(LevelSettings):
    """Base of the U-Nets: level i has `width * mults[i]` channels."""

    width: int
    mults: tuple[int, ...]

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 1 <= len(self.mults) <= 12 or not all(1 <= mult <= 64 for mult in self.mults):
            raise RequestError(f"mults = {list(self.mults)[:16]} must be 1 to 12 factors from 1 to 64")
        if len(self.attention) != len(self.mults):
            raise RequestError(
                f"attention has {len(self.attention)} entries, but mults has {len(self.mults)} levels; give one true "
                "or false for each level"
            )


@dataclass(frozen=True)
class DdpmPytorch(_ForeignLevels):
    """The `Unet` of denoising-diffusion-pytorch 2: RMS norms, and linear attention at levels without full attention."""

    kind: ClassVar[str] = "ddpm-pytorch"
    model: ClassVar[str] = "unfog.models.foreign.ddpm_pytorch:DdpmPytorchModel"
    width: int = setting(64, at_least=4, at_most=8192)
    """Its `dim`."""
    first: int = setting(0, at_least=0, at_most=8192)
    """Its `init_dim`; 0 is `width`."""
    mults: tuple[int, ...] = (1, 2, 4, 8)
    """Its `dim_mults`."""
    attention: tuple[bool, ...] = (False, False, False, True)
    """Its `full_attn`; the other levels have linear attention."""
    heads: int = setting(4, at_least=1, at_most=256)
    """Its `attn_heads`."""
    head_channels: int = setting(32, at_least=1, at_most=1024)
    """Its `attn_dim_head`."""
    memory: int = setting(4, at_least=1, at_most=1024)
    """Learned keys and values of each attention, besides those of the pixels."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation in the first half of a residual block."""


@dataclass(frozen=True)
class Edm(_ForeignLevels):
    """The U-Nets of EDM (Karras et al. 2022): DDPM++ and NCSN++ (Song et al. 2021), ADM (Dhariwal and Nichol 2021)."""

    kind: ClassVar[str] = "edm"
    model: ClassVar[str] = "unfog.models.foreign.edm:EdmModel"
    architecture: Literal["ddpmpp", "ncsnpp", "adm"] = "ddpmpp"
    """The `--arch` of its training script."""
    width: int = setting(128, at_least=4, at_most=8192)
    """Its `--cbase`."""
    mults: tuple[int, ...] = (2, 2, 2)
    """Its `--cres`."""
    blocks: int = setting(4, at_least=1, at_most=100)
    """Residual blocks of a level on the way down; the way up has one more."""
    attention: tuple[bool, ...] = (False, True, False)
    """Self-attention in the blocks of a level."""
    head_channels: int = setting(64, at_least=1, at_most=8192)
    """Channels of one attention head of adm; the others have a single head."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.13", resume="free")
    """Probability of dropping an activation inside a residual block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Groups hold at least four channels each, in EDM's code.
        if any(self.width * mult % 4 for mult in (1, *self.mults)):
            raise RequestError(f"width = {self.width} must be a multiple of 4, for its group normalisations")


@dataclass(frozen=True)
class Edm2(_ForeignLevels):
    """The U-Net of EDM2 (Karras et al. 2024), with its random Fourier features; `mpunet` is our own form of it."""

    kind: ClassVar[str] = "edm2"
    model: ClassVar[str] = "unfog.models.foreign.edm2:Edm2Model"
    fixed_norm_weights: ClassVar[bool] = True
    # Those of `mpunet`, whose weights are kept at the same lengths.
    reference_lr: ClassVar[float] = 3e-2
    lr_exponent: ClassVar[float] = 0.25
    width: int = setting(192, at_least=4, at_most=8192)
    """Its `model_channels`."""
    mults: tuple[int, ...] = (1, 2, 3, 4)
    """Its `channel_mult`."""
    blocks: int = setting(3, at_least=1, at_most=100)
    """Residual blocks of a level on the way down, besides the one that halves; the way up has one more."""
    attention: tuple[bool, ...] = (False, False, True, True)
    """Self-attention in the blocks of a level."""
    head_channels: int = setting(64, at_least=1, at_most=8192)
    """Channels of one attention head."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation inside a residual block."""


@dataclass(frozen=True)
class DiffusersDiT(PatchSettings):
    """The DiT of Peebles and Xie (2023) as diffusers has it: layer norms, added positions, GELU; `dit` is our own."""

    kind: ClassVar[str] = "diffusers-dit"
    model: ClassVar[str] = "unfog.models.foreign.diffusers_dit:DiffusersDiTModel"
    # Those of the paper's largest network, DiT-XL/2.
    width: int = setting(1152, at_least=4, at_most=16384)
    """Channels of a token: heads times channels of a head, a multiple of 4."""
    depth: int = setting(28, at_least=1, at_most=200)
    """Blocks."""
    head_channels: int = setting(72, at_least=1, at_most=16384)
    """Channels of one attention head."""
    patch: int = setting(2, at_least=1, at_most=64, usual="2, 4 or 8")
    """Side of the square of pixels, or latents, that makes a token."""
    embeddings: Literal["shared", "block"] = "shared"
    """Noise level and class are embedded once for all blocks, or in each block anew."""
    norm_eps: float = setting(1e-5, above=0, at_most=1, usual="1e-5")
    """Added to the variance in the second norm of a block."""
    dropout: float = setting(0.0, at_least=0, below=1, usual="0.1", resume="free")
    """Probability of dropping an activation where a branch ends."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.width % 4 or self.width % self.head_channels:
            raise RequestError(
                f"width = {self.width} must be a multiple of 4 and of head_channels = {self.head_channels}"
            )


ForeignNetwork = DdpmPytorch | Edm | Edm2 | DiffusersDiT
FOREIGN_NETWORKS = (DdpmPytorch, Edm, Edm2, DiffusersDiT)
"""The networks of other programs."""

Architecture = UNet | MPUNet | DiT | ForeignNetwork | CustomNetwork | GivenNetwork
# The built-in networks.
ARCHITECTURES = (UNet, MPUNet, DiT)

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
    # The same parameter counts, for the same images.
    "mp-tiny": MPUNet(channels=(16, 32, 80)),
    "mp-small": MPUNet(),
    "mp-base": MPUNet(channels=(128, 192, 256, 256), blocks=2, attention=(False, False, True, True), head_channels=64),
    # A side that the patch divides; at 64x64, dit-small:patch=4 or dit-base:patch=4 has as many tokens as 32x32.
    "dit-tiny": DiT(width=128, depth=4),
    "dit-small": DiT(),
    "dit-base": DiT(width=512, depth=10, head_channels=64),
}
