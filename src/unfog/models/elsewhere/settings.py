"""Settings of the networks of other programs, as plain values. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unfog.errors import RequestError
from unfog.models.network_settings import LevelSettings, PatchSettings
from unfog.settings import check_bounds, setting


class _Levels(LevelSettings):
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
class DdpmPytorch(_Levels):
    """The `Unet` of denoising-diffusion-pytorch 2: RMS norms, and linear attention at levels without full attention."""

    kind: ClassVar[str] = "ddpm-pytorch"
    model: ClassVar[str] = "unfog.models.elsewhere.ddpm_pytorch:DdpmPytorchModel"
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
class Edm(_Levels):
    """The U-Nets of EDM (Karras et al. 2022): DDPM++ and NCSN++ (Song et al. 2021), ADM (Dhariwal and Nichol 2021)."""

    kind: ClassVar[str] = "edm"
    model: ClassVar[str] = "unfog.models.elsewhere.edm:EdmModel"
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
class Edm2(_Levels):
    """The U-Net of EDM2 (Karras et al. 2024), with its random Fourier features; `mpunet` is our own form of it."""

    kind: ClassVar[str] = "edm2"
    model: ClassVar[str] = "unfog.models.elsewhere.edm2:Edm2Model"
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
    model: ClassVar[str] = "unfog.models.elsewhere.diffusers_dit:DiffusersDiTModel"
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


Elsewhere = DdpmPytorch | Edm | Edm2 | DiffusersDiT
ELSEWHERE = (DdpmPytorch, Edm, Edm2, DiffusersDiT)
"""The networks of other programs."""
